"""Processes that a test waits for."""

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def wait_until_gone(processes: Iterable[int], seconds: float) -> list[int]:
    """Wait until none of `processes` runs any more. Return those that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    left = [pid for pid in processes if _runs(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [pid for pid in left if _runs(pid)]
    return left


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a zombie does not run; it waits to be reaped
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return sys.platform != "linux"
