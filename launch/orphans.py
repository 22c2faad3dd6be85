"""No process outlives the one that started it, however that one ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends (Linux; elsewhere nothing
    happens).

    Only the process itself: what it starts has to ask for the same.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, which can then reap them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(sessions: Iterable[int]) -> None:
    """Reap the dead children of this process that belonged to one of `sessions`: not every init does."""
    wanted = set(sessions)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if state == "Z" and int(parent) == os.getpid() and int(session) in wanted:
                os.waitpid(int(stat.parent.name), 0)  # its other threads may need a moment more


def kill_groups(leaders: Iterable[int]) -> None:
    """SIGKILL every process group in `leaders`; groups that are gone are skipped."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def wait_until_gone(processes: Iterable[int], seconds: float) -> list[int]:
    """Wait until none of `processes` runs any more; returns those that still do after `seconds`."""
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
    with contextlib.suppress(OSError):  # a zombie is only waiting to be reaped
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return sys.platform != "linux"
