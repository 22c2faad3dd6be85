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
        """Windows of the texts, one after another. In a source without splits, every tenth window is held out."""
        assert isinstance(inputs, Tokens) and self.path is not None
        self.require_tokenizer(inputs.vocabulary)
        found, has_splits = hub.rows(self.path, held_out, self.subset)
        hub.require_columns(self.path, found, self.column)
        pack = partial(_pack, self.tokenizer, self.column, inputs.sequence)
        windows = found.map(pack, batched=True, remove_columns=found.column_names).with_format("numpy")
        chosen = np.arange(len(windows))
        if not has_splits:
            chosen = hub.split(chosen, held_out, _HELD_OUT_ONE_IN)
        return token_samples(len(chosen), partial(_rows, windows, chosen), inputs, self.seed)


def _pack(tokenizer: str | None, column: str, sequence: int, rows: dict[str, list[str]]) -> dict[str, Any]:
    """Windows of `sequence` tokens and the next one, of a thousand rows at a time. The last, if short, is left out."""
    if tokenizer is None:
        tokens = np.frombuffer("\n".join(rows[column]).encode(), np.uint8).astype(np.int64)
    else:
        made = hub.tokenizer(tokenizer)
        end = [] if made.eos_token_id is None else [made.eos_token_id]
        tokens = np.array([token for ids in made(rows[column])["input_ids"] for token in [*ids, *end]], np.int64)
    count = max(0, (len(tokens) - 1) // sequence)
    return {"tokens": [tokens[i * sequence : (i + 1) * sequence + 1] for i in range(count)]}


def _rows(windows: Any, chosen: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack(windows[chosen[indices].tolist()]["tokens"])
