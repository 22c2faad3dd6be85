"""Pairs of sentences with their relation: Multi-NLI (Williams et al. 2018) and data sets in the same form.

Reads with Hugging Face's `datasets`: a name on their hub, or a file or folder of this machine. A row has `premise`,
`hypothesis` and `label`: 0 entailment, 1 neutral, 2 contradiction. Rows with other labels are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.tasks import hub
from experiments.tasks.inputs import Inputs, Pairs
from experiments.tasks.samples import Arrays, Samples

SHIPPED = Path(__file__).with_name("nli.jsonl")
PAD, CLS, SEP = 256, 257, 258
_HELD_OUT_ONE_IN = 5

Encode = Any
"""(premises, hypotheses, sequence) → the arrays of a batch, without labels."""


@dataclass(frozen=True, kw_only=True)
class Nli(hub.Named):
    """Pairs of sentences; without a path, those of a small file of this repository. Without a tokenizer, tokens are
    bytes and three special ones.
    """

    name, gives, classes, vocabulary = "nli", Pairs, 3, SEP + 1

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """All samples of a split. In a source without splits, every fifth row is held out."""
        assert isinstance(inputs, Pairs)
        self.require_tokenizer(inputs.vocabulary)
        rows, indices, labels = _rows(self.path or str(SHIPPED), held_out)
        encode = _bytes if self.tokenizer is None else partial(_tokens, hub.tokenizer(self.tokenizer))
        return Samples(len(indices), partial(_arrays, rows, indices, labels, encode, inputs.sequence))


@lru_cache(maxsize=2)
def _rows(path: str, held_out: bool) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
    """The rows of the source, the indices of the split's rows, and their labels. Raises ValueError if unreadable."""
    rows, has_splits = hub.rows(path, held_out)
    hub.require_columns(path, rows, "premise", "hypothesis", "label")
    labels = np.asarray(rows["label"], dtype=np.int64)
    indices = np.flatnonzero((labels >= 0) & (labels < Nli.classes))
    if not has_splits:
        indices = hub.split(indices, held_out, _HELD_OUT_ONE_IN)
    return rows, indices, labels[indices]


def _arrays(
    rows: Any, indices: NDArray[np.int64], labels: NDArray[np.int64], encode: Encode, sequence: int,
    chosen: NDArray[np.int64], epoch: int,
) -> Arrays:  # fmt: skip
    batch = rows[indices[chosen].tolist()]
    return {**encode(batch["premise"], batch["hypothesis"], sequence), "labels": labels[chosen]}


def _bytes(premises: list[str], hypotheses: list[str], sequence: int) -> Arrays:
    """Encode as [CLS] premise [SEP] hypothesis [SEP] and padding. The longer sentence is cut first."""
    shape = (len(premises), sequence)
    ids, kinds, mask = np.full(shape, PAD, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, (premise, hypothesis) in enumerate(zip(premises, hypotheses, strict=True)):
        first, second = list(premise.encode()), list(hypothesis.encode())
        half = (sequence - 3) // 2
        first = first[: max(half, sequence - 3 - len(second))]
        second = second[: sequence - 3 - len(first)]
        whole = [CLS, *first, SEP, *second, SEP]
        ids[row, : len(whole)] = whole
        kinds[row, len(first) + 2 : len(whole)] = 1
        mask[row, : len(whole)] = 1
    return {"input_ids": ids, "token_type_ids": kinds, "attention_mask": mask}


def _tokens(tokenizer: Any, premises: list[str], hypotheses: list[str], sequence: int) -> Arrays:
    made = tokenizer(premises, hypotheses, truncation=True, padding="max_length", max_length=sequence,
                     return_token_type_ids=True, return_tensors="np")  # fmt: skip
    return {name: made[name].astype(np.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
