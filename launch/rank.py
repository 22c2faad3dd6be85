"""Entry point of every rank (`main`), the files that it leaves, and what keeps processes from outliving their starter.

`main` redirects the rank's output to `rank{r}.log`, opens its status record, and runs MODULE as `__main__`. When MODULE
raises, writes the reason to `rank{r}.error`. The launcher reads the reasons of all ranks and finds the first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from launch import status

AGENT_PID = "MDCS_AGENT_PID"
_MOST = 4000  # characters of a message or a traceback; the rank's log has the full text
_REASON_BYTES, _REPORT_BYTES = 16 << 10, 4 << 10


def main(folder: Path, module: str, arguments: list[str]) -> int:
    """Run `module` as this rank. Return the exit code."""
    rank = int(os.environ["RANK"])
    reason = reason_of(folder, rank)
    sys.argv = [module, *arguments]
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(log, stream)
        os.close(log)
        faulthandler.enable()
        status.open_for(folder, rank)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.stdout.flush()
    except SystemExit as error:
        if error.code in (None, 0):
            return 0
        _leave_reason(reason, rank, f"exited with {error.code}")
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        _leave_reason(reason, rank, f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):  # the disk may be what has failed
            traceback.print_exc()
        return 1
    return 0


def reason_of(folder: Path, rank: int) -> ReservedFile:
    """The file in which a rank leaves the reason of its failure."""
    return ReservedFile(folder / f"rank{rank}.error", _REASON_BYTES)


def report_of(folder: Path, number: int) -> ReservedFile:
    """The file in which a process that has ranks leaves the exit codes of those that failed."""
    return ReservedFile(folder / f"agent{number}.json", _REPORT_BYTES)


def _leave_reason(file: ReservedFile, rank: int, message: str) -> None:
    now, said, trace = time.time(), status.current(), traceback.format_exc()
    where = {"rank": rank, "step": said.step if said else 0, "phase": said.phase if said else "starting"}
    file.write(json.dumps({"schema": 1, "time": now, **where, "message": message[:_MOST], "traceback": trace[-_MOST:]}))
    if elastic := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # in torch's own format, for torchrun's report
        extra = {"py_callstack": trace, "timestamp": str(int(now))}
        with contextlib.suppress(OSError):
            Path(elastic).write_text(
                json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8"
            )


class ReservedFile:
    """Disk space for `size` bytes at `path`. The file appears there as a whole when it is written, padded with blanks.

    One process writes the file; any process may have reserved the space before. File systems that copy on write may
    lack the space despite the reservation.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._part, self._size = path, path.with_name(f"{path.name}.part"), size

    def take(self) -> None:
        """Reserve the space. Raises OSError when the disk is full."""
        self._fill(b"")

    def write(self, text: str) -> None:
        """Write the file, once. A text longer than `size` needs more disk space."""
        self._fill(text.encode())
        self._part.replace(self.path)

    def give_back(self) -> None:
        """Free the space if the file was not written."""
        self._part.unlink(missing_ok=True)

    def _fill(self, data: bytes) -> None:
        data = data.ljust(self._size)
        with open(self._part, "r+b" if self._part.exists() else "xb", buffering=0) as file:  # "wb" would free the room
            while data:
                data = data[file.write(data) :]


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


def kill_groups(leaders: Iterable[int]) -> None:
    """Send SIGKILL to every process group in `leaders`. Groups that are gone are skipped."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
