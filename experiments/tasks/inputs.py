"""Inputs of models, by which a data set makes its batches. Imports no torch: checks of a config use this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.random import Generator


MASKED_SHARE = 0.15
"""Share of a sequence's positions that a masked language model predicts (BERT, Devlin et al. 2019)."""


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
        """The id of the mask token: the first id after the vocabulary."""
        return self.vocabulary

    @property
    def masked_positions(self) -> int:
        """Number of labelled positions of each sequence in a masked batch, at least 1."""
        return max(1, round(MASKED_SHARE * self.sequence))


@dataclass(frozen=True)
class Images:
    """Batches of an image classifier: float32 images, and int64 `labels` [batch].

    Images are `pixel_values` [batch, channels, size, size] or, with `flat`, `inputs` [batch, channels·size·size].

    Raises ValueError when a number is out of range.
    """

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
        """Number of values in one image."""
        return self.channels * self.size * self.size


@dataclass(frozen=True)
class Pairs:
    """Batches of a classifier of pairs of sentences.

    `input_ids`, `token_type_ids` and `attention_mask` are int64 [batch, sequence]; `labels` is int64 [batch].
    """

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
    """A split of a data set: the number of samples, and `at(indices, epoch)`, which returns the arrays of one batch."""

    count: int
    at: Callable[[Any, int], Any]


@dataclass(frozen=True)
class Stream:
    """A split that is read in its own order.

    - samples: an iterable, read anew in every epoch.
    - batch: samples → the arrays of one batch.
    """

    samples: Any
    batch: Callable[[list[Any]], Any]


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The samples of an epoch in their order."""
    return random(seed, SHUFFLE, epoch).permutation(count)


def random(seed: int, *words: int) -> np.random.Generator:
    """A random generator for a seed and a purpose, independent of other purposes."""
    return np.random.default_rng([seed, *words])
