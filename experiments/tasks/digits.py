"""scikit-learn's handwritten digits, enlarged to the model's image size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.data import Data, image_arrays
from experiments.tasks.inputs import Images, Inputs
from experiments.tasks.samples import SPLIT, Arrays, Samples, random

_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, kw_only=True)
class Digits(Data):
    """1,797 images of 8 × 8 pixels, a tenth of them held out."""

    name, gives, classes = "digits", Images, 10

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """All samples of a split."""
        assert isinstance(inputs, Images)
        pixels, labels = _digits(held_out)
        return Samples(len(labels), partial(_arrays, pixels, labels, inputs))


@lru_cache(maxsize=2)
def _digits(held_out: bool) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Standardized digits [count, 8, 8] and their labels [count]. The split is the same for every seed."""
    # Import here: it takes a second, and only this source needs it.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    bunch = load_digits()
    images = np.asarray(bunch.images, dtype=np.float32)
    images = (images - images.mean()) / images.std()
    order = random(0, SPLIT).permutation(len(images))
    cut = len(images) // _HELD_OUT_ONE_IN
    chosen = order[:cut] if held_out else order[cut:]
    return images[chosen], np.asarray(bunch.target, dtype=np.int64)[chosen]


def _arrays(
    pixels: NDArray[np.float32], labels: NDArray[np.int64], images: Images, indices: NDArray[np.int64], epoch: int
) -> Arrays:
    # Nearest neighbour needs no image library and is exact on every machine.
    nearest = np.arange(images.size) * pixels.shape[-1] // images.size
    enlarged = pixels[indices][:, nearest][:, :, nearest]
    return image_arrays(np.repeat(enlarged[:, None], images.channels, axis=1), labels[indices], images)
