"""Rules of a config: ranges, which are declared beside their fields, and values that contradict each other."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.config import schema
from experiments.config.identity import CODE, hosts_identity, job_identity
from experiments.config.schema import OPTION_GROUPS, Config, ConfigError
from mdcs.options import OptionError, check_value, shown
from mdcs.planner.recompute import AUTO, Planned
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB, Budget

HALF = ("bf16", "fp16")
_CONTRADICTIONS: list[tuple[str, Callable[[Config, Any], object], str]] = [
    ("budget.schedule_share", lambda c, v: v is not None and not c.budget.limited,
     "needs a budget to divide: add budget=40GiB or budget=floor+10%"),
    ("budget.activation_share", lambda c, v: v is not None and c.budget.schedule_share is None,
     "divides what budget.schedule_share leaves: set both"),
    ("budget.activation_share", lambda c, v: v is not None and c.recompute != Planned(),
     "needs recompute=planned, got {c.recompute.name}"),
    ("budget.reserve_mib", lambda c, v: c.budget.value.size is not None and v * MIB >= c.budget.value.size,
     "must be below the budget of {c.budget.limit}, got {value}"),
    ("curve.budgets", lambda c, v: "none" in v, "are those of the front, each a limit; got none"),
    ("curve.plane", lambda c, v: 0 < v < 3, "must be 0 or >= 3, got {value}"),
    # the other ranks wait for the solver, at most timeout_s
    ("strategy.seconds scheduler.seconds", lambda c, v: (v or 0) > c.cluster.timeout_s / 2,
     "must be at most half of cluster.timeout_s={c.cluster.timeout_s:g}, got {value}"),
    ("strategy.trials", lambda c, v: 4 < 4 * (v or 1) > c.run.steps,
     "takes half of the steps, two for each plan; run.steps is {c.run.steps}, got {value}"),
    ("run.unmeasured_steps", lambda c, v: v >= c.run.steps, "must be < run.steps={c.run.steps}, got {value}"),
    ("run.grad_precision", lambda c, v: v != "same" and c.run.precision not in HALF,
     "has no effect with run.precision={c.run.precision}, got {value}"),
    ("cluster.backend", lambda c, v: v == "nccl" and c.cluster.device != "cuda",
     "nccl needs cluster.device=cuda, got {c.cluster.device}"),
    # an emulated rank sends nothing, and cannot do what needs the other ranks' values
    ("link.name", lambda c, v: c.cluster.emulated and v != "emulated",
     "must be emulated with cluster=emulated, which sends nothing; got {value}"),
    ("cluster.rank", lambda c, v: c.cluster.emulated and v >= c.cluster.ranks,
     "must be < cluster.ranks={c.cluster.ranks}, got {value}"),
    ("run.eval_every", lambda c, v: c.cluster.emulated and v is not None,
     "must be null with cluster=emulated, without losses; got {value}"),
    ("run.save_every run.resume", lambda c, v: c.cluster.emulated and v is not None,
     "must be null with cluster=emulated, whose weights mean nothing; got {value}"),
    ("cluster.nodes", lambda c, v: c.cluster.name == "shaped" and c.cluster.ranks % c.cluster.hosts,
     "must divide cluster.ranks={c.cluster.ranks}, got {value}"),
    ("link.name", lambda c, v: c.cluster.name == "joined" and c.cluster.hosts > 1 and v == "emulated",
     "must be real: the ranks of {c.cluster.hosts} hosts have no common clock to pace by"),
    ("cluster.device", lambda c, v: c.cluster.name == "shaped" and v != "cpu",
     "must be cpu with cluster.name=shaped, got {value}"),
    ("link.name", lambda c, v: c.cluster.name == "shaped" and v == "emulated",
     "must be real with cluster.name=shaped, got {value}"),
    ("collectives.algorithm", lambda c, v: c.cluster.device == "cuda" and c.collectives.named not in (None, "native"),
     "must be native with cluster.device=cuda, got {value}"),
    ("batch.profiles", lambda c, v: c.batch.find is None and v, "has no effect without batch.find, got {value}"),
    ("batch.at_most", lambda c, v: c.batch.find is None and v != type(c.batch)().at_most,
     "has no effect without batch.find, got {value}"),
    ("batch.find", lambda c, v: v and c.budget.value.size is None,
     "{value} needs a budget in bytes, such as budget=40GiB; got budget={c.budget.limit}"),
    ("batch.profiles", lambda c, v: v and not c.profile.measures,
     "are measured, and the profile is another one; got {value}"),
    ("profile.refresh", lambda c, v: c.profile.path is not None and v,
     "measures a profile, and profile.path={c.profile.path} is one"),
    # other engines than mdcs
    ("run.precision", lambda c, v: not c.engine.plans and v in HALF,
     "must be fp32 or fp64 with engine={c.engine.name}, got {value}"),
    ("link.name", lambda c, v: not c.engine.plans and v == "emulated",
     "an emulated link paces mdcs alone, not the messages of engine={c.engine.name}"),
    ("run.save_every run.resume", lambda c, v: not c.engine.plans and v is not None,
     "must be null with engine={c.engine.name}, which writes no checkpoints; got {value}"),
    ("run.cross_iteration", lambda c, v: not c.engine.plans and not v,
     "has no effect with engine={c.engine.name}, got false"),
]  # fmt: skip
"""Keys, when their value `v` cannot be, and why."""


def check(config: Config) -> None:
    """Raise ConfigError for the first value out of its range, and for values that contradict each other."""
    for prefix, group, leaf in schema.leaves(config):
        key, value, limits = prefix + leaf.name, getattr(group, leaf.name), leaf.metadata
        name = getattr(group, "name", None)
        usual = leaf.default if leaf.default_factory is dataclasses.MISSING else leaf.default_factory()
        if "used_by" in limits and name not in limits["used_by"] and value != usual:
            raise ConfigError(key, f"has no effect with {prefix}name={name}, got {shown(value)}")
        if value is None and name in limits.get("needed_by", ()):
            raise ConfigError(key, f"is needed with {prefix}name={name}, got null")
        try:
            check_value(key, value, limits)
        except OptionError as error:
            raise ConfigError(key, error.complaint) from error
    for keys, wrong, words in _CONTRADICTIONS:
        for key in keys.split():
            found: Any = config
            for part in key.split("."):
                found = getattr(found, part, None)
            if wrong(config, found):
                raise ConfigError(key, words.format(c=config, value=shown(found)))
    for key, asked in (("curve.budgets", config.curve.budgets), ("compare.budgets", config.compare.budgets)):
        try:
            for each in asked:
                Budget.of(each)
        except ValueError as error:
            raise ConfigError(key, str(error)) from error
    _check_data(config)
    if config.profile.path is not None:
        _check_profile(config, Path(config.profile.path))
    config.engine.check(config)
    if not config.engine.plans:
        _check_unplanned(config)


def _check_data(config: Config) -> None:
    data, every = config.data, config.run.eval_every
    try:
        data.require(config.model.inputs)
    except OptionError as error:
        raise ConfigError(f"data.{error.option}", error.complaint) from error
    except ValueError as error:
        raise ConfigError("data", str(error)) from error
    if every is not None and not data.evaluates:
        target = getattr(data, "target", data.name)
        raise ConfigError("run.eval_every", f"needs held-out samples: give {target} an argument held_out; got {every}")


def _check_unplanned(config: Config) -> None:
    # bytes, with which a measured peak is compared
    measured = config.budget.limit if config.budget.value.size else "none"
    usual: dict[str, Any] = {
        "strategy": Uniform("dp"), "scheduler": Wfbp(), "recompute": AUTO,
        "collectives": schema.CollectivesConfig(), "profile": schema.ProfileConfig(), "link": schema.LinkConfig(),
        "budget": schema.BudgetConfig(measured),
    }  # fmt: skip
    problem = f"has no effect with engine={config.engine.name}, got"
    for group, expected in usual.items():
        chosen = getattr(config, group)
        if group in OPTION_GROUPS and chosen != expected:
            raise ConfigError(group, f"{problem} {chosen.name}")
        for leaf in () if group in OPTION_GROUPS else dataclasses.fields(chosen):
            if (value := getattr(chosen, leaf.name)) != getattr(expected, leaf.name):
                raise ConfigError(f"{group}.{leaf.name}", f"{problem} {shown(value)}")


_NAMED = {"hosts": "cluster.nodes", "network": "cluster.network", "shaped_link": "cluster.rate_gbit"}
"""Keys of the config by those of a profile's identity, where they differ."""


