"""A small file that can still be written when the disk is full: its disk space is reserved beforehand."""

from __future__ import annotations

from pathlib import Path


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
