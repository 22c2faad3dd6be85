"""A small file that can still be written when the disk is full: its room is taken beforehand."""

from __future__ import annotations

from pathlib import Path


class ReservedFile:
    """Room for `size` bytes of `path`, which is there, whole, once it is written; blanks fill it up.

    Of several processes one writes it, and any may have taken its room before. File systems that copy on write may have none
    all the same.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._part, self._size = path, path.with_name(f"{path.name}.part"), size

    def take(self) -> None:
        """Take the room; raises OSError when there is none."""
        self._fill(b"")

    def write(self, text: str) -> None:
        """Make it the file, once; a longer text than the room takes more of the disk."""
        self._fill(text.encode())
        self._part.replace(self.path)

    def give_back(self) -> None:
        """Free the room if it is not written."""
        self._part.unlink(missing_ok=True)

    def _fill(self, data: bytes) -> None:
        data = data.ljust(self._size)
        with open(self._part, "r+b" if self._part.exists() else "xb", buffering=0) as file:  # "wb" would free the room
            while data:
                data = data[file.write(data) :]
