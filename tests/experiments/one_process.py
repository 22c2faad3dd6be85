"""Programs of experiments/ in the process of the tests: most of them say and write what they do in less time than Python starts.

What stands in for :func:`launch.elastic.run` meanwhile starts no process either, unless a test says so: the ranks' module runs
here, once per rank, one after the other, and what a rank raises is the job's reason.
"""

import io
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from launch import elastic
from launch.elastic import Cluster, Outcome, Warm
from launch.status import Status


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


def call(
    program: ModuleType, folder: Path, *arguments: str, worker: str | None = None, start: Callable[..., Outcome] = run
) -> subprocess.CompletedProcess[str]:
    """Run a program with this command line in this folder. The ranks' module is `worker`, and `start` starts them."""
    out, err = io.StringIO(), io.StringIO()
    terminate = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        if worker:
            patch.setenv("MDCS_WORKER", worker)
        patch.setattr(sys, "argv", [f"{program.__name__.rpartition('.')[2]}.py", *arguments])
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which programs change
        patch.setattr(elastic, "run", start)
        patch.setattr(Warm, "run", lambda self, *args, **named: start(*args, **named))
        try:
            code: Any = program.main()
        except SystemExit as ended:
            code = ended.code
        finally:
            signal.signal(signal.SIGTERM, terminate)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
