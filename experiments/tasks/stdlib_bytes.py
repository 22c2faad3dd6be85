"""Text that every machine has, as bytes: the source files of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.data import Data, token_samples
from experiments.tasks.inputs import Inputs, Tokens
from experiments.tasks.samples import Samples
from mdcs.options import option

_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, kw_only=True)
class StdlibBytes(Data):
    """Windows of the text; every byte is a token."""

    name, gives, vocabulary = "stdlib_bytes", Tokens, 256

    max_bytes: int | None = option(None, "cut the text after so many bytes, per split", at_least=1, profiled=False)

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """Windows of the text. A window has one byte more than the sequence: the label of its last position."""
        assert isinstance(inputs, Tokens)
        read = text(held_out=held_out, max_bytes=self.max_bytes)
        count = (len(read) - 1) // inputs.sequence
        return token_samples(count, partial(_rows, read, inputs.sequence), inputs, self.seed)


@lru_cache(maxsize=4)
def text(*, held_out: bool = False, max_bytes: int | None = None) -> NDArray[np.uint8]:
    """The standard library's source files, joined in a fixed order: a read-only uint8 array [bytes].

    About one file in ten, chosen by its path, is held out. Some files are not read. Third-party packages and the
    library's tests: the installed files differ between machines (ranks must still run one version of Python to read one
    text). The character tables: they are near copies of each other, which would put held-out text into the training
    text. `max_bytes` cuts the end off.

    Raises ValueError when this Python has no source files (a zipped standard library).
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in _sources(root):
        if max_bytes is not None and size >= max_bytes:
            break
        name = path.relative_to(root).as_posix()
        if (zlib.crc32(name.encode()) % _HELD_OUT_ONE_IN == 0) == held_out:
            parts.append(path.read_bytes())
            size += len(parts[-1])
    if not size:
        raise ValueError(f"no Python source files under {root}; use the synthetic source")
    return np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8)


def _sources(root: Path) -> Iterator[Path]:
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - left_out)  # in place: os.walk visits exactly these, in this order
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _rows(read: NDArray[np.uint8], sequence: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    windows: NDArray[np.uint8] = read[indices[:, None] * sequence + np.arange(sequence + 1)]
    return windows.astype(np.int64)
