"""Splits of a data set, and the random order of their samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
