"""Decide `batch.find`: the largest batch within the budget, or the one of most samples per second.

Profiles of a few batches are measured, and those of the others calculated from them (:mod:`mdcs.planner.batch`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from experiments.config.identity import job_identity
from experiments.config.schema import BatchConfig, BudgetConfig, Config, ConfigError
from experiments.job import profiles, record
from experiments.job import run as jobs
from experiments.job.profiles import Profiles, job_of, make_plan, write_plan
from experiments.job.resolved import resolve
from experiments.job.tracking import show_files
from mdcs.plan.plan import Plan
from mdcs.planner.batch import BatchScaling, PlannedBatch, batches_that_fit, fastest_of
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.recompute import AUTO
from mdcs.profile.schema import INPUTS, Profile

LARGEST, FASTEST = "largest", "fastest"


@dataclass(frozen=True)
class Found:
    """Batches that fit, smallest first. ``profiled``: batches whose profile was measured."""

    batches: tuple[PlannedBatch, ...]
    profiled: tuple[int, ...] = ()

    @property
    def largest(self) -> PlannedBatch:
        """The largest batch."""
        return self.batches[-1]

    @property
    def fastest(self) -> PlannedBatch:
        """The batch of most predicted samples per second."""
        return fastest_of(self.batches)

    def wanted(self, config: Config) -> PlannedBatch:
        """The batch that `batch.find` asks for."""
        return self.largest if config.batch.find == LARGEST else self.fastest


def find(config: Config, folder: Path, console: Console, *, known: Profiles | None = None) -> tuple[Found, str]:
    """Return the batches within the budget, and the reason if there is none (else empty).

    The job's folder gets the profile and the plan of the batch that is asked for, and its folders `profile-N` the
    profiles that are measured, of N samples. Raises ConfigError where the profile would replace the one that the config
    names.
    """
    if config.profile.path is not None and Path(config.profile.path).resolve() == (folder / "profile.json").resolve():
        raise ConfigError(
            "hydra.run.dir", "batch.find would put another batch's profile over profile.path: give another folder"
        )
    measured, reason = _measured(config, folder, console, known or Profiles())
    if reason:
        return Found(()), reason
    try:
        scaling = BatchScaling(measured)
    except ValueError as error:
        return Found(()), f"batch.profiles: {error}"

    def plan(profile: Profile) -> Plan:
        return make_plan(config, job_of(config, profile), floor=0)  # no budget is over a floor here

    try:
        batches = batches_that_fit(scaling.profile, plan, at_most=config.batch.at_most)
    except InfeasibleBudget as error:
        why = f"batch.find={config.batch.find}: no batch fits, not even of one sample: {error}"
        raise jobs.Infeasible(why) from error
    except ValueError as error:
        return Found(()), str(error)
    found = Found(batches, tuple(sorted(measured)))
    _write(config, folder, found.wanted(config), found.profiled)
    return found, ""


def sized(config: Config, batch: int) -> Config:
    """The config of a job with this batch."""
    return replace(config, batch=BatchConfig(), data=replace(config.data, batch_size=batch))


def _measured(config: Config, folder: Path, console: Console, known: Profiles) -> tuple[dict[int, Profile], str]:
    """The profiles by batch, of equal jobs or measured now; and the reason of a failure, else empty."""
    own, out = config.data.batch_size, dict[int, Profile]()
    asked = profiles.with_recomputation(config) if config.recompute == AUTO else config  # some batch needs it
    sizes = [own] if config.profile.path is not None else config.batch.profiles or [own, 4 * own]
    for batch in sizes:
        place, job = folder / f"profile-{batch}", replace(sized(asked, batch), budget=BudgetConfig())
        if reason := jobs.prepare("profile", job, place, console, known=known):
            return {}, f"the profile of batch {batch}: {reason} (its logs are in {place})"
        out[batch] = Profile.from_json((place / "profile.json").read_text(encoding="utf-8"))
    return out, ""


def _write(config: Config, folder: Path, planned: PlannedBatch, profiled: tuple[int, ...]) -> None:
    """Write the config, the profile and the plan of a job with this batch."""
    job, plan = sized(config, planned.batch), planned.plan
    job = replace(job, profile=replace(job.profile, path=str((folder / "profile.json").resolve())))
    about = {key: value for key, value in plan.job.profile.about.items() if key != INPUTS}
    about |= job_identity(job) | {"calculated": f"from batches of {' and '.join(map(str, profiled))}"}
    plan = replace(plan, job=replace(plan.job, profile=replace(plan.job.profile, about=about)))
    with jobs.claimed(folder):
        jobs.begin(resolved := resolve(job), folder)
        (folder / "profile.json").write_text(plan.job.profile.to_json(), encoding="utf-8")
        write_plan(folder, plan)
        show_files(resolved, folder, "plan", record.identity_of(job))
