"""Turn a config that Hydra composed, or a file, into a typed and checked config. Every error names the full key.

Ranges are declared beside their fields, in :mod:`experiments.config.schema` and in the classes of options. The rules
that span several groups are in :mod:`experiments.config.rules`.

The parent process writes the resolved config once (`save`), and every rank reads it (`load`): ranks never compose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from experiments.config.schema import OPTION_GROUPS, OWN, Config, ConfigError, register, schema
from experiments.config.started import adapted
from experiments.config.targets import TARGET, make, plain
from experiments.tasks.builtin import Auto
from mdcs.planner.pipeline import decides_schedule
from mdcs.planner.recompute import KEEP


@contextmanager
def composing(folder: Path = CONF) -> Iterator[None]:
    """Initialize Hydra for the block. The folder has the primary config."""
    register()
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield


def compose_config(overrides: Sequence[str], *, like: str | None = None) -> Config:
    """Compose the config of a command line; Hydra must be initialized. Raises ConfigError for every kind of error.

    The primary config is that of the running program. like: a profile that says what the command line does not, for a
    job without one.
    """
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
        given = getattr(config, group)
        left_out = not given and group in _MAY_BE_LEFT_OUT
        choice = (choices or {}).get(group)
        retargeted = choice != "own" and any(each.lstrip("+").startswith(f"{group}.{TARGET}=") for each in said or ())
        setattr(
            config, group, _MAY_BE_LEFT_OUT[group] if left_out else make(group, given, choice, retargeted=retargeted)
        )
    assert isinstance(config, Config)
    if isinstance(config.data, Auto):
        config.data = config.data.chosen(config.model.inputs)
    try:
        config.budget.limit = str(config.budget.value)  # one text for equal budgets
    except ValueError as error:
        raise ConfigError("budget.limit", str(error)) from error
    if decides_schedule(config.strategy):
        config.scheduler = None
        config.budget = dataclasses.replace(config.budget, schedule_share=None, activation_share=None)
    elif config.scheduler is None:
        raise ConfigError("scheduler", f"is needed with strategy={config.strategy.name}, got null")
    if said is not None:
        config = adapt(config, said)
        if not any(each.lstrip("+").startswith("run.unmeasured_steps=") for each in said):
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
    """The resolved config as YAML, in the form that `load` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(as_mapping(config)))


def save(config: Config, path: Path) -> None:
    """Write the resolved config as YAML."""
    path.write_text(as_yaml(config), encoding="utf-8")


def load(path: Path) -> Config:
    """Read a file that `save` wrote. Raises ConfigError for keys and types that are wrong."""
    composed = OmegaConf.load(path)
    assert isinstance(composed, DictConfig)
    return from_composed(composed)
