"""The status of each rank: a small record in the run folder, rewritten in place by one `pwrite` of the same length.

That takes microseconds and allocates no tensor, so a rank reports every step and phase, and a reader in another process
sees the old record or the new one. It survives the rank, so the launcher can name the step at which a rank was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

STARTING, JOINING = "starting", "joining"
"""The first phases of a rank: Python starts and imports; then the rank waits for the other ranks."""
_BYTES = 192
_PHASE_CHARACTERS = 64
_WORKING_SECONDS, _WORKING_SHARE, _WORKING_BYTES = 2.0, 0.02, 4096
"""Interval of `working`, and what a process does in it at least: a share of a core's time, or bytes that it writes."""


@dataclass(frozen=True)
class Status:
    """The last report of a rank, at the unix `time`. `step` is counted from 1; 0 before the first step."""

    rank: int
    pid: int
    step: int
    phase: str
    time: float


class StatusFile:
    """The record of this rank. Raises OSError when the folder cannot be written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.step, self.phase = rank, 0, STARTING
        self._pid = os.getpid()
        self._file = os.open(_path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)
        self.set()

    def set(self, *, step: int | None = None, phase: str | None = None) -> None:
        """Report that this rank is now at `step`, or in `phase`. An argument that is left out keeps its value."""
        if step is not None:
            self.step = step
        if phase is not None:
            self.phase = phase[:_PHASE_CHARACTERS].encode("ascii", "replace").decode()
        record = json.dumps(asdict(Status(self.rank, self._pid, self.step, self.phase, time.time())))
        os.pwrite(self._file, record.encode("ascii").ljust(_BYTES)[:_BYTES], 0)


_current: StatusFile | None = None


def open_for(folder: Path, rank: int) -> None:
    """Make this process report as `rank` in `folder`. `launch.rank` calls it before the worker's code runs."""
    global _current
    _current = StatusFile(folder, rank)


def set(*, step: int | None = None, phase: str | None = None) -> None:
    """Report the step or phase of this rank. Does nothing in a process that is no rank of a launched job."""
    if _current is not None:
        _current.set(step=step, phase=phase)


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Report progress during the block for as long as this process computes or writes files, as a download does."""
    over = threading.Event()

    def report() -> None:
        before = _work()
        while not over.wait(_WORKING_SECONDS):
            now = _work()
            if now[0] - before[0] > _WORKING_SHARE * _WORKING_SECONDS or now[1] - before[1] > _WORKING_BYTES:
                set()
            before = now

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()


def _work() -> tuple[float, int]:
    """Seconds of processor time, and bytes written, of this process so far."""
    try:
        written = Path("/proc/self/io").read_text("ascii").partition("wchar: ")[2].partition("\n")[0]
    except OSError:
        written = "0"
    return time.process_time(), int(written)


def current() -> Status | None:
    """The last status of this process, or None outside of a launched job."""
    at = _current
    return None if at is None else Status(at.rank, os.getpid(), at.step, at.phase, time.time())


def write(folder: Path, said: Status) -> None:
    """Write the status of a rank on another host to the place where `read` finds it."""
    written = _path(folder, said.rank).with_suffix(".part")
    written.write_text(json.dumps(asdict(said)), "ascii")
    written.replace(_path(folder, said.rank))


def read(folder: Path, rank: int) -> Status | None:
    """The last status of `rank`, or None before its first."""
    try:
        return Status(**json.loads(_path(folder, rank).read_text("ascii")))
    except (OSError, ValueError, TypeError):
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.status"
