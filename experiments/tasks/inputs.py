"""What a model reads: the one thing a data set has to know of it. Imports no torch: checks of a config ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from numpy.random import Generator

MASKED_SHARE = 0.15
"""Share of a sequence's positions that a masked language model is asked for (BERT, Devlin et al. 2019)."""


@dataclass(frozen=True)
class Tokens:
    """Batches of a language model: `input_ids` and `labels`, both int64 of shape (batch, sequence).

    Labels are aligned with positions: a causal model's label is the *next* token, so no loss has to
    shift anything; a masked model's label is the original token where it was masked, and `IGNORED`
    elsewhere. Every sequence has the same number of labels, so the mean of ranks' mean losses is that
    of the global batch.

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
        """The id that stands for a masked position: the first one after the vocabulary."""
        return self.vocabulary

    @property
    def masked_positions(self) -> int:
        """How many positions of each sequence are labelled in a masked batch; at least one."""
        return max(1, round(MASKED_SHARE * self.sequence))


@dataclass(frozen=True)
class Images:
    """Batches of an image classifier: float32 images, and int64 `labels` of shape (batch,).

    Images are `pixel_values` of shape (batch, channels, size, size), or with `flat` `inputs` of shape
    (batch, channels·size·size).

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
        """Numbers in one image."""
        return self.channels * self.size * self.size


@dataclass(frozen=True)
class Pairs:
    """Batches of a classifier of pairs of sentences: `input_ids`, `token_type_ids` and `attention_mask`, int64 of shape
    (batch, sequence), and int64 `labels` of shape (batch,).
    """

    what: ClassVar[str] = "pairs of sentences"

    sequence: int
    vocabulary: int
    classes: int


@runtime_checkable
class Sampled(Protocol):
    """Inputs of a model of one's own, which say themselves what a sample looks like: for `data=synthetic`."""

    def sample(self, random: Generator) -> Mapping[str, Any]:
        """The arrays of one sample, by the names that the loss reads them by, drawn from `random`; of one shape for all."""


Inputs = Tokens | Images | Pairs | Sampled


def described(inputs: object) -> str:
    """What a model reads, for messages: in words, or the name of a class that has none."""
    return str(getattr(inputs, "what", type(inputs).__name__))
