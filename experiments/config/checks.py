"""Turn a config that Hydra composed, or a file, into a typed and checked config. Every error names the full key.

Ranges are declared beside their fields, in :mod:`experiments.config.schema` and in the classes of options. The few
rules that span several groups are here.

The parent process writes the resolved config once (`save`), and every rank reads it (`load`): ranks never compose.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from experiments.config.budgets import Budget, on_front
from experiments.config.errors import explain
from experiments.config.files import CONF
from experiments.config.identity import CODE, hosts_identity, job_identity
from experiments.config.measured import with_profile
from experiments.config.schema import (
    NOT_OF_A_JOB,
    OPTION_GROUPS,
    CollectivesConfig,
    Config,
    ConfigError,
    LinkConfig,
    ProfileConfig,
    leaves,
    register,
    schema,
)
from experiments.config.started import adapted
from experiments.config.targets import make, plain
from mdcs.options import OptionError, check_value, shown
from mdcs.plan.strategy import Strategy
from mdcs.planner.recompute import KEEP, Planned
from mdcs.planner.registry import decides_schedule
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.schema import Profile


@contextmanager
def composing() -> Iterator[None]:
    """Initialize Hydra for the block, for programs with a command line of their own."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def run_composing(program: Callable[[], int]) -> int:
    """Run a program that composes configs. Return its exit code, or 2 after one line on stderr when a config is wrong.
    """
    try:
        with composing():
            return program()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def compose_config(overrides: Sequence[str], *, like: str | None = None) -> Config:
    """Compose the config of a command line; Hydra must be initialized. Raises ConfigError for every kind of error.

    like: a profile that says what the command line does not, for a job without one.
    """
    try:
        return from_composed(compose("config", list(overrides), return_hydra_config=True), said=overrides, like=like)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(error, overrides) from error


def from_composed(
    composed: DictConfig,
    choices: Mapping[str, str] | None = None,
    *,
    said: Sequence[str] | None = None,
    like: str | None = None,
    adapt: Callable[[Config, Sequence[str]], Config] = adapted,
) -> Config:
    """Return the typed, checked config for a config that Hydra composed. Raises ConfigError.

    - choices: the chosen option of each group, for errors. If `composed` has Hydra's own part, its choices are used
      instead.
    - said: overrides of the command line. What they do not say is taken from the profile that the config names, or from
      `like`. None: the config is complete, and was checked where its files are.
    - adapt: changes the config to the ranks that it will have, before it is checked.

    With a strategy that also decides the schedule, the scheduler and the budget's shares become None.
    """
    if "hydra" in composed:
        choices = composed.hydra.runtime.choices
        composed = composed.copy()
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
    if said is not None:
        composed = with_profile(composed, said, like)
    try:  # Hydra's "+key=value" adds keys that no dataclass has, and a file may have them
        values = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
        config: Any = OmegaConf.to_object(OmegaConf.merge(schema(), values))
    except OmegaConfBaseException as error:
        raise explain(error) from error
    for group in OPTION_GROUPS:
        given = getattr(config, group)
        left_out = not given and group in _MAY_BE_LEFT_OUT
        setattr(config, group, _MAY_BE_LEFT_OUT[group] if left_out else make(group, given, (choices or {}).get(group)))
    assert isinstance(config, Config)
    if decides_schedule(config.strategy):
        config.scheduler = None
        config.budget = dataclasses.replace(config.budget, schedule_share=None, activation_share=None)
    elif config.scheduler is None:
        raise ConfigError("scheduler", f"is needed with strategy={config.strategy.name}, got null")
    if said is not None:
        config = adapt(config, said)
        check(config)
    return config


_MAY_BE_LEFT_OUT = {"scheduler": None, "recompute": KEEP}
"""Groups without which a config is whole: that of a joint strategy, that of an older run."""


def as_mapping(config: Config) -> dict[str, Any]:
    """The job's config as nested dicts of plain values, for YAML and JSON."""
    return {
        field.name: plain(value) if field.name in OPTION_GROUPS else dataclasses.asdict(value)
        for field in dataclasses.fields(config)
        if field.name not in NOT_OF_A_JOB
        for value in [getattr(config, field.name)]
    }


