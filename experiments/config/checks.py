"""From what Hydra composed, or a file, to a typed config that can be run: every complaint names the full key.

Ranges stand beside their fields in :mod:`experiments.config.schema`; the few rules that span several fields are here.

A resolved config is written once, by the parent process (`save`), and read by every rank (`load`): ranks
never compose.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config.errors import CONF, explain
from experiments.config.schema import (
    SCHEMA_NAME,
    SOLVED_SCHEDULERS,
    SOLVED_STRATEGIES,
    TRANSFORMERS,
    CollectivesConfig,
    Config,
    ConfigError,
    LinkConfig,
    ProfileConfig,
    SchedulerConfig,
    StrategyConfig,
    leaves,
    measured_for,
    register,
    shown,
)
from mdcs.profile.contents import Profile


@contextmanager
def composing() -> Iterator[None]:
    """Hydra is initialized inside, for programs with a command line of their own."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def run_composing(program: Callable[[], int]) -> int:
    """The exit code of a program that composes configs: 2, after one line on stderr, when one is wrong."""
    try:
        with composing():
            return program()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def positive(text: str) -> int:
    """An argument that counts something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return value


def compose_config(overrides: Sequence[str]) -> Config:
    """The config of a command line, where Hydra is initialized. Raises ConfigError for whatever is wrong."""
    try:
        return from_composed(compose("config", list(overrides)))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(error, overrides) from error


def from_composed(composed: DictConfig) -> Config:
    """The typed, checked config of what Hydra composed. Raises ConfigError."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "config", str(error).partition("\n")[0]) from error
    if not isinstance(config, Config):
        raise ConfigError("config", f"the primary config does not start from {SCHEMA_NAME}")
    _check_keys(composed, config)
    check(config)
    return config


