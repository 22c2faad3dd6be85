"""A job whose config was resolved when it was submitted: `python -m experiments.job.frozen RUN_DIR`, on every rank.

Rank 0's folder is RUN_DIR, with the config in frozen.yaml. Other ranks have temporary folders
(`experiments.job.member`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.events import METRICS, read_events
from experiments.config import checks, rules, started
from experiments.config.schema import BudgetConfig, Config, ConfigError
from experiments.config.started import require_as_asked, with_ranks
from experiments.job import checkpointing, checkpoints, profiles, record
from experiments.job import run as jobs
from experiments.job.checkpointing import ways_of
from experiments.job.profiles import Profiles
from hydra_plugins import _mdcs_jobs as submitted
from launch import preemption
from launch.claim import Occupied
from launch.place import NoPlace, place
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.uniform import Uniform

JOB = "frozen.yaml"
"""File in a job's folder: its resolved config."""
WORKER = "MDCS_WORKER"
PROFILES = "profiles"
"""Folder in a sweep's folder with one folder for each of its profiles."""
_MEASURE = "profile"
"""Second argument of a job that measures a profile and does not train."""


def freeze(config: Config, folder: Path, identity: str | None = None) -> None:
    """Write the resolved config for a job that starts later, in another working directory, perhaps on another machine.
    """
    _leave(config, folder)
    record.write(folder, identity or record.identity_of(config), record.SUBMITTED)


def _leave(config: Config, folder: Path, *what: str) -> None:
    checks.save(files_from_here(config), folder / JOB)
    command = shlex.join(["-P", "-m", "experiments.job.frozen", str(folder.resolve()), *what])
    (folder / submitted.COMMAND).write_text(command, encoding="utf-8")


class Freezer:
    """Freezes the jobs of one call of a program (:func:`freeze`), and adds a job for each profile that they need.

    Jobs that are compared are thus planned with the same profile.
    """

    def __init__(self) -> None:
        self._began = f"{time.time():.0f}"

    def __call__(self, config: Config, folder: Path, launcher: Mapping[str, Any], sweep: Path) -> None:
        """Freeze the job in its folder, which is in `sweep`.

        launcher: settings of the launcher, as in :func:`experiments.job.record.identity_of`.
        """
        freeze(config, folder, record.identity_of(config, launcher))
        first = [self._profile(way, launcher, sweep / PROFILES) for way in ways_of(config)] if profiles.measures(config) else []
        (folder / submitted.BEFORE).write_text("".join(f"{os.path.relpath(each, folder)}\n" for each in first), encoding="utf-8")

    def _profile(self, config: Config, launcher: Mapping[str, Any], folder: Path) -> Path:
        """The folder of a profile. It contains a job that measures the profile, or the profile once that job has ended.
        """
        parts = [profiles.key_of(config, elsewhere=launcher["executor"] != "local"), dict(launcher)]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
        found = folder / f"{key}-{self._began}" if config.sweep.force else max(folder.glob(f"{key}*"), default=folder / key)
        found.mkdir(parents=True, exist_ok=True)
        if (found / "profile.json").exists():
            (found / submitted.COMMAND).unlink(missing_ok=True)
        elif not (found / submitted.COMMAND).exists():
            _leave(_measuring(config), found, _MEASURE)
        return found


def _measuring(config: Config) -> Config:
    """The job that measures the profile of this config, for any plan."""
    run = dataclasses.replace(config.run, name="profile", resume=None, save_every=None)
    return dataclasses.replace(config, strategy=Uniform("dp"), scheduler=Wfbp(), budget=BudgetConfig(), run=run)


def files_from_here(config: Config) -> Config:
    """The config with absolute paths for the files that it names."""
    engine: Any = config.engine
    if getattr(engine, "plan", None) is not None:
        engine = dataclasses.replace(engine, plan=os.path.abspath(engine.plan))
    profile, run = config.profile, config.run
    if profile.path is not None:
        profile = dataclasses.replace(profile, path=os.path.abspath(profile.path))
    if run.resume not in (None, "auto"):
        run = dataclasses.replace(run, resume=os.path.abspath(run.resume))
    return dataclasses.replace(config, engine=engine, profile=profile, run=run)


def main(folder: Path, what: str = "") -> int:
    """Run one rank of the job. Return the exit code."""
    if preemption.expected():
        preemption.ignore()  # the ranks listen, once they run
    part = measure if what == _MEASURE else run
    try:
        joined = place()
    except NoPlace as error:
        print(error, file=sys.stderr)
        return 1
    if joined is None:  # the job starts its own ranks
        return part(folder, None, lambda config: config)
    from experiments.job import member  # needs torch; programs that only freeze jobs do not

    def program() -> int:
        here = started.here
        assert here is not None
        return part(folder, here.run, lambda config: with_ranks(config, here.starter, here.ranks, here.hosts, here.network))

    return member.take_part(joined, program)


