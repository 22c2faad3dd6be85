"""Seeded noise of any shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.data import Data, image_arrays, token_samples
from experiments.tasks.inputs import Images, Inputs, Pairs, Sampled, Tokens
from experiments.tasks.samples import CONTENT, Arrays, Samples, random

SAMPLES = 65_536


@dataclass(frozen=True, kw_only=True)
class Synthetic(Data):
    """Random tokens, or random images or pairs with random labels."""

    name = "synthetic"

    def require(self, inputs: Inputs) -> None:
        """Raise ValueError unless the inputs are of :mod:`experiments.tasks.inputs` or have a method `sample`."""
        given: object = inputs
        if not isinstance(given, (Tokens, Images, Pairs, Sampled)):
            kind = type(given).__name__
            raise ValueError(
                f"synthetic makes tokens, images and pairs of sentences, the model reads {kind}: give {kind} a method"
                " sample(random) that returns the arrays of one sample, by name"
            )

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """Random samples. Every split and shape has the same number of them."""
        if isinstance(inputs, Tokens):
            return token_samples(SAMPLES, partial(_rows, inputs, self.seed, held_out), inputs, self.seed)
        if isinstance(inputs, Pairs):
            return Samples(SAMPLES, partial(_pairs, inputs, self.seed, held_out))
        if isinstance(inputs, Images):
            return Samples(SAMPLES, partial(_arrays, inputs, self.seed, held_out))
        return Samples(SAMPLES, partial(_own, inputs, self.seed, held_out))


def _rows(tokens: Tokens, seed: int, held_out: bool, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = [
        random(seed, CONTENT, int(held_out), int(i)).integers(0, tokens.vocabulary, tokens.sequence + 1)
        for i in indices
    ]
    return np.stack(rows)


def _arrays(images: Images, seed: int, held_out: bool, indices: NDArray[np.int64], epoch: int) -> Arrays:
    shape = (images.channels, images.size, images.size)
    randoms = [random(seed, CONTENT, int(held_out), int(i)) for i in indices]
    labels = np.array([each.integers(0, images.classes) for each in randoms], dtype=np.int64)
    pixels = np.stack([each.standard_normal(shape, dtype=np.float32) for each in randoms])
    return image_arrays(pixels, labels, images)


def _own(inputs: Sampled, seed: int, held_out: bool, indices: NDArray[np.int64], epoch: int) -> Arrays:
    """Samples of inputs that make their own samples."""
    samples = [inputs.sample(random(seed, CONTENT, int(held_out), int(i))) for i in indices]
    return {name: np.stack([np.asarray(sample[name]) for sample in samples]) for name in samples[0]}


def _pairs(pairs: Pairs, seed: int, held_out: bool, indices: NDArray[np.int64], epoch: int) -> Arrays:
    """Two sentences of equal length, without padding."""
    randoms = [random(seed, CONTENT, int(held_out), int(i)) for i in indices]
    labels = np.array([each.integers(0, pairs.classes) for each in randoms], dtype=np.int64)
    tokens = np.stack([each.integers(0, pairs.vocabulary, pairs.sequence) for each in randoms])
    kinds = np.broadcast_to(np.arange(pairs.sequence) >= pairs.sequence // 2, tokens.shape).astype(np.int64)
    return {"input_ids": tokens, "token_type_ids": kinds, "attention_mask": np.ones_like(tokens), "labels": labels}
