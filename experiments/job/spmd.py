"""A program whose ranks torchrun or srun has started: rank 0 runs the program, and every process is a rank of its jobs.

Only rank 0 composes configs, and its folder is the job's folder. The other ranks get the resolved config and a
temporary folder; their logs are kept in the job's folder.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.config import checks, started
from experiments.config.started import Started
from experiments.job import resolved
from launch.elastic import Cluster, Outcome
from launch.place import NoPlace, Place, described, place

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def on_rank_zero(program: Callable[[], int]) -> int:
    """Run the program, which starts jobs, on one rank, and its jobs on all. Return its exit code, the same on all."""
    try:
        joined = place()
        return program() if joined is None else _take_part(joined, program)
    except NoPlace as error:
        print(error, file=sys.stderr, flush=True)
        return 2


def _take_part(place: Place, program: Callable[[], int]) -> int:
    from launch.spmd import Ranks  # torch takes seconds

    libc = ctypes.CDLL(None)
    for option, size in ((_MMAP_THRESHOLD, resolved.MMAP_BYTES), (_TRIM_THRESHOLD, resolved.TRIM_BYTES)):
        libc.mallopt(option, size)  # in a process that has started, variables of its environment would be too late
    ranks = Ranks(place, _prepare)

    def start(
        folder: Path, cluster: Cluster, env: Mapping[str, str], *, module: str, arguments: Sequence[str], on_tick: Any
    ) -> Outcome:
        config = checks.load(folder / "config.yaml")
        payload = checks.as_yaml(dataclasses.replace(config, profile=dataclasses.replace(config.profile, path=None)))
        return ranks.run(
            folder, cluster, payload=payload, module=module, arguments=arguments[1:], on_tick=on_tick
        )  # without the folder: each rank adds its own

    started.here = Started(place.starter, place.world, place.hosts, described(ranks.interface), start)
    try:
        return ranks.serve(program if place.rank == 0 else None)
    finally:
        started.here = None


def _prepare(folder: Path, payload: str) -> dict[str, str]:
    if not (folder / "config.yaml").exists():  # another rank's folder than the first's
        (folder / "config.yaml").write_text(payload, encoding="utf-8")
    return resolved.environment(checks.load(folder / "config.yaml").cluster)
