"""Jobs that run later, perhaps on other machines: what their launcher gives them, and the files from which they run.

The program of such a job is `python -m experiments.job.submission FOLDER train|profile PROGRAM ARGUMENT…`, on every
rank. Rank 0's folder is FOLDER, with the config in frozen.yaml. Other ranks have temporary folders
(`experiments.job.resolved`). The rest is the command line that has submitted the job: its records name that one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from analysis.events import METRICS, read_events
from experiments.config import checks, rules
from experiments.config.checks import adapted, require_as_asked, with_ranks
from experiments.config.schema import BudgetConfig, Config, ConfigError
from experiments.job import checkpoints, profiles, record
from experiments.job import run as jobs
from experiments.job.events import command_began, failure_event
from experiments.job.profiles import Profiles
from experiments.job.resolved import on_rank_zero, with_absolute_paths
from experiments.job.tracking import JsonLines
from hydra_plugins import _mdcs_jobs as submitted
from hydra_plugins import mdcs_slurm
from launch import preemption
from launch.elastic import Occupied
from mdcs.planner.recompute import AUTO
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile import cache
from mdcs.sizes import Budget

CONFIG = "frozen.yaml"  # file in a job's folder: its resolved config
BUDGETS = "budgets.txt"
"""File in the folder of a profile: budgets of the jobs with recompute=auto that wait for it, one a line."""
PROFILES = "profiles"  # folder in a sweep's folder with one folder for each of its profiles
TRAIN, MEASURE = "train", "profile"  # a job trains, or it measures a profile for others
_SUBMITS = "hydra_plugins.mdcs_slurm."


def launcher_of(settings: Any) -> dict[str, Any] | None:
    """Settings of the launcher on which its jobs' measurements depend. None if this program runs the jobs itself.
    settings: Hydra's own part of a composed config."""
    if settings.mode != RunMode.MULTIRUN or not str(settings.launcher._target_).startswith(_SUBMITS):
        return None
    asked: Any = OmegaConf.to_container(settings.launcher, resolve=True)
    return mdcs_slurm.measured(asked)


def starts_its_ranks(launcher: Mapping[str, Any]) -> bool:
    """Return whether a submitted job is one process that starts its ranks, not a process per rank."""
    return bool(launcher["nodes"] * launcher["ranks_per_node"] == 1)


def config_of(
    composed: DictConfig, choices: Mapping[str, str] | None, launcher: Mapping[str, Any] | None,
    overrides: Sequence[str],
) -> Config:  # fmt: skip
    """The config of a job with the ranks that it will have, those of its launcher or of this program. Raises
    ConfigError if the overrides ask for others. launcher: see `launcher_of`."""

    def with_ranks_of_launcher(config: Config, overrides: Sequence[str]) -> Config:
        assert launcher is not None
        name = "local" if starts_its_ranks(launcher) else "joined"
        ranks, nodes = launcher["nodes"] * launcher["ranks_per_node"], launcher["nodes"]
        made = with_ranks(config, "hydra/launcher", ranks, nodes, None, name=name)
        require_as_asked(config, made, overrides)
        return made

    adapt = adapted if launcher is None else with_ranks_of_launcher
    return checks.from_composed(composed, choices, said=overrides, adapt=adapt)


def freeze(config: Config, folder: Path, launcher: Mapping[str, Any], sweep: Path) -> None:
    """Write what a job needs that starts later, in another working directory, perhaps on another machine.

    A job that needs a profile has to wait for the job that measures it, which is written too. Jobs that are compared
    are thus planned with the same profile.

    - folder: of the job.
    - launcher: settings of the launcher, as in :func:`experiments.job.record.parts_of`.
    - sweep: folder that has the profiles' folders.
    """
    _leave(config, folder, TRAIN)
    parts = record.parts_of(config, launcher)
    record.write_parts(folder, parts)
    record.write(folder, record.hash_of(parts), record.SUBMITTED)
    first = [os.path.relpath(_profile(config, launcher, sweep / PROFILES), folder)] if profiles.measures(config) else []
    (folder / submitted.BEFORE).write_text("".join(f"{each}\n" for each in first), encoding="utf-8")


def _profile(config: Config, launcher: Mapping[str, Any], folder: Path) -> Path:
    """The folder of a profile. It contains a job that measures the profile, or the profile once that job has ended."""
    parts = [profiles.key_of(config, elsewhere=True), dict(launcher)]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    own = folder / f"{key}-{command_began():.0f}"
    found = own if config.sweep.force else max(folder.glob(f"{key}*"), default=folder / key)
    if (known := cache.read(found / "profile.json")) is not None and profiles.is_short(config, known):
        found = own
    found.mkdir(parents=True, exist_ok=True)
    if config.recompute == AUTO and config.budget.limited:
        with (found / BUDGETS).open("a", encoding="utf-8") as budgets:
            budgets.write(f"{config.budget.limit}\n")
    if (found / "profile.json").exists():
        (found / submitted.COMMAND).unlink(missing_ok=True)
    elif not (found / submitted.COMMAND).exists():
        run = replace(config.run, name="profile", resume=None, save_every=None)
        any_plan = replace(config, run=run, strategy=Uniform("dp"), scheduler=Wfbp(), budget=BudgetConfig())
        _leave(any_plan, found, MEASURE)
    return found


