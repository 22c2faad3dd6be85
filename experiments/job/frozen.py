"""A job whose config was resolved when it was handed in: `python -m experiments.job.frozen RUN_DIR`, as one of its ranks.

Rank 0's folder is RUN_DIR, with config.yaml in it; the others need none (`experiments.job.member`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from experiments.config import checks
from experiments.config.schema import Config, ConfigError
from experiments.job import checkpointing, record
from experiments.job import run as jobs
from hydra_plugins._mdcs_slurm import JOB
from launch import preemption
from launch.place import NoPlace, place

WORKER = "MDCS_WORKER"


def freeze(config: Config, folder: Path) -> None:
    """Leave the config for a job that starts later, perhaps elsewhere."""
    checks.save(config, folder / JOB)
    record.write(folder, record.identity_of(config), record.HANDED_IN)


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
    identity = None if before is None else before.identity
    try:
        config = adapt(checks.load(folder / JOB))
        if preemption.restarted() and config.run.resume is None and config.engine.plans:
            config.run.resume = "auto"
        config, reason = checkpointing.decide(config, folder, console, module=worker, start=start)
        reason = reason or jobs.run(config, folder, console, worker=worker, start=start, identity=identity).reason
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    after = record.read(folder)
    if after is not None and after.state == record.PREEMPTED:
        reason += f"; {preemption.requeue() or 'handed in again'}"
    if reason:
        print(f"failed: {reason} (its logs are in {folder})", file=sys.stderr, flush=True)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
