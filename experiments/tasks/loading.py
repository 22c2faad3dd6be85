"""DataLoaders of one rank: its parts of the global batches, in the same order for any number of ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from experiments.tasks.inputs import Arrays, Samples, Stream, order


@dataclass(frozen=True)
class Part:
    """A rank's part of every global batch, and the seed of the order of samples."""

    rank: int
    world: int
    batch_size: int
    seed: int

    def per_epoch(self, samples: Samples) -> int:
        """Number of global batches in an epoch."""
        return samples.count // (self.world * self.batch_size)


@dataclass(frozen=True)
class Batches:
    """Batches by step."""

    samples: Samples
    part: Part

    def __getitem__(self, step: int) -> Arrays:
        part = self.part
        epoch, position = divmod(step, part.per_epoch(self.samples))
        start = (position * part.world + part.rank) * part.batch_size
        return self.samples.at(order(part.seed, epoch, self.samples.count)[start : start + part.batch_size], epoch)


class Streamed(IterableDataset[Any]):
    """Batches of a stream from a step on. All ranks and workers read the whole stream; several workers take turns."""

    def __init__(self, stream: Stream, part: Part, first_step: int, epochs: int | None) -> None:
        self._stream, self._part, self._first, self._epochs = stream, part, first_step, epochs

    def __iter__(self) -> Iterator[Any]:
        info, part, step = get_worker_info(), self._part, 0
        own, workers = (0, 1) if info is None else (info.id, info.num_workers)
        size = part.world * part.batch_size
        for epoch in itertools.count() if self._epochs is None else range(self._epochs):
            if hasattr(self._stream.samples, "set_epoch"):
                self._stream.samples.set_epoch(epoch)
            before, samples = step, iter(self._stream.samples)
            while len(batch := list(itertools.islice(samples, size))) == size:
                if step >= self._first and (step - self._first) % workers == own:
                    yield self._stream.batch(batch[part.rank * part.batch_size :][: part.batch_size])
                step += 1
            if step == before:
                raise ValueError(f"data: the stream has fewer samples than one global batch of {size}")


def loader(
    samples: Samples | Stream, part: Part, *, epochs: int | None, first_step: int, workers: int, pinned: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of a part."""
    steps: Iterable[int] | None = None
    made: Any
    if isinstance(samples, Stream):
        made = Streamed(samples, part, first_step, epochs)
    else:
        made = Batches(samples, part)
        steps = itertools.count(first_step) if epochs is None else range(first_step, epochs * part.per_epoch(samples))
    return iter(
        DataLoader(
            made, batch_size=None, sampler=steps, num_workers=workers, pin_memory=pinned,
            multiprocessing_context="fork" if workers else None,  # a data set of one's own may be no pickle
            generator=torch.Generator().manual_seed(part.seed),  # else torch's global one would be drawn from
        )
    )  # fmt: skip