def as_yaml(config: Config) -> str:
    """The resolved config as YAML, in the form that `load` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(as_mapping(config)))


def save(config: Config, path: Path) -> None:
    """Write the resolved config as YAML."""
    path.write_text(as_yaml(config), encoding="utf-8")


def load(path: Path) -> Config:
    """Read a file that `save` wrote, of a config that was checked. Raises ConfigError for keys and types that are wrong."""
    composed = OmegaConf.load(path)
    assert isinstance(composed, DictConfig)
    return from_composed(composed)


# ---- checks


def check(config: Config) -> None:
    """Raise ConfigError for the first value out of its range, and for values that contradict each other."""
    for prefix, group, leaf in leaves(config):
        _check_leaf(prefix, group, leaf)
    _check_combinations(config)


def _check_leaf(prefix: str, group: Any, leaf: dataclasses.Field[Any]) -> None:
    key, value, limits = prefix + leaf.name, getattr(group, leaf.name), leaf.metadata
    name = getattr(group, "name", None)
    if "used_by" in limits and name not in limits["used_by"] and value != _default(leaf):
        raise ConfigError(key, f"has no effect with {prefix}name={name}, got {shown(value)}")
    if value is None and name in limits.get("needed_by", ()):
        raise ConfigError(key, f"is needed with {prefix}name={name}, got null")
    try:
        check_value(key, value, limits)
    except OptionError as error:
        raise ConfigError(key, error.complaint) from error


def _check_combinations(config: Config) -> None:
    budget, run = config.budget, config.run
    if budget.gib is not None and budget.over_floor is not None:
        raise ConfigError("budget.over_floor", "and budget.gib exclude each other, got both")
    if budget.schedule_share is not None and budget.gib is None and budget.over_floor is None:
        raise ConfigError(
            "budget.schedule_share", "needs a budget to divide: set budget.gib or budget.over_floor"
        )
    if budget.activation_share is not None and budget.schedule_share is None:
        raise ConfigError("budget.activation_share", "divides what budget.schedule_share leaves: set both")
    if budget.activation_share is not None and config.recompute != Planned():
        raise ConfigError("budget.activation_share", f"needs recompute=planned, got {config.recompute.name}")
    if budget.gib is not None and budget.reserve_mib >= budget.gib * 1024:
        raise ConfigError(
            "budget.reserve_mib", f"must be below the budget of {shown(budget.gib)} GiB, got {shown(budget.reserve_mib)}"
        )
    if 0 < config.tradeoff.plane < 3:
        raise ConfigError("tradeoff.plane", f"must be 0 or >= 3, got {config.tradeoff.plane}")
    for asked in config.tradeoff.budgets:
        try:
            on_front(asked)
        except ValueError as error:
            raise ConfigError("tradeoff.budgets", str(error)) from error
    for asked in config.compare.budgets:
        try:
            Budget.parse(asked)
        except ValueError as error:
            raise ConfigError("compare.budgets", str(error)) from error
    for group in ("strategy", "scheduler"):  # the other ranks wait for the solver, at most timeout_s
        seconds = getattr(getattr(config, group), "seconds", 0.0)
        if seconds > config.cluster.timeout_s / 2:
            limit = f"must be at most half of cluster.timeout_s={config.cluster.timeout_s:g}"
            raise ConfigError(f"{group}.seconds", f"{limit}, got {seconds:g}")
    if run.warmup_steps >= run.steps:
        raise ConfigError("run.warmup_steps", f"must be < run.steps={run.steps}, got {run.warmup_steps}")
    if run.grad_precision != "same" and run.precision not in HALF:
        raise ConfigError("run.grad_precision", f"has no effect with run.precision={run.precision}, got {run.grad_precision}")
    if config.model.norms_fp32 and run.precision not in HALF:
        raise ConfigError("model.norms_fp32", f"has no effect with run.precision={run.precision}, got true")
    if config.cluster.backend == "nccl" and config.cluster.device != "cuda":
        raise ConfigError("cluster.backend", f"nccl needs cluster.device=cuda, got {config.cluster.device}")
    _check_emulation(config)
    _check_hosts(config)
    if config.cluster.name == "shaped" and config.cluster.device != "cpu":
        raise ConfigError("cluster.device", f"must be cpu with cluster.name=shaped, got {config.cluster.device}")
    if config.cluster.name == "shaped" and config.link.name == "emulated":
        raise ConfigError("link.name", "must be real with cluster.name=shaped, got emulated")
    if config.cluster.device == "cuda" and (named := config.collectives.named) not in (None, "native"):
        raise ConfigError("collectives.algorithm", f"must be native with cluster.device=cuda, got {named}")
    if config.model.checkpointing == "auto":
        if budget.over_floor is not None:
            raise ConfigError("budget.over_floor", "needs model.checkpointing=true or false, the floor depends on it; got auto")
        if config.profile.name != "measured" or config.profile.path is not None or not config.engine.plans:
            raise ConfigError("model.checkpointing", "auto needs a plan and a profile that is measured; use true or false")
    _check_batch(config)
    try:
        config.data.require(config.model.inputs)
    except OptionError as error:
        raise ConfigError(f"data.{error.option}", error.complaint) from error
    except ValueError as error:
        raise ConfigError("data", str(error)) from error
    if run.eval_every is not None and not config.data.evaluates:
        target = getattr(config.data, "target", config.data.name)
        raise ConfigError("run.eval_every", f"needs held-out samples: give {target} an argument held_out; got {run.eval_every}")
    has_budget = budget.gib is not None or budget.over_floor is not None
    profile = config.profile
    if profile.name == "analytic" and isinstance(config.strategy, Uniform) and Strategy(config.strategy.each).in_node:
        problem = f"{config.strategy.each} needs a profile of several hosts, measured"
        raise ConfigError("strategy.each", f"{problem}; in calculated ones profile.group=node shards all units within nodes")
    measures = profile.name == "measured" and profile.path is None
    if has_budget and measures and not config.cluster.measure_memory:
        raise ConfigError("cluster.measure_memory", "must be true with a budget: it counts activations; got false")
    if profile.path is not None:
        if profile.refresh:
            raise ConfigError("profile.refresh", f"measures a profile, and profile.path={profile.path} is one")
        _check_profile(config, Path(profile.path))
    _check_engine(config)


def _check_batch(config: Config) -> None:
    batch, budget = config.batch, config.budget
    if batch.find is None:
        for name in ("profiles", "at_most"):
            if (value := getattr(batch, name)) != getattr(type(batch)(), name):
                raise ConfigError(f"batch.{name}", f"has no effect without batch.find, got {shown(value)}")
        return
    if budget.over_floor is not None:
        raise ConfigError("budget.over_floor", "needs a batch that is given, the floor depends on it: set budget.gib")
    if budget.gib is None:
        raise ConfigError("batch.find", f"{batch.find} needs a budget: set budget.gib")
    if config.model.checkpointing == "auto":
        raise ConfigError("model.checkpointing", "must be true or false with batch.find; got auto")
    if batch.profiles and (config.profile.path is not None or config.profile.name == "analytic"):
        raise ConfigError("batch.profiles", f"are measured, and the profile is another one; got {shown(batch.profiles)}")


HALF = ("bf16", "fp16")

_PLANNED = {  # the groups that only planning uses, with the options that conf/config.yaml chooses
    "strategy": Uniform("dp"),
    "scheduler": Wfbp(),
    "recompute": KEEP,
    "collectives": CollectivesConfig(),
    "profile": ProfileConfig(),
    "link": LinkConfig(),
}


_CHECKPOINTS = ("save_every", "resume")


def _check_engine(config: Config) -> None:
    engine = config.engine
    engine.check(config)
    if engine.plans:
        return
    if config.run.precision in HALF:
        raise ConfigError("run.precision", f"must be fp32 or fp64 with engine={engine.name}, got {config.run.precision}")
    if config.link.name == "emulated":
        raise ConfigError("link.name", f"an emulated link paces mdcs alone, not the messages of engine={engine.name}")
    for group, usual in _PLANNED.items():
        _check_usual(group, getattr(config, group), usual, engine.name)
    limit = dataclasses.replace(config.budget, gib=None)  # a peer's measured peak is compared with gib
    _check_usual("budget", limit, type(limit)(), engine.name)
    for name in _CHECKPOINTS:
        if (value := getattr(config.run, name)) is not None:
            raise ConfigError(f"run.{name}", f"must be null with engine={engine.name}, which writes no checkpoints; got {value}")
    if not config.run.cross_iteration:
        raise ConfigError("run.cross_iteration", f"has no effect with engine={engine.name}, got false")


def _check_usual(group: str, chosen: Any, usual: Any, engine: str) -> None:
    if group in OPTION_GROUPS:
        if chosen != usual:
            raise ConfigError(group, f"has no effect with engine={engine}, got {chosen.name}")
        return
    for leaf in dataclasses.fields(chosen):
        value = getattr(chosen, leaf.name)
        if value != getattr(usual, leaf.name):
            raise ConfigError(f"{group}.{leaf.name}", f"has no effect with engine={engine}, got {shown(value)}")


def _check_emulation(config: Config) -> None:
    """Check an emulated rank: it needs an emulated link, and it cannot do what needs the other ranks' values."""
    cluster = config.cluster
    if not cluster.emulated:
        return
    if config.link.name != "emulated":
        raise ConfigError("link.name", f"must be emulated with cluster=emulated, which sends nothing; got {config.link.name}")
    if cluster.rank >= cluster.ranks:
        raise ConfigError("cluster.rank", f"must be < cluster.ranks={cluster.ranks}, got {cluster.rank}")
    if config.run.eval_every is not None:
        raise ConfigError("run.eval_every", f"must be null with cluster=emulated, without losses; got {config.run.eval_every}")
    for name in _CHECKPOINTS:
        if (value := getattr(config.run, name)) is not None:
            raise ConfigError(f"run.{name}", f"must be null with cluster=emulated, whose weights mean nothing; got {value}")


