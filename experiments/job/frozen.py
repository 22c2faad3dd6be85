"""A job whose config was resolved when it was handed in: `python -m experiments.job.frozen RUN_DIR`, as one of its ranks.

Rank 0's folder is RUN_DIR, with config.yaml in it; the others need none (`experiments.job.member`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.config import checks
from experiments.config.schema import Config, ConfigError
from experiments.job import checkpointing, checkpoints, record
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from experiments.job.started import require_as_asked
from hydra_plugins._mdcs_slurm import JOB
from launch import preemption
from launch.claim import Occupied
from launch.place import NoPlace, place

WORKER = "MDCS_WORKER"


def freeze(config: Config, folder: Path, identity: str | None = None) -> None:
    """Leave the config for a job that starts later, perhaps elsewhere: in another folder, in any case."""
    checks.save(files_from_here(config), folder / JOB)
    record.write(folder, identity or record.identity_of(config), record.HANDED_IN)


def files_from_here(config: Config) -> Config:
    """The config with the whole paths of the files that it names."""
    engine: Any = config.engine
    if getattr(engine, "plan", None) is not None:
        engine = dataclasses.replace(engine, plan=os.path.abspath(engine.plan))
    profile, run = config.profile, config.run
    if profile.path is not None:
        profile = dataclasses.replace(profile, path=os.path.abspath(profile.path))
    if run.resume not in (None, "auto"):
        run = dataclasses.replace(run, resume=os.path.abspath(run.resume))
    return dataclasses.replace(config, engine=engine, profile=profile, run=run)


def main(folder: Path) -> int:
    """Be a rank of the job; returns the exit code."""
    from experiments.job import member  # which needs torch; what only freezes does not

    joined = place()
    if joined is None:
        raise NoPlace("nobody has made this process a rank")
    return member.take_part(joined, lambda start, adapt: run(folder, start, adapt))


def run(folder: Path, start: jobs.Start, adapt: Callable[[Config], Config]) -> int:
    """The job itself, on rank 0."""
    console, worker, before = Console(), os.environ.get(WORKER, jobs.WORKER), record.read(folder)
    identity, known = None if before is None else before.identity, Profiles()
    try:
        handed_in = checks.load(folder / JOB)
        config = adapt(handed_in)
        if handed_in.cluster.name == "joined":
            require_as_asked(handed_in, config, ("cluster.ranks", "cluster.nodes"))
        if preemption.restarted() and config.engine.plans:
            if config.run.resume is None or checkpoints.any_in(folder):
                config.run.resume = "auto"
            known.adopt(config, folder)
        config, reason = checkpointing.decide(config, folder, console, known=known, module=worker, start=start)
        if reason:
            _note(folder, identity, reason)
        else:
            reason = jobs.run(config, folder, console, known=known, worker=worker, start=start, identity=identity).reason
    except ConfigError as error:
        if not isinstance(error.__cause__, Occupied):  # the folder, by a job that tells of itself
            _note(folder, identity, str(error))
        print(error, file=sys.stderr)
        return 2
    after = record.read(folder)
    if after is not None and after.state == record.PREEMPTED:
        refused = preemption.requeue()
        reason += f"; {refused or 'handed in again'}"
        if refused:
            record.write(folder, after.identity, record.FAILED, reason, ranks=config.cluster.processes)
    if reason:
        print(f"failed: {reason} (its logs are in {folder})", file=sys.stderr, flush=True)
    return 1 if reason else 0


def _note(folder: Path, identity: str | None, reason: str) -> None:
    """That it has failed before it was a run."""
    if identity is not None:
        record.write(folder, identity, record.FAILED, reason)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
