"""Data sets and tokenizers with a name, on Hugging Face's hub or here: text by windows, and pairs of sentences.

Pairs are Multi-NLI (Williams et al. 2018) and data sets in the same form: `premise`, `hypothesis` and `label`, 0
entailment, 1 neutral, 2 contradiction. Rows with other labels are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.data import Arrays, Data, Inputs, Pairs, Samples, Tokens, token_samples
from mdcs.options import OptionError, option

_HELD_OUT = ("validation_matched", "validation", "test")
_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True, kw_only=True)
class Named(Data):
    """A data set with a name. Raises OptionError for a local path or tokenizer that does not exist."""

    path: str | None = option(None, "name on the hub, or a local file or folder", profiled=False)
    tokenizer: str | None = option(
        None, "tokenizer of transformers: a name on the hub, or a local folder; null: bytes", profiled=False
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
        """As `Data.require_vocabulary`. A tokenizer of the hub is not asked yet."""
        if self.tokenizer is None:
            super().require_vocabulary(needed, vocabulary)
        elif is_local(self.tokenizer):
            self.require_tokenizer(vocabulary)

    def require_tokenizer(self, vocabulary: int) -> None:
        """Raise ValueError for a model whose vocabulary has not all tokens of the tokenizer."""
        if self.tokenizer is not None:
            super().require_vocabulary(len(tokenizer_of(self.tokenizer)), vocabulary)


def is_local(name: str) -> bool:
    """Return whether a name is that of a file or folder here, which need not exist."""
    return Path(name).suffix in _READERS or name.startswith(("/", ".", "~")) or Path(name).exists()


@lru_cache(maxsize=4)
def rows_of(path: str, held_out: bool, subset: str | None = None) -> tuple[Any, bool]:
    """The rows of a split, and whether the source itself has it. Raises ValueError if they cannot be read."""
    import datasets
    datasets.disable_progress_bars()
    try:
        if (reader := _READERS.get(Path(path).suffix)) is not None:
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
        there = ", ".join(found.column_names)
        raise ValueError(f"data.path: {path} has no {', '.join(sorted(missing))}; its columns: {there}")


def split(indices: NDArray[np.int64], held_out: bool, one_in: int) -> NDArray[np.int64]:
    """Indices of one split of a source without splits: every `one_in`-th is held out, the others are for training."""
    chosen = indices % one_in == one_in - 1
    return indices[chosen if held_out else ~chosen]


@lru_cache(maxsize=1)
def tokenizer_of(name: str) -> Any:
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=is_local(name))
    except Exception as error:  # as above
        raise OptionError("tokenizer", f"{name} cannot be read: {' '.join(str(error).split())}") from error


_TEXT_ONE_IN, _PAIRS_ONE_IN = 10, 5  # held out of a source without splits


@dataclass(frozen=True, kw_only=True)
class Text(Named):
    """Windows of the texts of a column. Raises OptionError without a path."""

    name, gives, vocabulary = "text", Tokens, 256
    subset: str | None = option(None, "configuration of the data set, as load_dataset takes it", profiled=False)
    column: str = option("text", "column with the text", profiled=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None:
            raise OptionError("path", "is needed: name on the hub, or a local file or folder")

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """Windows of the texts, one after another and across rows; the last, if short, is left out. In a source without
        splits, every tenth window is held out."""
        import datasets
        import pyarrow as pa
        assert isinstance(inputs, Tokens) and self.path is not None
        self.require_tokenizer(inputs.vocabulary)
        found, has_splits = rows_of(self.path, held_out, self.subset)
        require_columns(self.path, found, self.column)
        made = found.map(
            partial(_text_tokens, self.tokenizer, self.column), batched=True, remove_columns=found.column_names,
            features=datasets.Features(tokens=datasets.Sequence(datasets.Value("int32"))),
        )  # fmt: skip
        # One array over all rows: a view of the files that `map` has written.
        tokens = pa.chunked_array([rows.flatten() for rows in made.data.column("tokens").chunks], pa.int32())
        chosen = np.arange(max(0, (len(tokens) - 1) // inputs.sequence))
        if not has_splits:
            chosen = split(chosen, held_out, _TEXT_ONE_IN)
        sequence = inputs.sequence

        def rows(indices: NDArray[np.int64]) -> NDArray[np.int64]:
            starts = chosen[indices] * sequence
            return np.stack([tokens.slice(start, sequence + 1).to_numpy() for start in starts]).astype(np.int64)

        return token_samples(len(chosen), rows, inputs, self.seed)


def _text_tokens(tokenizer: str | None, column: str, rows: dict[str, list[str]]) -> dict[str, Any]:
    """The tokens of these rows, as one row."""
    if tokenizer is None:
        text = "".join(f"{row}\n" for row in rows[column])
        return {"tokens": [np.frombuffer(text.encode(), np.uint8).astype(np.int32)]}
    made = tokenizer_of(tokenizer)
    end = [] if made.eos_token_id is None else [made.eos_token_id]
    return {"tokens": [[token for ids in made(rows[column])["input_ids"] for token in [*ids, *end]]]}


SHIPPED = Path(__file__).with_name("nli.jsonl")
PAD, CLS, SEP = 256, 257, 258


@dataclass(frozen=True, kw_only=True)
class Nli(Named):
    """Pairs of sentences; without a path, those of a small file of this repository. Without a tokenizer, tokens are
    bytes and three special ones."""

    name, gives, classes, vocabulary = "nli", Pairs, 3, SEP + 1

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """All samples of a split. In a source without splits, every fifth row is held out."""
        assert isinstance(inputs, Pairs)
        self.require_tokenizer(inputs.vocabulary)
        rows, indices, labels = _pairs(self.path or str(SHIPPED), held_out)
        encode: Any = _bytes if self.tokenizer is None else partial(_pair_tokens, tokenizer_of(self.tokenizer))
        sequence = inputs.sequence

        def at(chosen: NDArray[np.int64], epoch: int) -> Arrays:
            batch = rows[indices[chosen].tolist()]
            return {**encode(batch["premise"], batch["hypothesis"], sequence), "labels": labels[chosen]}

        return Samples(len(indices), at)


@lru_cache(maxsize=2)
def _pairs(path: str, held_out: bool) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
    """The rows of the source, the indices of the split's rows, and their labels. Raises ValueError if unreadable."""
    rows, has_splits = rows_of(path, held_out)
    require_columns(path, rows, "premise", "hypothesis", "label")
    labels = np.asarray(rows["label"], dtype=np.int64)
    indices = np.flatnonzero((labels >= 0) & (labels < Nli.classes))
    if not has_splits:
        indices = split(indices, held_out, _PAIRS_ONE_IN)
    return rows, indices, labels[indices]


def _bytes(premises: list[str], hypotheses: list[str], sequence: int) -> Arrays:
    """Encode as [CLS] premise [SEP] hypothesis [SEP] and padding. The longer sentence is cut first."""
    shape = (len(premises), sequence)
    ids, kinds, mask = np.full(shape, PAD, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, (premise, hypothesis) in enumerate(zip(premises, hypotheses, strict=True)):
        first, second = list(premise.encode()), list(hypothesis.encode())
        first = first[: max((sequence - 3) // 2, sequence - 3 - len(second))]
        second = second[: sequence - 3 - len(first)]
        whole = [CLS, *first, SEP, *second, SEP]
        ids[row, : len(whole)] = whole
        kinds[row, len(first) + 2 : len(whole)] = 1
        mask[row, : len(whole)] = 1
    return {"input_ids": ids, "token_type_ids": kinds, "attention_mask": mask}


def _pair_tokens(tokenizer: Any, premises: list[str], hypotheses: list[str], sequence: int) -> Arrays:
    made = tokenizer(premises, hypotheses, truncation=True, padding="max_length", max_length=sequence,
                     return_token_type_ids=True, return_tensors="np")  # fmt: skip
    return {name: made[name].astype(np.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
