"""Turn a config that Hydra composed, or a file, into a typed and checked config. Every error names the full key.

Ranges are declared beside their fields, in :mod:`experiments.config.schema` and in the classes of options. The rules
that span several groups are in :mod:`experiments.config.rules`.

The parent process writes the resolved config once (`save`), and every rank reads it (`load`): ranks never compose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from experiments.config.errors import explain
from experiments.config.files import CONF
from experiments.config.identity import with_profile
from experiments.config.rules import check
from experiments.config.schema import OPTION_GROUPS, OWN, ClusterConfig, Config, ConfigError, register, schema
from experiments.config.targets import TARGET, make, plain
from experiments.tasks.builtin import Auto
from mdcs.planner.pipeline import decides_schedule
from mdcs.planner.recompute import KEEP


@dataclass(frozen=True)
class Started:
    """Ranks that have been started for this program."""

    starter: str  # torchrun or srun
    ranks: int
    hosts: int
    network: str  # the interface towards rank 0, with its rate
    run: Callable[..., Any]  # runs a job on them, as `launch.elastic.run` does


here: Started | None = None
"""Set on rank 0 of ranks that are started already, while its program runs (`experiments.job.resolved`)."""


def adapted(config: Config, overrides: Sequence[str]) -> Config:
    """The config with the ranks of this program, if they are started already. Raises ConfigError if it asks for others.
    """
    if here is None:
        return config
    if config.profile.path is not None:  # its ranks and network are compared with those that are here, not asked for
        said, usual = _keys(overrides), ClusterConfig()
        names = [name for name in ("ranks", "nodes", "network") if f"cluster.{name}" not in said]
        config = replace(config, cluster=replace(config.cluster, **{name: getattr(usual, name) for name in names}))
    made = with_ranks(config, here.starter, here.ranks, here.hosts, here.network)
    require_as_asked(config, made, overrides)
    return made


def with_ranks(
    config: Config, starter: str, ranks: int, hosts: int, network: str | None, *, name: str = "joined"
) -> Config:
    """The config with the ranks of the starter, unchecked. Raises ConfigError for a cluster that starts its own ranks.
    """
    cluster = config.cluster
    if cluster.name not in ("local", "joined"):
        raise ConfigError("cluster.name", f"must be local: {starter} starts the ranks; got {cluster.name}")
    nodes, network = (hosts, cluster.network or network) if hosts > 1 else (None, None)
    return replace(config, cluster=replace(cluster, name=name, ranks=ranks, nodes=nodes, network=network))


def require_as_asked(composed: Config, config: Config, overrides: Sequence[str] = ()) -> None:
    """Raise ConfigError if `composed` requests other ranks or hosts than `config` has. A default value requests nothing
    unless it is among the overrides."""
    for name, there in (("ranks", config.cluster.ranks), ("nodes", config.cluster.nodes or 1)):
        asked, said = getattr(composed.cluster, name), f"cluster.{name}" in _keys(overrides)
        if asked not in (None, there) and (said or asked != getattr(ClusterConfig(), name)):
            raise ConfigError(f"cluster.{name}", f"must be {there}, as many as are started; got {asked}")


def _keys(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].lstrip("+") for override in overrides}


@contextmanager
def composing(folder: Path = CONF) -> Iterator[None]:
    """Initialize Hydra for the block. The folder has the primary config."""
    register()
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield


def compose_config(overrides: Sequence[str], *, like: str | None = None) -> Config:
    """Compose the config of a command line; Hydra must be initialized. Raises ConfigError for every kind of error. The
    primary config is that of the running program. like: a profile that says what the command line does not, for a job
    without one."""
    primary = HydraConfig.get().job.config_name if HydraConfig.initialized() else None
    try:
        composed = compose(primary or "config", list(overrides), return_hydra_config=True)
        return from_composed(composed, said=overrides, like=like)
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
    if missing := sorted(OmegaConf.missing_keys(composed)):  # merged with the schema they would have its defaults
        raise ConfigError(missing[0], "has no default: give it a value")
    try:  # Hydra's "+key=value" adds keys that no dataclass has, and a file may have them
        values = OmegaConf.create(OmegaConf.to_container(composed, resolve=True))
        config: Any = OmegaConf.to_object(OmegaConf.merge(schema(), values))
    except OmegaConfBaseException as error:
        raise explain(error) from error
    for group in OPTION_GROUPS:
        given, choice = getattr(config, group), (choices or {}).get(group)
        if not given and group in _MAY_BE_LEFT_OUT:
            made = _MAY_BE_LEFT_OUT[group]
        else:
            made = make(group, given, choice, retargeted=choice != "own" and f"{group}.{TARGET}" in _keys(said or ()))
        setattr(config, group, made)
    assert isinstance(config, Config)
    if isinstance(config.data, Auto):
        config.data = config.data.chosen(config.model.inputs)
    try:
        config.budget.limit = str(config.budget.value)  # one text for equal budgets
    except ValueError as error:
        raise ConfigError("budget.limit", str(error)) from error
    if decides_schedule(config.strategy):
        config.scheduler = None
        config.budget = replace(config.budget, schedule_share=None, activation_share=None)
    elif config.scheduler is None:
        raise ConfigError("scheduler", f"is needed with strategy={config.strategy.name}, got null")
    if said is not None:
        config = adapt(config, said)
        if "run.unmeasured_steps" not in _keys(said):
            config.run.unmeasured_steps = min(config.run.unmeasured_steps, config.run.steps - 1)
        check(config)
    return config


_MAY_BE_LEFT_OUT = {"scheduler": None, "recompute": KEEP}
"""Groups without which a config is whole: that of a joint strategy, that of an older run."""


def as_mapping(config: Config) -> dict[str, Any]:
    """The job's config as nested dicts of plain values, for YAML and JSON."""
    return {
        field.name: plain(value) if field.name in OPTION_GROUPS else dataclasses.asdict(value)
        for field in dataclasses.fields(config)
        if field.name not in OWN
        for value in [getattr(config, field.name)]
    }


def as_yaml(config: Config) -> str:
    """The resolved config in the form that `load` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(as_mapping(config)))


def save(config: Config, path: Path) -> None:
    path.write_text(as_yaml(config), encoding="utf-8")


def load(path: Path) -> Config:
    """Read a file that `save` wrote. Raises ConfigError for keys and types that are wrong."""
    composed = OmegaConf.load(path)
    assert isinstance(composed, DictConfig)
    return from_composed(composed)