def measure(folder: Path, start: jobs.Start | None, adapt: Callable[[Config], Config]) -> int:
    """Write profile.json into the folder (rank 0). Return the exit code."""
    console, worker = Console(), os.environ.get(WORKER, jobs.WORKER)
    try:
        config = _adapted(folder, adapt)
        if jobs.known_profile(config, folder, console) is None:
            outcome = jobs.run(config, folder, console, only="profile", worker=worker, start=start)
            if not outcome.ok:
                print(f"failed: {outcome.reason} (its logs are in {folder})", file=sys.stderr, flush=True)
                return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    (folder / METRICS).unlink(missing_ok=True)  # written by an attempt that failed
    return 0


def run(folder: Path, start: jobs.Start | None, adapt: Callable[[Config], Config]) -> int:
    """Run the job on rank 0. Return the exit code."""
    console, worker, before = Console(), os.environ.get(WORKER, jobs.WORKER), record.read(folder)
    identity, known = None if before is None else before.identity, Profiles()
    try:
        config = _adapted(folder, adapt)
        if preemption.restarted() and config.engine.plans:
            if config.run.resume is None or checkpoints.any_in(folder):
                config.run.resume = "auto"
            known.adopt(config, folder)
        shared = list(zip(ways_of(config), submitted.before(folder), strict=False))
        for way, place in shared:
            _adopt(known, way, place)
        config, reason = checkpointing.decide(config, folder, console, known=known, module=worker, start=start)
        if reason:
            _note(folder, identity, reason)
        else:
            reason = jobs.run(config, folder, console, known=known, worker=worker, start=start, identity=identity).reason
        for way, place in shared:
            known.leave(way, place)
    except ConfigError as error:
        if not isinstance(error.__cause__, Occupied):  # a job in the folder writes its own record
            _note(folder, identity, str(error))
        print(error, file=sys.stderr)
        return 2
    after = record.read(folder)
    if after is not None and after.state == record.PREEMPTED:
        refused = preemption.requeue()
        reason += f"; {refused or 'queued again'}"
        if refused:
            record.write(folder, after.identity, record.FAILED, reason, ranks=config.cluster.processes)
    if reason:
        print(f"failed: {reason} (its logs are in {folder})", file=sys.stderr, flush=True)
    return 1 if reason else 0


def _adapted(folder: Path, adapt: Callable[[Config], Config]) -> Config:
    """The job that was left in the folder, with the ranks that exist.

    Raises ConfigError where the job asks for other ranks.
    """
    asked = checks.load(folder / JOB)
    config = adapt(asked)
    rules.check(config)
    if asked.cluster.name == "joined":
        require_as_asked(asked, config, ("cluster.ranks", "cluster.nodes"))
    return config


def _adopt(known: Profiles, config: Config, folder: Path) -> None:
    """Use the profile in the folder for planning. Raises ConfigError if its job has ended without a profile.

    If the profile was measured on a different kind of node, this function warns, and the job measures its own.
    """
    if known.adopt(config, folder):
        return
    if (folder / "profile.json").exists():
        told = "was measured on a node, or with libraries, that are not like these: this job measures its own"
        warnings.warn(f"the sweep's profile {folder / 'profile.json'} {told}", stacklevel=2)
    elif why := _why_none(folder):
        raise ConfigError("profile", why)


def why_no_profile(folder: Path) -> str:
    """Why the profile was not measured that the submitted job in this folder waits for; empty if it was."""
    return next(filter(None, map(_why_none, submitted.before(folder))), "")


def _why_none(folder: Path) -> str:
    if (folder / "profile.json").exists() or submitted.read(folder) is None:
        return ""
    failures = [event["reason"] for event in _events(folder) if event["event"] == "failure"]
    why = f"{failures[-1]} (its logs are in {folder})" if failures else submitted.failure(folder)
    return f"the sweep's profile was not measured: {why}"


def _events(folder: Path) -> list[dict[str, Any]]:
    try:
        return read_events(folder / METRICS)
    except (OSError, ValueError):
        return []


def _note(folder: Path, identity: str | None, reason: str) -> None:
    """Record a failure before the job was a run."""
    if identity is not None:
        record.write(folder, identity, record.FAILED, reason)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
