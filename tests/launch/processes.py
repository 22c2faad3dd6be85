"""Processes that a test waits for."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launcher_of_ranks_that_hang(folder: Path, *cluster: str) -> "subprocess.Popen[bytes]":
    """A process that has started a job of two ranks, which hang, on a cluster with these arguments."""
    code = (
        "import pathlib, sys; from launch import elastic; folder = pathlib.Path(sys.argv[1]);"
        f"cluster = elastic.Cluster({', '.join(('2', *cluster))});"
        "elastic.run(folder, cluster, {}, module='tests.launch.ranks.fail', arguments=['hung', str(folder)])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return launcher


def wait_until_gone(processes: Iterable[int], seconds: float) -> list[int]:
    """Wait until none of `processes` runs any more. Return those that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    left = [pid for pid in processes if _runs(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [pid for pid in left if _runs(pid)]
    return left


def assert_gone(processes: list[int]) -> None:
    """None runs any more, and none is a zombie, which whoever has taken it over may need a moment to reap."""
    assert wait_until_gone(processes, 10.0) == []
    deadline = time.monotonic() + 10
    while (left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a zombie does not run; it waits to be reaped
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return sys.platform != "linux"
