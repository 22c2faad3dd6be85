"""Training data that is already on every machine: no downloads, no tokenizer, no image library.

Three sources. `stdlib_bytes` is byte-level text, Python's own standard library; `digits` is
scikit-learn's handwritten digits, enlarged to the image size a model wants; `synthetic` is seeded noise
of any shape. Data is held as numpy arrays on purpose: what is measured is torch's memory, and a dataset
is not part of a training step.

The order of samples is a function of (seed, step) alone. Step `k` of an epoch is one global batch, a
slice of that epoch's permutation, and rank `r` takes the `r`-th part of it. So ranks never overlap, the
concatenated batches of N ranks are exactly the batch of a single process with an N times larger batch,
and a run continues from any step.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""Label of a position that is not part of the loss (torch's default `ignore_index`)."""
MASKED_SHARE = 0.15
"""Share of a sequence's positions that a masked language model is asked for (BERT, Devlin et al. 2019)."""
SYNTHETIC_SAMPLES = 65_536
SOURCES = ("stdlib_bytes", "digits", "synthetic")

_HELD_OUT_ONE_IN = 10
_DIGIT_CLASSES = 10
# One word of the seed sequence per purpose, so that an epoch's shuffle and its masks are independent.
_SHUFFLE, _MASK, _CONTENT, _SPLIT = range(4)

Arrays = dict[str, NDArray[np.generic]]
# Indices of samples to windows of `sequence + 1` tokens, shape (batch, sequence + 1).
Rows = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True)
class Tokens:
    """Batches of a language model: `input_ids` and `labels`, both int64 of shape (batch, sequence).

    Labels are aligned with positions: a causal model's label is the *next* token, so no loss has to
    shift anything; a masked model's label is the original token where it was masked, and `IGNORED`
    elsewhere. Every sequence has the same number of labels, so the mean of ranks' mean losses is that
    of the global batch.

    Raises ValueError when `sequence` or `vocabulary` is out of range.
    """

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


Inputs = Tokens | Images


@dataclass(frozen=True)
class _Samples:
    """A split of a dataset: how many samples, and `at(indices, epoch)`, the arrays of one batch of them."""

    count: int
    at: Callable[[NDArray[np.int64], int], Arrays]


