"""Inputs of models, and the base class of training data that a config can choose. Imports no torch at once.

A data set is a dataclass with `samples`; this module makes its batches. Data is held in numpy arrays on purpose:
torch's memory is measured, and a data set is not part of a training step.

The order of samples depends only on seed and step. Step `k` of an epoch is one global batch, a slice of that epoch's
permutation, and rank `r` takes the `r`-th part of the slice. So ranks never overlap, the concatenated batches of N
ranks are exactly the batch of a single process with an N times larger batch, and a run can continue from any step.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mdcs.options import Checked, option

if TYPE_CHECKING:  # importing torch takes seconds, and a data set is chosen before any process starts
    from numpy.random import Generator
    from torch import Tensor


MASKED_SHARE = 0.15  # Share of a sequence's positions that a masked language model predicts (BERT, Devlin et al. 2019).


@dataclass(frozen=True)
class Tokens:
    """Batches of a language model: `input_ids` and `labels`, both int64 [batch, sequence].

    Labels are aligned with positions. A causal model's label is the *next* token, so no loss has to shift anything. A
    masked model's label is the original token where it was masked, and `IGNORED` elsewhere. Every sequence has the same
    number of labels, so the mean of the ranks' mean losses is the mean loss of the global batch.

    Raises ValueError when `sequence` or `vocabulary` is out of range.
    """

    what: ClassVar[str] = "tokens"
    sequence: int
    vocabulary: int = 256
    masked: bool = False

    def __post_init__(self) -> None:
        if self.sequence < 1:
            raise ValueError(f"sequence must be at least 1, got {self.sequence}")
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary must be at least 2, got {self.vocabulary}")

    @property
    def mask_token(self) -> int:
        """The first id after the vocabulary."""
        return self.vocabulary


@dataclass(frozen=True)
class Images:
    """Batches of an image classifier: float32 images, and int64 `labels` [batch]. Images are `pixel_values` [batch,
    channels, size, size] or, with `flat`, `inputs` [batch, channels·size·size]. Raises ValueError when a number is out
    of range."""

    what: ClassVar[str] = "images"
    size: int
    channels: int
    classes: int
    flat: bool = False

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("channels", 1), ("classes", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def features(self) -> int:
        return self.channels * self.size * self.size


@dataclass(frozen=True)
class Pairs:
    """Batches of a classifier of pairs of sentences. `input_ids`, `token_type_ids` and `attention_mask` are int64
    [batch, sequence]; `labels` is int64 [batch]."""

    what: ClassVar[str] = "pairs of sentences"
    sequence: int
    vocabulary: int
    classes: int


@runtime_checkable
class Sampled(Protocol):
    """Inputs of a user's own model that make their own samples, for `data=synthetic`."""

    def sample(self, random: Generator) -> Mapping[str, Any]:
        """The arrays of one sample, drawn from `random`, by the names that the loss uses. All have the same shapes."""


Inputs = Tokens | Images | Pairs | Sampled


def described(inputs: object) -> str:
    """Describe a model's inputs for messages: in words, or by the name of their class."""
    return str(getattr(inputs, "what", type(inputs).__name__))


SHUFFLE, MASK, CONTENT, SPLIT = range(4)
"""One word of the seed sequence per purpose. So an epoch's shuffle and its masks are independent."""


Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Samples:
    """A split of a data set."""

    count: int
    at: Callable[[Any, int], Any]  # (indices, epoch) → the arrays of one batch


@dataclass(frozen=True)
class Stream:
    """A split that is read in its own order."""

    samples: Any  # an iterable, read anew in every epoch
    batch: Callable[[list[Any]], Any]  # samples → the arrays of one batch


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return random(seed, SHUFFLE, epoch).permutation(count)


def random(seed: int, *words: int) -> np.random.Generator:
    """A random generator for a seed and a purpose, independent of other purposes."""
    return np.random.default_rng([seed, *words])


IGNORED = -100  # label of a position that is not part of the loss (torch's default `ignore_index`)
Rows = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Indices of samples [batch] → windows of `sequence + 1` tokens [batch, sequence + 1]."""


@dataclass(frozen=True, kw_only=True)
class Data(Checked, ABC):
    """A source of batches, with the options that all sources share. `name` is for messages."""

    name: ClassVar[str] = "data"
    gives: ClassVar[type[Tokens | Images | Pairs]]
    """The inputs that it provides, in any shape. A source without it has a `require` of its own."""
    classes: ClassVar[int] = 0  # number of classes of its labels
    vocabulary: ClassVar[int] = 0  # number of its tokens, without a tokenizer
    batch_size: int = option(4, "samples per rank and micro-step", at_least=1)
    seed: int = option(0, "seed of the order of samples", at_least=0, profiled=False)
    workers: int = option(0, "processes per rank that prepare training batches; 0: none", at_least=0, profiled=False)

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out samples."""
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
        """The training or the held-out split, for a model that reads `inputs`, which `require` has accepted."""

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
        import torch
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info
        part = _Part(samples, rank, world, self.batch_size, self.seed)

        class Streamed(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                info = get_worker_info()
                return part.stream(first_step, epochs, *((0, 1) if info is None else (info.id, info.num_workers)))

        made: Any = Streamed()
        steps: Iterable[int] | None = None
        if isinstance(samples, Samples):
            made = part
            steps = itertools.count(first_step) if epochs is None else range(first_step, epochs * part.per_epoch)
        return iter(DataLoader(
            made, batch_size=None, sampler=steps, num_workers=workers, pin_memory=pinned,
            multiprocessing_context="fork" if workers else None,  # a data set of one's own may be no pickle
            generator=torch.Generator().manual_seed(self.seed),  # else torch's global one would be drawn from
        ))  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """A rank's parts of the global batches of a split, in the same order for any number of ranks and workers."""

    samples: Any
    rank: int
    world: int
    batch_size: int
    seed: int

    @property
    def per_epoch(self) -> int:
        return int(self.samples.count // (self.world * self.batch_size))

    def __getitem__(self, step: int) -> Arrays:
        epoch, position = divmod(step, self.per_epoch)
        start = (position * self.world + self.rank) * self.batch_size
        chosen = order(self.seed, epoch, self.samples.count)[start : start + self.batch_size]
        return self.samples.at(chosen, epoch)

    def stream(self, first_step: int, epochs: int | None, own: int, workers: int) -> Iterator[Any]:
        """Yield batches from a step on. All ranks and workers read the whole stream; several workers take turns."""
        size, step, source = self.world * self.batch_size, 0, self.samples.samples
        for epoch in itertools.count() if epochs is None else range(epochs):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            before, samples = step, iter(source)
            while len(batch := list(itertools.islice(samples, size))) == size:
                if step >= first_step and (step - first_step) % workers == own:
                    yield self.samples.batch(batch[self.rank * self.batch_size :][: self.batch_size])
                step += 1
            if step == before:
                raise ValueError(f"data: the stream has fewer samples than one global batch of {size}")


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
    Choices depend on sample and epoch, never on the rank: a sample is masked the same way in every batch."""
    input_ids = rows(indices)[:, :-1].copy()
    labels = np.full_like(input_ids, IGNORED)
    masked_positions = max(1, round(MASKED_SHARE * tokens.sequence))
    for row, index in enumerate(indices):
        drawn = random(seed, MASK, epoch, int(index))
        chosen = drawn.choice(tokens.sequence, masked_positions, replace=False)
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
