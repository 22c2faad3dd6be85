"""Stands in for :func:`launch.elastic.run` where launching is not what is tested: the ranks' module runs here, once per
rank, one after the other. The jobs of a sweep then start no process; what a rank raises is the job's reason.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

from launch.elastic import Cluster, Outcome
from launch.status import Status

# What a program's process runs first to have no ranks: ``python -c``.
INSTEAD_OF_RANKS = (
    "from launch import elastic, warm; from tests.experiments import one_process; elastic.run = one_process.run; "
    "warm.Warm.run = lambda self, *arguments, **named: one_process.run(*arguments, **named); "
)


def run(
    run_dir: Path, cluster: Cluster, env: Mapping[str, str], *, module: str, arguments: Sequence[str] = (),
    on_tick: Callable[[Sequence[Status | None]], None] = lambda statuses: None,
) -> Outcome:  # fmt: skip
    for rank in range(cluster.ranks):
        with mock.patch.dict(os.environ, RANK=str(rank)), mock.patch.object(sys, "argv", [module, *arguments]):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except Exception as error:
                return Outcome(False, f"rank {rank} failed: {type(error).__name__}: {error}", rank, 0)
    on_tick([None] * cluster.ranks)
    return Outcome(True)
