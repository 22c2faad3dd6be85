"""Functions that keep processes from outliving the process that started them, however it ends."""

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
    """Have the kernel kill this process when `parent`, the process that started it, ends.

    Linux only; elsewhere nothing happens. Children of this process are not covered: each must call this function
    itself.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the prctl
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that it can reap them (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(sessions: Iterable[int]) -> None:
    """Reap the dead children of this process that belonged to one of `sessions`. Not every init process does it."""
    wanted = set(sessions)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if state == "Z" and int(parent) == os.getpid() and int(session) in wanted:
                os.waitpid(int(stat.parent.name), 0)  # waits if other threads of the process still end


def kill_groups(leaders: Iterable[int]) -> None:
    """Send SIGKILL to every process group in `leaders`. Groups that are gone are skipped."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


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
