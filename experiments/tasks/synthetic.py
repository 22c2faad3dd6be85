"""Seeded noise of any shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.data import CONTENT, Arrays, Data, Samples, image_arrays, random, token_samples
from experiments.tasks.inputs import Images, Inputs, Tokens

SAMPLES = 65_536


@dataclass(frozen=True, kw_only=True)
class Synthetic(Data):
    """Random tokens, or random images with random labels."""

    name = "synthetic"

    def require(self, inputs: Inputs) -> None:
        """Whatever a model reads."""

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """The same number of samples for every split and shape."""
        if isinstance(inputs, Tokens):
            return token_samples(SAMPLES, partial(_rows, inputs, self.seed, held_out), inputs, self.seed)
        return Samples(SAMPLES, partial(_arrays, inputs, self.seed, held_out))


def _rows(tokens: Tokens, seed: int, held_out: bool, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = [
        random(seed, CONTENT, int(held_out), int(i)).integers(0, tokens.vocabulary, tokens.sequence + 1) for i in indices
    ]
    return np.stack(rows)


def _arrays(images: Images, seed: int, held_out: bool, indices: NDArray[np.int64], epoch: int) -> Arrays:
    shape = (images.channels, images.size, images.size)
    randoms = [random(seed, CONTENT, int(held_out), int(i)) for i in indices]
    labels = np.array([each.integers(0, images.classes) for each in randoms], dtype=np.int64)
    pixels = np.stack([each.standard_normal(shape, dtype=np.float32) for each in randoms])
    return image_arrays(pixels, labels, images)
