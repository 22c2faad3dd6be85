"""Base class of training data that a config can choose.

A data set is a dataclass with `samples`; this module makes its batches. Data is held in numpy arrays on purpose:
torch's memory is measured, and a data set is not part of a training step.

The order of samples depends only on seed and step. Step `k` of an epoch is one global batch, a slice of that epoch's
permutation, and rank `r` takes the `r`-th part of the slice. So ranks never overlap, the concatenated batches of N
ranks are exactly the batch of a single process with an N times larger batch, and a run can continue from any step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.inputs import MASK, Arrays, Images, Inputs, Pairs, Samples, Stream, Tokens, described, random
from mdcs.options import Checked, option

if TYPE_CHECKING:  # importing torch takes seconds, and a data set is chosen before any process starts
    from torch import Tensor

IGNORED = -100
"""Label of a position that is not part of the loss (torch's default `ignore_index`)."""
Rows = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Indices of samples [batch] → windows of `sequence + 1` tokens [batch, sequence + 1]."""


@dataclass(frozen=True, kw_only=True)
class Data(Checked, ABC):
    """A source of batches, with the options that all sources share. `name` is for messages."""

    name: ClassVar[str] = "data"
    gives: ClassVar[type[Tokens | Images | Pairs]]
    """The inputs that it provides, in any shape. A source without it has a `require` of its own."""
    classes: ClassVar[int] = 0
    """Number of classes of its labels."""
    vocabulary: ClassVar[int] = 0
    """Number of its tokens, without a tokenizer."""

    batch_size: int = option(4, "samples per rank and micro-step", at_least=1)
    seed: int = option(0, "seed of the order of samples", at_least=0, profiled=False)
    workers: int = option(
        0, "processes per rank that prepare training batches; 0: none", at_least=0, profiled=False
    )

    @property
    def evaluates(self) -> bool:
        """Return whether there are held-out samples."""
        return True

    @property
    def fills_cache(self) -> bool:
        """Return whether the first use on a machine downloads or computes what later ones find there."""
        return False

    def tokens(self, inputs: Inputs) -> int | None:
        """Number of tokens in a sample; None for samples that have none."""
        return getattr(inputs, "sequence", None)

    def require(self, inputs: Inputs) -> None:
        """Raise ValueError if this source cannot provide such inputs."""
        if not isinstance(inputs, self.gives):
            told = f"the model reads {described(inputs)}; use another source, or synthetic"
            raise ValueError(f"{self.name} gives {self.gives.what}, {told}")
        if not isinstance(inputs, Tokens) and inputs.classes < self.classes:
            raise ValueError(f"{self.name} has {self.classes} classes, the model has {inputs.classes}")
        if not isinstance(inputs, Images):
            self.require_vocabulary(self.vocabulary, inputs.vocabulary)

    def require_vocabulary(self, needed: int, vocabulary: int) -> None:
        """Raise ValueError for a model whose vocabulary has not all tokens."""
        if vocabulary < needed:
            raise ValueError(f"{self.name} needs a vocabulary of {needed}, the model has {vocabulary}")

    @abstractmethod
    def samples(self, inputs: Inputs, held_out: bool) -> Samples | Stream:
        """The training split or the held-out split, for a model that reads `inputs`. `require` has accepted `inputs`.
        """

    def batches(
        self, inputs: Inputs, *, rank: int, world: int, held_out: bool = False, epochs: int | None = None,
        first_step: int = 0, workers: int = 0, pinned: bool = False,
    ) -> Iterator[dict[str, Tensor]]:  # fmt: skip
        """Yield this rank's batches for a model that reads `inputs`, as CPU tensors, from a DataLoader.

        Each epoch is reshuffled and drops the remainder of the last global batch. `epochs=None` never ends. Evaluation
        is one pass over the other split: `held_out=True, epochs=1`. With `first_step` a run continues: the first batch
        is the one that a run from 0 would yield after `first_step` batches. Neither `workers`, the number of processes
        that make batches ahead, nor `pinned`, whether batches are in pinned memory, changes a batch.

        Raises ValueError at the call, not at the first batch, if this source cannot provide such inputs, for a rank
        outside of the world, or for fewer samples than one global batch.
        """
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank must be in 0 … world - 1, got rank {rank} of world {world}")
        if first_step < 0:
            raise ValueError(f"first_step must be at least 0, got {first_step}")
        self.require(inputs)
        samples = self.samples(inputs, held_out)
        if isinstance(samples, Samples) and samples.count < world * self.batch_size:
            raise ValueError(
                f"{self.name} has {samples.count} {'held-out' if held_out else 'training'} samples, fewer than one"
                f" global batch of {world} ranks times {self.batch_size}"
            )
        from experiments.tasks.loading import Part, loader

        part = Part(rank, world, self.batch_size, self.seed)
        return loader(samples, part, epochs=epochs, first_step=first_step, workers=workers, pinned=pinned)


# ---- from a source's samples to a model's batches


def token_samples(count: int, rows: Rows, tokens: Tokens, seed: int) -> Samples:
    """Windows of tokens in the form that a language model reads, causal or masked."""
    if tokens.masked:
        return Samples(count, partial(_masked, rows, tokens, seed))
    return Samples(count, partial(_causal, rows))


def _causal(rows: Rows, indices: NDArray[np.int64], epoch: int) -> Arrays:
    windows = rows(indices)
    return {"input_ids": windows[:, :-1].copy(), "labels": windows[:, 1:].copy()}


def _masked(rows: Rows, tokens: Tokens, seed: int, indices: NDArray[np.int64], epoch: int) -> Arrays:
    """BERT's corruption: of the chosen positions, 80 % become the mask token, 10 % a random token, and 10 % stay.

    Choices depend on sample and epoch, never on the rank: a sample is masked the same way in every batch.
    """
    input_ids = rows(indices)[:, :-1].copy()
    labels = np.full_like(input_ids, IGNORED)
    for row, index in enumerate(indices):
        drawn = random(seed, MASK, epoch, int(index))
        chosen = drawn.choice(tokens.sequence, tokens.masked_positions, replace=False)
        labels[row, chosen] = input_ids[row, chosen]
        fate = drawn.random(len(chosen))
        other = np.where(fate < 0.9, drawn.integers(0, tokens.vocabulary, len(chosen)), labels[row, chosen])
        input_ids[row, chosen] = np.where(fate < 0.8, tokens.mask_token, other)
    return {"input_ids": input_ids, "labels": labels}


def image_arrays(pixels: NDArray[np.float32], labels: NDArray[np.int64], images: Images) -> Arrays:
    """A batch of images [batch, channels, size, size] in the form that the model reads."""
    if images.flat:
        return {"inputs": pixels.reshape(len(pixels), images.features), "labels": labels}
    return {"pixel_values": pixels, "labels": labels}
