"""A folder is one job's at a time: two would kill each other's ranks, and write each other's files."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "launch.lock"
_BYTES = 256


class Occupied(RuntimeError):
    """Another job is in the folder; the message is one line with its process."""


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Have the folder, which is made if there is none, until the block ends or this process does.

    Raises Occupied, with nothing in the folder touched, and OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel's: it goes with the process, however that ends
        except BlockingIOError:
            raise Occupied(f"{folder} is in use by a job of {_holder(lock)}") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def _holder(lock: int) -> str:
    return os.pread(lock, _BYTES, 0).decode(errors="replace") or "another process"