def _beside(profile: Path) -> str:
    return f"; did you mean {profile}?" if profile.is_file() else ""


def _check_profile(config: Config, path: Path) -> None:
    if not path.is_file():
        raise ConfigError("profile.path", f"no such file: {path}{_beside(path / 'profile.json')}")
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError) as error:
        there = _beside(path.with_name("profile.json")) if path.name != "profile.json" else ""
        raise ConfigError("profile.path", f"{path} is not a profile.json: {error}{there}") from error
    job = job_identity(config)
    if config.link.name == "real":
        job |= {"shaped_link": config.cluster.shaped_link(), "hosts": "", "network": ""} | hosts_identity(config)
    # A profile written by hand may have an empty `about`, and a profile of a single host has no keys of hosts.
    about = {"cluster.ranks": str(profile.world), "hosts": "", "network": "", **profile.about}
    for key, value in job.items():
        if about.get(key, value) == value:
            continue
        if not key.endswith(f".{CODE}"):
            was = f"{path} was measured with {_NAMED.get(key, key)} {about[key] or 'none'}"
            raise ConfigError("profile.path", f"{was}; this job has {value or 'none'}")
        other = f"{path} was measured with other code of the {key.partition('.')[0]}; leave it out to measure anew"
        warnings.warn(f"profile.path: {other}", stacklevel=2)
    if profile.link.emulated and config.link.name == "real":
        raise ConfigError("profile.path", f"{path} has not measured the link: it was emulated; add link=emulated")
    if config.link.name == "real":
        named, measured = config.collectives.named, profile.collectives.algorithm
        if named not in (None, measured):
            raise ConfigError("collectives.algorithm", f"{path} was measured with {measured}, got {named}")