def batches(
    name: str,
    inputs: Inputs,
    *,
    rank: int,
    world: int,
    batch_size: int,
    seed: int,
    held_out: bool = False,
    epochs: int | None = None,
    first_step: int = 0,
    max_bytes: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """This rank's batches of the source `name` for a model that reads `inputs`: CPU tensors.

    Each epoch is reshuffled and drops the remainder of the last global batch. `epochs=None` never ends;
    evaluation is one pass over the other split: `held_out=True, epochs=1`. `first_step` continues a
    run: the first batch is the one that a run from 0 would give after `first_step` batches. `max_bytes`
    caps the text of `stdlib_bytes`, per split.

    Raises ValueError, at the call and not at the first batch, for an unknown source, a source that
    cannot give such inputs, a rank outside of the world, or fewer samples than one global batch.
    """
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank must be in 0 … world - 1, got rank {rank} of world {world}")
    for key, value, least in (
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
        ("first_step", first_step, 0),
    ):
        if value < least:
            raise ValueError(f"{key} must be at least {least}, got {value}")
    if max_bytes is not None and (max_bytes < 1 or name != "stdlib_bytes"):
        raise ValueError(f"max_bytes caps stdlib_bytes and must be at least 1, got {max_bytes} for {name}")
    samples = _samples(name, inputs, seed, held_out, max_bytes)
    if samples.count < world * batch_size:
        raise ValueError(
            f"{name} has {samples.count} {'held-out' if held_out else 'training'} samples, fewer than one"
            f" global batch of {world} ranks times {batch_size}"
        )
    return _steps(samples, rank, world, batch_size, seed, epochs, first_step)


def _steps(
    samples: _Samples, rank: int, world: int, batch_size: int, seed: int, epochs: int | None, first_step: int
) -> Iterator[dict[str, Tensor]]:
    per_epoch = samples.count // (world * batch_size)
    steps = itertools.count(first_step) if epochs is None else range(first_step, epochs * per_epoch)
    order_of, order = -1, np.empty(0, np.int64)
    for step in steps:
        epoch, position = divmod(step, per_epoch)
        if epoch != order_of:
            order_of, order = epoch, _random(seed, _SHUFFLE, epoch).permutation(samples.count)
        start = (position * world + rank) * batch_size
        arrays = samples.at(order[start : start + batch_size], epoch)
        yield {key: torch.from_numpy(array) for key, array in arrays.items()}


def _samples(name: str, inputs: Inputs, seed: int, held_out: bool, max_bytes: int | None) -> _Samples:
    if name not in SOURCES:
        raise ValueError(f"unknown data source {name!r}; known: {', '.join(SOURCES)}")
    if isinstance(inputs, Tokens):
        return _token_samples(name, inputs, seed, held_out, max_bytes)
    return _image_samples(name, inputs, seed, held_out)


def _token_samples(name: str, tokens: Tokens, seed: int, held_out: bool, max_bytes: int | None) -> _Samples:
    rows: Rows
    if name == "digits":
        raise ValueError("digits gives images, the model reads tokens; use stdlib_bytes or synthetic")
    if name == "synthetic":
        count, rows = SYNTHETIC_SAMPLES, partial(_synthetic_rows, tokens, seed, held_out)
    else:
        if tokens.vocabulary < 256:
            raise ValueError(f"stdlib_bytes needs a vocabulary of 256, the model has {tokens.vocabulary}")
        text = stdlib_bytes(held_out=held_out, max_bytes=max_bytes)
        # A window has one byte more than the sequence, the label of its last position.
        count, rows = (len(text) - 1) // tokens.sequence, partial(_text_rows, text, tokens.sequence)
    if tokens.masked:
        return _Samples(count, partial(_masked_arrays, rows, tokens, seed))
    return _Samples(count, partial(_causal_arrays, rows))


def _image_samples(name: str, images: Images, seed: int, held_out: bool) -> _Samples:
    if name == "stdlib_bytes":
        raise ValueError("stdlib_bytes gives tokens, the model reads images; use digits or synthetic")
    if name == "synthetic":
        return _Samples(SYNTHETIC_SAMPLES, partial(_synthetic_arrays, images, seed, held_out))
    if images.classes < _DIGIT_CLASSES:
        raise ValueError(f"digits has {_DIGIT_CLASSES} classes, the model has {images.classes}")
    pixels, labels = _digits(held_out)
    return _Samples(len(labels), partial(_digit_arrays, pixels, labels, images))


# ---- text


@lru_cache(maxsize=4)
def stdlib_bytes(*, held_out: bool = False, max_bytes: int | None = None) -> NDArray[np.uint8]:
    """The standard library's source files, joined in a fixed order: read-only uint8, one dimension.

    About one file in ten, chosen by its path, is held out. Third-party packages and the library's tests
    are not read, since what of them is installed differs between machines (ranks must still run one
    version of Python to read one text); nor are the character tables, near copies of one another that
    would put held-out text into the training text. `max_bytes` cuts the end off.

    Raises ValueError when this Python has no source files (a zipped standard library).
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in _sources(root):
        if max_bytes is not None and size >= max_bytes:
            break
        name = path.relative_to(root).as_posix()
        if (zlib.crc32(name.encode()) % _HELD_OUT_ONE_IN == 0) == held_out:
            parts.append(path.read_bytes())
            size += len(parts[-1])
    if not size:
        raise ValueError(f"no Python source files under {root}; use the synthetic source")
    return np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8)


def _sources(root: Path) -> Iterator[Path]:
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - left_out)  # in place: os.walk then goes this way and no other
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _text_rows(text: NDArray[np.uint8], sequence: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    windows: NDArray[np.uint8] = text[indices[:, None] * sequence + np.arange(sequence + 1)]
    return windows.astype(np.int64)


def _synthetic_rows(
    tokens: Tokens, seed: int, held_out: bool, indices: NDArray[np.int64]
) -> NDArray[np.int64]:
    rows = [
        _random(seed, _CONTENT, int(held_out), int(i)).integers(0, tokens.vocabulary, tokens.sequence + 1)
        for i in indices
    ]
    return np.stack(rows)


def _causal_arrays(rows: Rows, indices: NDArray[np.int64], epoch: int) -> Arrays:
    windows = rows(indices)
    return {"input_ids": windows[:, :-1].copy(), "labels": windows[:, 1:].copy()}


def _masked_arrays(rows: Rows, tokens: Tokens, seed: int, indices: NDArray[np.int64], epoch: int) -> Arrays:
    """BERT's corruption: of the chosen positions 80 % become the mask token, 10 % a random token, 10 % stay.

    Drawn per sample and epoch, never per rank, so that a sample is masked the same way in whichever
    batch it lands.
    """
    input_ids = rows(indices)[:, :-1].copy()
    labels = np.full_like(input_ids, IGNORED)
    for row, index in enumerate(indices):
        random = _random(seed, _MASK, epoch, int(index))
        chosen = random.choice(tokens.sequence, tokens.masked_positions, replace=False)
        labels[row, chosen] = input_ids[row, chosen]
        fate = random.random(len(chosen))
        other = np.where(fate < 0.9, random.integers(0, tokens.vocabulary, len(chosen)), labels[row, chosen])
        input_ids[row, chosen] = np.where(fate < 0.8, tokens.mask_token, other)
    return {"input_ids": input_ids, "labels": labels}


# ---- images


@lru_cache(maxsize=2)
def _digits(held_out: bool) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Standardized digits (count, 8, 8) and their labels (count,); the split is the same for every seed."""
    # Imported here: a second that only this source has to pay.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    bunch = load_digits()
    images = np.asarray(bunch.images, dtype=np.float32)
    images = (images - images.mean()) / images.std()
    order = _random(0, _SPLIT).permutation(len(images))
    cut = len(images) // _HELD_OUT_ONE_IN
    chosen = order[:cut] if held_out else order[cut:]
    return images[chosen], np.asarray(bunch.target, dtype=np.int64)[chosen]


def _digit_arrays(
    pixels: NDArray[np.float32],
    labels: NDArray[np.int64],
    images: Images,
    indices: NDArray[np.int64],
    epoch: int,
) -> Arrays:
    # Nearest neighbour: needs no image library and is exact on every machine.
    nearest = np.arange(images.size) * pixels.shape[-1] // images.size
    enlarged = pixels[indices][:, nearest][:, :, nearest]
    return _image_arrays(np.repeat(enlarged[:, None], images.channels, axis=1), labels[indices], images)


def _synthetic_arrays(
    images: Images, seed: int, held_out: bool, indices: NDArray[np.int64], epoch: int
) -> Arrays:
    shape = (images.channels, images.size, images.size)
    randoms = [_random(seed, _CONTENT, int(held_out), int(i)) for i in indices]
    labels = np.array([random.integers(0, images.classes) for random in randoms], dtype=np.int64)
    pixels = np.stack([random.standard_normal(shape, dtype=np.float32) for random in randoms])
    return _image_arrays(pixels, labels, images)


def _image_arrays(pixels: NDArray[np.float32], labels: NDArray[np.int64], images: Images) -> Arrays:
    if images.flat:
        return {"inputs": pixels.reshape(len(pixels), images.features), "labels": labels}
    return {"pixel_values": pixels, "labels": labels}


def _random(seed: int, *words: int) -> np.random.Generator:
    return np.random.default_rng([seed, *words])