def _leave(config: Config, folder: Path, what: str) -> None:
    checks.save(with_absolute_paths(config), folder / CONFIG)
    command = ["-P", "-m", "experiments.job.submission", str(folder.resolve()), what, *sys.argv]
    (folder / submitted.COMMAND).write_text(shlex.join(command), encoding="utf-8")


def fail(folder: Path, identity: str, reason: str) -> None:
    """Write that the folder's run has failed: into its record, and as the last of its events if it has begun."""
    if (folder / METRICS).exists():
        with JsonLines(folder / METRICS) as metrics:
            metrics.write(failure_event(reason))
    record.write(folder, identity, record.FAILED, reason)


def settled(folder: Path, *, waited: bool) -> str | None:
    """Why the submitted job in this folder has failed; empty if it has ended well, None if it has not ended. One that
    was ended from outside has failed from now on in its files too. waited: the launcher has waited for its end."""
    code, said = submitted.exit_code(folder), record.read(folder)  # a job writes its record first
    state = record.RUNNING if said is None else said.state
    if not waited and code is None and state not in (record.OK, record.FAILED, record.INFEASIBLE):
        return None
    if said is not None and state not in (record.SUBMITTED, record.RUNNING):
        return said.reason
    reason = next(filter(None, map(why_no_profile, submitted.before(folder))), "") or submitted.failure(folder)
    now = record.read(folder)  # it may have ended well meanwhile
    if reason and now is not None and now.state == record.RUNNING:
        fail(folder, now.identity, reason)
    return reason


def why_no_profile(folder: Path) -> str:
    """Why the job in this folder has not measured its sweep's profile. Empty if it has, or if there is no such job."""
    if (folder / "profile.json").exists() or submitted.read(folder) is None:
        return ""
    try:
        failures = [event["reason"] for event in read_events(folder / METRICS) if event["event"] == "failure"]
    except (OSError, ValueError):
        failures = []
    why = f"{failures[-1]} (its logs are in {folder})" if failures else submitted.failure(folder)
    return f"the sweep's profile was not measured: {why}"


def run(folder: Path, what: str = TRAIN) -> int:
    before = record.read(folder)
    try:
        config = adapted(checks.load(folder / CONFIG), ("cluster.ranks", "cluster.nodes", "cluster.network"))
        rules.check(config)
        if what == MEASURE:
            reason = jobs.prepare(MEASURE, config, folder, Console())
            if not reason and _needs_recomputation(config, folder):
                reason = jobs.prepare(MEASURE, profiles.with_recomputation(config), folder, Console())
            if not reason:
                (folder / METRICS).unlink(missing_ok=True)  # written by an attempt that failed
        else:
            reason = _train(config, folder, None if before is None else before.identity)
    except ConfigError as error:
        # a job in the folder writes its own record
        if before is not None and not isinstance(error.__cause__, Occupied):
            record.write(folder, before.identity, record.FAILED, str(error))
        print(error, file=sys.stderr)
        return 2
    if reason:
        print(f"failed: {reason} (its logs are in {folder})", file=sys.stderr, flush=True)
    return 1 if reason else 0


def _needs_recomputation(config: Config, folder: Path) -> bool:
    """Return whether a job that waits for the profile in the folder has a budget that only recomputation keeps."""
    profile, file = cache.read(folder / "profile.json"), folder / BUDGETS
    if profile is None or not file.exists():
        return False
    budgets = map(Budget.of, {*file.read_text(encoding="utf-8").splitlines()})
    return profiles.is_short(replace(config, recompute=AUTO), profile, *budgets)


def _train(config: Config, folder: Path, identity: str | None) -> str:
    """Return the reason of a failure, else "". A job that is preempted is queued again. Raises ConfigError if the job
    of a profile that it waits for has ended without one."""
    known = Profiles()
    if preemption.restarted() and config.engine.plans:
        if config.run.resume is None or checkpoints.any_in(folder):
            config.run.resume = "auto"
        known.adopt(config, folder)
    shared = submitted.before(folder)
    for place in shared:
        if known.adopt(config, place):
            continue
        if (place / "profile.json").exists():
            told = "was measured on another kind of node or with other libraries: this job measures its own"
            warnings.warn(f"the sweep's profile {place / 'profile.json'} {told}", stacklevel=2)
        elif why := why_no_profile(place):
            raise ConfigError("profile", why)
    reason = jobs.run(config, folder, Console(), known=known, identity=identity).reason
    for place in shared:
        known.leave(config, place)
    after = record.read(folder)
    if after is not None and after.state == record.PREEMPTED:
        refused = preemption.requeue()
        reason += f"; {refused or 'queued again'}"
        if refused:
            fail(folder, after.identity, reason)
    return reason


def main(folder: str, what: str, *command: str) -> int:
    sys.argv = [*command]
    if preemption.expected():
        preemption.ignore()  # the ranks listen, once they run
    return on_rank_zero(lambda: run(Path(folder), what))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
