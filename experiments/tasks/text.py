"""Text of `datasets`, by name: one's own corpus or one on the hub, in tokens of a named tokenizer or in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.tasks import hub
from experiments.tasks.data import token_samples
from experiments.tasks.inputs import Inputs, Tokens
from experiments.tasks.samples import Samples
from mdcs.options import OptionError, option

_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, kw_only=True)
class Text(hub.Named):
    """Windows of the texts of a column. Raises OptionError without a path."""

    name, gives, vocabulary = "text", Tokens, 256

    subset: str | None = option(None, "which of the data sets of that name", profiled=False)
    column: str = option("text", "the column that is read", profiled=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None:
            raise OptionError("path", "is needed: a name on the hub, or a file or folder here")

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """Windows of the texts, one after another and across rows; the last, if short, is left out. In a source without
        splits, every tenth window is held out.
        """
        import datasets
        import pyarrow as pa

        assert isinstance(inputs, Tokens) and self.path is not None
        self.require_tokenizer(inputs.vocabulary)
        found, has_splits = hub.rows(self.path, held_out, self.subset)
        hub.require_columns(self.path, found, self.column)
        made = found.map(
            partial(_tokens, self.tokenizer, self.column), batched=True, remove_columns=found.column_names,
            features=datasets.Features(tokens=datasets.Sequence(datasets.Value("int32"))),
        )  # fmt: skip
        # One array over all rows: a view of the files that `map` has written.
        tokens = pa.chunked_array([rows.flatten() for rows in made.data.column("tokens").chunks], pa.int32())
        chosen = np.arange(max(0, (len(tokens) - 1) // inputs.sequence))
        if not has_splits:
            chosen = hub.split(chosen, held_out, _HELD_OUT_ONE_IN)
        return token_samples(len(chosen), partial(_windows, tokens, inputs.sequence, chosen), inputs, self.seed)


def _tokens(tokenizer: str | None, column: str, rows: dict[str, list[str]]) -> dict[str, Any]:
    """The tokens of these rows, as one row."""
    if tokenizer is None:
        return {
            "tokens": [np.frombuffer("".join(f"{row}\n" for row in rows[column]).encode(), np.uint8).astype(np.int32)]
        }
    made = hub.tokenizer(tokenizer)
    end = [] if made.eos_token_id is None else [made.eos_token_id]
    return {"tokens": [[token for ids in made(rows[column])["input_ids"] for token in [*ids, *end]]]}


def _windows(tokens: Any, sequence: int, chosen: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Windows of `sequence` tokens and the next one: [batch, sequence + 1]."""
    starts = chosen[indices] * sequence
    return np.stack([tokens.slice(start, sequence + 1).to_numpy() for start in starts]).astype(np.int64)