def _check_hosts(config: Config) -> None:
    cluster = config.cluster
    if cluster.name == "shaped" and cluster.ranks % cluster.hosts:
        raise ConfigError("cluster.nodes", f"must divide cluster.ranks={cluster.ranks}, got {cluster.nodes}")
    if cluster.name == "joined" and cluster.hosts > 1 and config.link.name == "emulated":
        raise ConfigError("link.name", f"must be real: the ranks of {cluster.hosts} hosts have no common clock to pace by")


_NAMED = {"hosts": "cluster.nodes", "network": "cluster.network", "shaped_link": "cluster.rate_gbit"}
"""Keys of the config by those of a profile's identity, where they differ."""


def _check_profile(config: Config, path: Path) -> None:
    if not path.is_file():
        inside = f"; did you mean {path / 'profile.json'}?" if (path / "profile.json").is_file() else ""
        raise ConfigError("profile.path", f"no such file: {path}{inside}")
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("profile.path", f"{path} is not a profile.json: {error}") from error
    job = job_identity(config)
    if config.link.name == "real":
        job |= {"shaped_link": config.cluster.shaped_link(), "hosts": "", "network": ""} | hosts_identity(config)
    # A profile written by hand may have an empty `about`, and a profile of a single host has no keys of hosts.
    about = {"cluster.ranks": str(profile.world), "hosts": "", "network": "", **profile.about}
    for key, value in job.items():
        if key.endswith(f".{CODE}"):
            if about.get(key, value) != value:
                other = f"{path} was measured with other code of the {key.partition('.')[0]}; leave it out to measure anew"
                warnings.warn(f"profile.path: {other}", stacklevel=2)
        elif about.get(key, value) != value:
            was = f"{path} was measured with {_NAMED.get(key, key)} {about[key] or 'none'}"
            raise ConfigError("profile.path", f"{was}; this job has {value or 'none'}")
    if profile.link.emulated and config.link.name == "real":
        raise ConfigError("profile.path", f"{path} has not measured the link: it was emulated; add link=emulated")
    if config.link.name == "real":
        named, measured = config.collectives.named, profile.collectives.algorithm
        if named not in (None, measured):
            raise ConfigError("collectives.algorithm", f"{path} was measured with {measured}, got {named}")


def _default(leaf: dataclasses.Field[Any]) -> Any:
    return leaf.default if leaf.default_factory is dataclasses.MISSING else leaf.default_factory()

