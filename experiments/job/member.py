"""A program whose ranks torchrun or srun has started: rank 0 runs the program, the other ranks run jobs for it.

Only rank 0 composes configs, and its folder is the job's folder. The other ranks get the resolved config and a
temporary folder; their logs are kept in the job's folder.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from experiments.config import checks, started
from experiments.config.started import Started
from experiments.job.resolved import environment
from launch import orphans, preemption
from launch.elastic import Cluster, Outcome
from launch.joined import Gone, Membership
from launch.place import NoPlace, Place, described


def take_part(place: Place, program: Callable[[], int]) -> int:
    """Run the program as rank 0, or the jobs of another rank. Return the exit code, which is the same on all ranks."""
    orphans.die_with_parent(os.getppid())
    try:
        with Membership(place) as member:
            return _lead(member, program) if place.rank == 0 else _follow(member)
    except (NoPlace, Gone) as error:
        print(f"rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130


def _lead(member: Membership, program: Callable[[], int]) -> int:
    def start(
        folder: Path, cluster: Cluster, env: Mapping[str, str], *, module: str, arguments: Sequence[str], on_tick: Any
    ) -> Outcome:
        config = checks.load(folder / "config.yaml")
        payload = checks.as_yaml(dataclasses.replace(config, profile=dataclasses.replace(config.profile, path=None)))
        return member.run(
            folder, cluster, env, payload=payload, module=module, arguments=arguments[1:], on_tick=on_tick
        )  # without the folder: each rank adds its own

    place = member.place
    started.here = Started(place.starter, place.world, place.hosts, described(member.interface), start)
    try:
        return member.leave(program())
    finally:
        started.here = None


def _follow(member: Membership) -> int:
    if not preemption.expected():
        signal.signal(signal.SIGTERM, _stop)  # as for Ctrl-C: the rank ends before this process
    while not isinstance(job := member.receive(), int):
        folder, keep = Path(tempfile.mkdtemp(prefix="mdcs-rank-")), False
        try:
            (folder / "config.yaml").write_text(job.payload, encoding="utf-8")
            member.take_part(job, folder, environment(checks.load(folder / "config.yaml").cluster))
        except Gone:
            keep = True  # the message names the log in this folder, and no other host takes it
            raise
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
    return job


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
