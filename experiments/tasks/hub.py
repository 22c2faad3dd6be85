"""Data sets and tokenizers with a name: on Hugging Face's hub, or a file or folder of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.data import Data
from mdcs.options import OptionError, option

_HELD_OUT = ("validation_matched", "validation", "test")
_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True, kw_only=True)
class Named(Data):
    """A data set with a name. Raises OptionError for a local path or tokenizer that does not exist."""

    path: str | None = option(None, "a name on the hub, or a file or folder here", profiled=False)
    tokenizer: str | None = option(
        None, "a tokenizer of transformers: a name on the hub, or a folder here; null: bytes", profiled=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, name in {"path": self.path, "tokenizer": self.tokenizer}.items():
            if name is not None and is_local(name) and not Path(name).exists():
                raise OptionError(key, f"no such file or folder: {name}")

    @property
    def fills_cache(self) -> bool:
        return self.path is not None or self.tokenizer is not None

    def require_vocabulary(self, needed: int, vocabulary: int) -> None:
        """Raise ValueError for a model whose vocabulary has not all tokens. A tokenizer of the hub is not asked yet."""
        if self.tokenizer is None:
            super().require_vocabulary(needed, vocabulary)
        elif is_local(self.tokenizer):
            self.require_tokenizer(vocabulary)

    def require_tokenizer(self, vocabulary: int) -> None:
        """Raise ValueError for a model whose vocabulary has not all tokens of the tokenizer."""
        if self.tokenizer is not None:
            super().require_vocabulary(len(tokenizer(self.tokenizer)), vocabulary)


def is_local(name: str) -> bool:
    """Whether a name is that of a file or folder here, which need not exist."""
    return Path(name).suffix in _READERS or name.startswith(("/", ".", "~")) or Path(name).exists()


@lru_cache(maxsize=4)
def rows(path: str, held_out: bool, subset: str | None = None) -> tuple[Any, bool]:
    """The rows of a split, and whether they are a split of the source's own. Raises ValueError if they cannot be read.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        reader = _READERS.get(Path(path).suffix)
        if reader is not None:
            found = datasets.load_dataset(reader, data_files=path)
        elif (Path(path) / "dataset_dict.json").exists():
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, subset)
    except Exception as error:  # errors of network, hub and files have no common base class
        raise ValueError(f"data.path: {path} cannot be read: {' '.join(str(error).split())}") from error
    other = next((name for name in _HELD_OUT if name in found), None)
    return found[other if held_out and other is not None else "train"], other is not None


def require_columns(path: str, found: Any, *columns: str) -> None:
    """Raise ValueError unless the rows of `path` have these columns."""
    if missing := {*columns} - {*found.column_names}:
        raise ValueError(
            f"data.path: {path} has no {', '.join(sorted(missing))}; its columns: {', '.join(found.column_names)}"
        )


def split(indices: NDArray[np.int64], held_out: bool, one_in: int) -> NDArray[np.int64]:
    """Indices of one split of a source without splits: every `one_in`-th is held out, the others are for training."""
    chosen = indices % one_in == one_in - 1
    return indices[chosen if held_out else ~chosen]


@lru_cache(maxsize=1)
def tokenizer(name: str) -> Any:
    """A tokenizer of transformers. Raises OptionError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=is_local(name))
    except Exception as error:  # as above
        raise OptionError("tokenizer", f"{name} cannot be read: {' '.join(str(error).split())}") from error
