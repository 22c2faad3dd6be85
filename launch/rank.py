"""Entry point of every rank (`main`), the files that it leaves, and what keeps processes from outliving their starter.

`main` runs MODULE as `__main__`, with output in `rank{r}.log` and, when it raises, the reason in `rank{r}.error`. The
launcher reads the reasons of all ranks and finds the first.
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
        print_into(folder / f"rank{rank}.log")
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


def print_into(log: Path) -> None:
    """Append to a file what this process prints, and what its children do."""
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


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
            Path(elastic).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), "utf-8")


class ReservedFile:
    """Disk space for `size` bytes at `path`, where the file appears as a whole, padded with blanks, when it is written.

    `take` raises OSError when the disk is full. File systems that copy on write may lack the space later anyway.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._part, self._size = path, path.with_name(f"{path.name}.part"), size

    def take(self) -> None:
        self._fill(b"")

    def write(self, text: str) -> None:
        """Write the file, once. A text longer than `size` needs more disk space."""
        self._fill(text.encode())
        self._part.replace(self.path)

    def give_back(self) -> None:
        self._part.unlink(missing_ok=True)

    def _fill(self, data: bytes) -> None:
        data = data.ljust(self._size)
        with open(self._part, "r+b" if self._part.exists() else "xb", buffering=0) as file:  # "wb" would free the room
            while data:
                data = data[file.write(data) :]


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process, but not its children, when `parent`, the process that started it, ends."""
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
