"""Data that is on every machine: seeded noise of any shape, digits of scikit-learn, and the source files of Python."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.tasks import data
from experiments.tasks.data import Arrays, Data, Images, Inputs, Pairs, Sampled, Samples, Tokens
from mdcs.options import option

SAMPLES = 65_536


@dataclass(frozen=True, kw_only=True)
class Synthetic(Data):
    """Random tokens, or random images or pairs with random labels."""

    name = "synthetic"

    def require(self, inputs: Inputs) -> None:
        given: object = inputs
        if not isinstance(given, (Tokens, Images, Pairs, Sampled)):
            kind = type(given).__name__
            raise ValueError(
                f"synthetic makes tokens, images and pairs of sentences, the model reads {kind}: give {kind} a method"
                " sample(random) that returns the arrays of one sample, by name"
            )

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """Random samples. Every split and shape has the same number of them."""

        def randoms(indices: NDArray[np.int64]) -> list[np.random.Generator]:
            return [data.random(self.seed, data.CONTENT, int(held_out), int(i)) for i in indices]

        if isinstance(inputs, Tokens):
            numbers = inputs.vocabulary, inputs.sequence + 1
            return data.token_samples(
                SAMPLES, lambda indices: np.stack([each.integers(0, *numbers) for each in randoms(indices)]),
                inputs, self.seed,
            )  # fmt: skip
        of: Callable[[Any, list[np.random.Generator]], Arrays] = _sampled
        if isinstance(inputs, (Images, Pairs)):
            of = _images if isinstance(inputs, Images) else _pairs
        return Samples(SAMPLES, lambda indices, epoch: of(inputs, randoms(indices)))


def _sampled(inputs: Sampled, randoms: list[np.random.Generator]) -> Arrays:
    samples = [inputs.sample(each) for each in randoms]
    return {name: np.stack([np.asarray(sample[name]) for sample in samples]) for name in samples[0]}


def _images(images: Images, randoms: list[np.random.Generator]) -> Arrays:
    shape = (images.channels, images.size, images.size)
    labels = np.array([each.integers(0, images.classes) for each in randoms], dtype=np.int64)
    pixels = np.stack([each.standard_normal(shape, dtype=np.float32) for each in randoms])
    return data.image_arrays(pixels, labels, images)


def _pairs(pairs: Pairs, randoms: list[np.random.Generator]) -> Arrays:
    """Two sentences of equal length, without padding."""
    labels = np.array([each.integers(0, pairs.classes) for each in randoms], dtype=np.int64)
    tokens = np.stack([each.integers(0, pairs.vocabulary, pairs.sequence) for each in randoms])
    kinds = np.broadcast_to(np.arange(pairs.sequence) >= pairs.sequence // 2, tokens.shape).astype(np.int64)
    return {"input_ids": tokens, "token_type_ids": kinds, "attention_mask": np.ones_like(tokens), "labels": labels}


_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, kw_only=True)
class Digits(Data):
    """1,797 images of 8 × 8 pixels, a tenth of them held out."""

    name, gives, classes = "digits", Images, 10

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        assert isinstance(inputs, Images)
        pixels, labels = _digits(held_out)
        # Nearest neighbour needs no image library and is exact on every machine.
        nearest = np.arange(inputs.size) * pixels.shape[-1] // inputs.size

        def at(indices: NDArray[np.int64], epoch: int) -> Arrays:
            enlarged = pixels[indices][:, nearest][:, :, nearest]
            return data.image_arrays(np.repeat(enlarged[:, None], inputs.channels, axis=1), labels[indices], inputs)

        return Samples(len(labels), at)


@lru_cache(maxsize=2)
def _digits(held_out: bool) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Standardized digits [count, 8, 8] and their labels [count]. The split is the same for every seed."""
    # Import here: it takes a second, and only this source needs it.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    bunch = load_digits()
    images = np.asarray(bunch.images, dtype=np.float32)
    images = (images - images.mean()) / images.std()
    order = data.random(0, data.SPLIT).permutation(len(images))
    cut = len(images) // _HELD_OUT_ONE_IN
    chosen = order[:cut] if held_out else order[cut:]
    return images[chosen], np.asarray(bunch.target, dtype=np.int64)[chosen]


@dataclass(frozen=True, kw_only=True)
class StdlibBytes(Data):
    """Windows of the text; every byte is a token."""

    name, gives, vocabulary = "stdlib_bytes", Tokens, 256
    max_bytes: int | None = option(None, "longest text of a split, in bytes; null: all", at_least=1, profiled=False)

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """Windows of the text. A window has one byte more than the sequence: the label of its last position."""
        assert isinstance(inputs, Tokens)
        read = text(held_out=held_out, max_bytes=self.max_bytes)
        sequence = inputs.sequence

        def rows(indices: NDArray[np.int64]) -> NDArray[np.int64]:
            return read[indices[:, None] * sequence + np.arange(sequence + 1)].astype(np.int64)

        return data.token_samples((len(read) - 1) // sequence, rows, inputs, self.seed)


@lru_cache(maxsize=4)
def text(*, held_out: bool = False, max_bytes: int | None = None) -> NDArray[np.uint8]:
    """The standard library's source files, joined in a fixed order: a read-only uint8 array [bytes].

    About one file in ten, chosen by its path, is held out. Some files are not read. Third-party packages and the
    library's tests: the installed files differ between machines (ranks must still run one version of Python to read one
    text). The character tables: they are near copies of each other, which would put held-out text into the training
    text. `max_bytes` cuts the end off.

    Raises ValueError when this Python has no source files (a zipped standard library).
    """
    root, read = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in _sources(root):
        if max_bytes is not None and len(read) >= max_bytes:
            break
        if (zlib.crc32(path.relative_to(root).as_posix().encode()) % _HELD_OUT_ONE_IN == 0) == held_out:
            read += path.read_bytes()
    if not read:
        raise ValueError(f"no Python source files under {root}; use the synthetic source")
    return np.frombuffer(bytes(read[:max_bytes]), dtype=np.uint8)


def _sources(root: Path) -> Iterator[Path]:
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - left_out)  # in place: os.walk visits exactly these, in this order
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


@dataclass(frozen=True, kw_only=True)
class Auto(Data):
    """Data that the model can read: text of bytes for language models, else seeded noise."""

    name = "auto"

    def chosen(self, inputs: Inputs) -> Data:
        kind = StdlibBytes if isinstance(inputs, Tokens) else Synthetic
        return kind(batch_size=self.batch_size, seed=self.seed, workers=self.workers)

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        raise NotImplementedError("a checked config has the chosen data set")
