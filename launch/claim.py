"""A lock that gives a folder to one job at a time.

Two jobs in one folder would kill each other's ranks and overwrite each other's files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "launch.lock"
_BYTES = 256
_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP  # NFS without a lock manager, Lustre mounted without flock


class Occupied(RuntimeError):
    """Raised when another job is in the folder. The message is one line that names its process."""


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` until the block or this process ends. The folder is made if it does not exist.

    Raises Occupied, before it changes anything in the folder, and OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process ends
        except BlockingIOError:
            raise Occupied(f"{folder} is in use by a job of {_holder(lock)}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(f"{folder}: its file system has no locks, so start no other job there", stacklevel=3)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def _holder(lock: int) -> str:
    return os.pread(lock, _BYTES, 0).decode(errors="replace") or "another process"