def save(config: Config, path: Path) -> None:
    """Write the resolved config as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True), encoding="utf-8")


def load(path: Path) -> Config:
    """Read what `save` wrote. Raises ConfigError."""
    schema = OmegaConf.structured(Config)
    try:
        merged = OmegaConf.merge(schema, OmegaConf.load(path))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or str(path), str(error).partition("\n")[0]) from error
    assert isinstance(merged, DictConfig)
    return from_composed(merged)


# ---- checks


def check(config: Config) -> None:
    """Raise ConfigError for the first value out of its range, and for values that contradict each other."""
    for prefix, group, leaf in leaves(config):
        _check_leaf(prefix, group, leaf)
    _check_combinations(config)


def _check_keys(composed: DictConfig, config: Any, prefix: str = "") -> None:
    # Hydra's "+key=value" adds keys that no dataclass has; they would be ignored in silence.
    declared = {leaf.name for leaf in dataclasses.fields(config)}
    for name in map(str, composed):
        if name not in declared:
            raise ConfigError(f"{prefix}{name}", "no such key")
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            _check_keys(composed[name], value, f"{prefix}{name}.")


def _check_leaf(prefix: str, group: Any, leaf: dataclasses.Field[Any]) -> None:
    key, value, limits = prefix + leaf.name, getattr(group, leaf.name), leaf.metadata
    name = getattr(group, "name", None)
    if "used_by" in limits and name not in limits["used_by"] and value != _default(leaf):
        raise ConfigError(key, f"has no effect with {prefix}name={name}, got {_shown(value)}")
    if value is None:
        if name in limits.get("needed_by", ()):
            raise ConfigError(key, f"is needed with {prefix}name={name}, got null")
        return
    if "length" in limits and len(value) != limits["length"]:
        raise ConfigError(key, f"must have {limits['length']} values, got {_shown(value)}")
    for each in value if isinstance(value, list) else [value]:
        _check_value(key, each, limits)


def _check_value(key: str, value: Any, limits: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, f"must be a finite number, got {_shown(value)}")
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(key, f"must be one of {', '.join(map(_shown, limits['choices']))}; got {_shown(value)}")
    # Written as "not inside", so that a value that compares with nothing is outside.
    if "above" in limits and not value > limits["above"]:
        raise ConfigError(key, f"must be > {limits['above']}, got {_shown(value)}")
    if "at_least" in limits and not value >= limits["at_least"]:
        raise ConfigError(key, f"must be >= {limits['at_least']}, got {_shown(value)}")
    if "at_most" in limits and not value <= limits["at_most"]:
        raise ConfigError(key, f"must be <= {limits['at_most']}, got {_shown(value)}")
    if "below" in limits and not value < limits["below"]:
        raise ConfigError(key, f"must be < {limits['below']}, got {_shown(value)}")


def _check_combinations(config: Config) -> None:
    model, data, budget, run = config.model, config.data, config.budget, config.run
    if budget.gib is not None and budget.over_floor is not None:
        raise ConfigError("budget.over_floor", "and budget.gib exclude each other, got both")
    if budget.schedule_share is not None and budget.gib is None and budget.over_floor is None:
        raise ConfigError(
            "budget.schedule_share", "needs a budget to divide: set budget.gib or budget.over_floor"
        )
    if budget.gib is not None and budget.reserve_mib >= budget.gib * 1024:
        raise ConfigError(
            "budget.reserve_mib", f"must be below the budget of {budget.gib} GiB, got {budget.reserve_mib}"
        )
    if (config.strategy.name == "joint") != (config.scheduler.name == "joint"):
        raise ConfigError(
            "scheduler.name",
            "strategy=joint decides the schedule too, with scheduler=joint and no other; got"
            f" strategy={config.strategy.name} scheduler={config.scheduler.name}",
        )
    if config.strategy.name == "joint" and budget.schedule_share is not None:
        raise ConfigError("budget.schedule_share", f"strategy=joint divides the budget itself, got {budget.schedule_share:g}")
    limits = {"strategy.seconds": config.strategy.seconds} if config.strategy.name in SOLVED_STRATEGIES else {}
    limits |= {"scheduler.seconds": config.scheduler.seconds} if config.scheduler.name in SOLVED_SCHEDULERS else {}
    for key, seconds in limits.items():  # the other ranks wait for the solver
        if seconds > config.cluster.timeout_s / 2:
            raise ConfigError(key, f"must be at most half of cluster.timeout_s={config.cluster.timeout_s:g}, got {seconds:g}")
    if run.warmup_steps >= run.steps:
        raise ConfigError("run.warmup_steps", f"must be < run.steps={run.steps}, got {run.warmup_steps}")
    if run.grad_precision != "same" and run.precision not in HALF:
        raise ConfigError("run.grad_precision", f"has no effect with run.precision={run.precision}, got {run.grad_precision}")
    if config.optimizer.fused and config.optimizer.foreach:
        raise ConfigError("optimizer.foreach", "and optimizer.fused exclude each other, got both")
    if config.cluster.backend == "nccl" and config.cluster.device != "cuda":
        raise ConfigError("cluster.backend", f"nccl needs cluster.device=cuda, got {config.cluster.device}")
    _check_emulation(config)
    if config.cluster.name == "shaped" and config.cluster.device != "cpu":
        raise ConfigError("cluster.device", f"must be cpu with cluster.name=shaped, got {config.cluster.device}")
    if config.cluster.name == "shaped" and config.link.name == "emulated":
        raise ConfigError("link.name", "must be real with cluster.name=shaped, got emulated")
    if config.cluster.device == "cuda":
        for operation, name in config.collectives.named().items():
            if name != "native":
                raise ConfigError(f"collectives.{operation}", f"must be native with cluster.device=cuda, got {name}")
    if model.checkpointing == "auto":
        if budget.over_floor is not None:
            raise ConfigError("budget.over_floor", "needs model.checkpointing=true or false, the floor depends on it; got auto")
        if config.profile.name != "measured" or config.profile.path is not None or not config.engine.plans:
            raise ConfigError("model.checkpointing", "auto needs a plan and a profile that is measured; use true or false")
    if model.width is not None and model.heads is not None and model.width % model.heads:
        raise ConfigError("model.heads", f"must divide model.width={model.width}, got {model.heads}")
    reads_text = model.name in TRANSFORMERS
    if data.name == "digits" and reads_text:
        raise ConfigError(
            "data.name", f"digits are images and {model.name} reads tokens: use stdlib_bytes or synthetic"
        )
    if data.name == "stdlib_bytes" and not reads_text:
        raise ConfigError(
            "data.name", f"stdlib_bytes is text and {model.name} reads images: use digits or synthetic"
        )
    if data.name == "stdlib_bytes" and model.vocab is not None and model.vocab < 256:
        raise ConfigError("model.vocab", f"must be >= 256 for data.name=stdlib_bytes, got {model.vocab}")
    if data.name == "digits" and model.classes is not None and model.classes < 10:
        raise ConfigError("model.classes", f"must be >= 10 for data.name=digits, got {model.classes}")
    has_budget = budget.gib is not None or budget.over_floor is not None
    profile = config.profile
    measures = profile.name == "measured" and profile.path is None
    if has_budget and measures and not config.cluster.measure_memory:
        raise ConfigError("cluster.measure_memory", "must be true with a budget: it counts activations; got false")
    if profile.path is not None:
        if profile.refresh:
            raise ConfigError("profile.refresh", f"measures a profile, and profile.path={profile.path} is one")
        _check_profile(config, Path(profile.path))
    _check_engine(config)


HALF = ("bf16", "fp16")

_PLANNED = {  # what only a plan is made of, as conf/config.yaml chooses it
    "strategy": StrategyConfig(kind="dp"),
    "scheduler": SchedulerConfig(),
    "collectives": CollectivesConfig(),
    "profile": ProfileConfig(),
    "link": LinkConfig(),
}


def _check_engine(config: Config) -> None:
    engine, cluster = config.engine, config.cluster
    if (engine.reshard == "group") != (engine.reshard_group is not None):
        raise ConfigError(
            "engine.reshard_group",
            f"goes with engine.reshard=group and no other; got {engine.reshard} with {_shown(engine.reshard_group)}",
        )
    if engine.reshard_group is not None and cluster.ranks % engine.reshard_group:
        raise ConfigError("engine.reshard_group", f"must divide cluster.ranks={cluster.ranks}, got {engine.reshard_group}")
    if engine.plans:
        return
    if config.run.precision in HALF:
        raise ConfigError("run.precision", f"must be fp32 or fp64 with engine.name={engine.name}, got {config.run.precision}")
    if engine.name in ("fairscale_fsdp", "dataparallel") and cluster.device != "cuda":
        raise ConfigError("engine.name", f"{engine.name} needs cluster.device=cuda, got {cluster.device}")
    if engine.name == "dataparallel" and cluster.ranks != 1:
        raise ConfigError("cluster.ranks", f"must be 1 with engine=dataparallel: one process, all devices; got {cluster.ranks}")
    if config.link.name == "emulated":
        raise ConfigError("link.name", f"an emulated link paces mdcs alone, not the messages of engine={engine.name}")
    for group, usual in _PLANNED.items():
        _check_usual(f"{group}.", getattr(config, group), usual, engine.name)
    limit = dataclasses.replace(config.budget, gib=None)  # which is checked: measured peak against it
    _check_usual("budget.", limit, type(limit)(), engine.name)


def _check_usual(prefix: str, group: Any, usual: Any, engine: str) -> None:
    for leaf in dataclasses.fields(group):
        value = getattr(group, leaf.name)
        if value != getattr(usual, leaf.name):
            raise ConfigError(prefix + leaf.name, f"has no effect with engine={engine}, got {_shown(value)}")


def _check_emulation(config: Config) -> None:
    """One process that is a rank of many has a link to be timed by, and nothing that other ranks would send."""
    cluster = config.cluster
    if not cluster.emulated:
        return
    if config.link.name != "emulated":
        raise ConfigError("link.name", f"must be emulated with cluster=emulated, which sends nothing; got {config.link.name}")
    if cluster.rank >= cluster.ranks:
        raise ConfigError("cluster.rank", f"must be < cluster.ranks={cluster.ranks}, got {cluster.rank}")
    if config.run.eval_every is not None:
        raise ConfigError("run.eval_every", f"must be null with cluster=emulated, without losses; got {config.run.eval_every}")


def _check_profile(config: Config, path: Path) -> None:
    if not path.is_file():
        raise ConfigError("profile.path", f"no such file: {path}")
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("profile.path", f"{path} is not a profile.json: {error}") from error
    about = {"ranks": str(profile.world), **profile.about}  # one written by hand may say nothing of itself
    link = {"shaped_link": config.cluster.shaped_link()} if config.link.name == "real" else {}
    for key, value in (measured_for(config) | link).items():
        if about.get(key, value) != value:
            was = f"{path} was measured with {key} {about[key] or 'none'}"
            raise ConfigError("profile.path", f"{was}; this job has {value or 'none'}")
    if profile.link.emulated and config.link.name == "real":
        raise ConfigError("profile.path", f"{path} has not measured the link: it was emulated; add link=emulated")
    if config.link.name == "real":
        for operation, name in config.collectives.named().items():
            measured = getattr(profile.collectives, operation)
            if name != measured:
                raise ConfigError(f"collectives.{operation}", f"{path} was measured with {measured}, got {name}")


def _default(leaf: dataclasses.Field[Any]) -> Any:
    return leaf.default if leaf.default_factory is dataclasses.MISSING else leaf.default_factory()


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(value)
