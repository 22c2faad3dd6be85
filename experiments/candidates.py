"""Candidates of a comparison (`experiments/compare.py`): names, and configs made of overrides of one job."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from experiments.config.checks import compose_config
from experiments.config.schema import Config, ConfigError
from mdcs.sizes import Budget

PLANNED = ("strategy", "scheduler", "recompute", "collectives", "profile", "link", "budget", "run.cross_iteration")
"""Groups and a key of a plan: engines without one are composed without them."""
USUAL = ("strategy=dp", "scheduler=wfbp", "recompute=auto", "collectives=auto", "link=real")


@dataclass(frozen=True)
class Candidate:
    """One of the jobs that take turns."""

    name: str
    config: Config
    budget: Budget | None = None  # one of `compare.budgets`; None: whatever the job's own is
    words: tuple[str, ...] = ()  # its overrides of the job

    def __str__(self) -> str:
        return self.name if self.budget in (None, Budget()) else f"{self.name} @ {self.budget}"

    @property
    def trains(self) -> tuple[Any, ...]:
        """Options that the losses depend on. Units and recomputed activations change no loss."""
        model, run, cluster = self.config.model, self.config.run, self.config.cluster
        declared = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        numbers = {name: value for name, value in declared.items() if name not in ("wrap", "checkpointing")}
        return (
            type(model), numbers, self.config.data, self.config.optimizer, cluster.ranks,
            run.seed, run.steps, run.accumulation, run.precision,
        )  # fmt: skip


def candidates(
    config: Config, given: Sequence[str], budgets: Sequence[Budget]
) -> tuple[list[Candidate], dict[str, str]]:
    """All candidates, with each budget, and why others that cannot run are left out, by name. given: overrides of the
    base. Raises ConfigError for a candidate that was named and cannot run."""
    asked, found, left_out = config.compare, list[Candidate](), dict[str, str]()
    varied, only = dict(expand(asked.vary)), asked.only
    if unknown := [name for name in only if name not in varied]:
        raise ConfigError("compare.only", f"no such candidate {unknown[0]}; candidates: {', '.join(varied)}")
    if asked.over:
        varied, only = _combined(asked.over, {name: varied.get(name, []) for name in only or ["mdcs"]}), []
    if not varied:
        raise ConfigError("compare.vary", "is empty: nothing to compare")
    if own := [o for o in given if budgets and group_of(o) == "budget"]:
        raise ConfigError(key_of(own[0]), "is chosen with compare.budgets here")
    for name, words in varied.items():
        if only and name not in only:
            continue
        overrides = [*_base_of(given, words), *words, f"run.name='{name}'"]
        plans = not _is_engine(words) and (config.engine.plans or "engine=mdcs" in words)
        is_limited = {"budget", "budget.limit"} & {key_of(word) for word in words}
        try:
            for budget in budgets if budgets and plans and not is_limited else [None]:
                limit = [] if budget is None else [f"budget='{budget}'"]
                one = compose_config([*overrides, *limit], like=config.profile.path)
                if not one.engine.plans and config.link.name == "emulated":
                    problem = "an emulated link paces mdcs alone: engines are compared on a real one"
                    raise ConfigError("link.name", problem)
                one.engine.require()
                found.append(Candidate(name, one, budget, tuple(words)))
        except ConfigError as error:
            if only or error.key != "engine":
                raise
            left_out[name] = str(error)
    return found, left_out


def _combined(over: Sequence[str], varied: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return these candidates, each plan with every combination of the values of `compare.over`."""
    combinations = [*expand({"": shlex.join(over)})]
    made = {}
    for name, words in varied.items():
        if _is_engine(words):
            made[name] = words
            continue
        for values, overrides in combinations:
            made[values.strip() if name == "mdcs" else name + values] = [*words, *overrides]
    return made


def _base_of(given: Sequence[str], words: Sequence[str]) -> list[str]:
    """The given overrides that hold for a candidate with these overrides, and what is usual for an engine."""
    if _is_engine(words):
        return [*(o for o in given if not {group_of(o), key_of(o)} & {*PLANNED}), *USUAL]
    planners = {"strategy", "scheduler"}
    replaced = planners if planners & {*map(group_of, words)} else set()
    return [o for o in given if group_of(o) not in replaced]


def expand(vary: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Yield (name, overrides) of every candidate: an entry with values separated by commas has one for each
    combination. Raises ConfigError for what is no override."""
    parser = OverridesParser.create()
    for name, words in vary.items():
        try:
            parsed = parser.parse_overrides(shlex.split(words))
            swept = [[*o.sweep_string_iterator()] if o.is_sweep_override() else [None] for o in parsed]
        except (HydraException, ValueError) as error:
            raise ConfigError(f"compare.vary.{name}", f"must be overrides KEY=VALUE …, got {words}") from error
        for values in itertools.product(*swept):
            chosen = [str(o.input_line) if value is None else f"{o.get_key_element()}={value}"
                      for o, value in zip(parsed, values, strict=True)]  # fmt: skip
            yield " ".join([name, *(value for value in values if value is not None)]), chosen


def _is_engine(overrides: Iterable[str]) -> bool:
    """Whether the overrides choose an engine without a plan."""
    return any(each.startswith("engine=") and each != "engine=mdcs" for each in overrides)


def group_of(override: str) -> str:
    """The config group, or the key's first part, that an override sets."""
    return key_of(override).partition(".")[0]


def key_of(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
