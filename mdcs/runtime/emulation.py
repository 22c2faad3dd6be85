"""One process as one rank of many: it computes, holds and schedules as this rank would, and sends nothing.

Shards, optimizer states and buffers have the sizes of ``world`` ranks, and every message takes the time that the
emulated link needs for the bytes of ``world`` ranks (:mod:`mdcs.runtime.pacing`). Received values are made up:
gradients are summed as if every rank had this rank's, and a gather fills the other ranks' parts with copies of this
rank's. Times, overlap and bytes are a real rank's; losses and weights mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind


@dataclass(frozen=True)
class Emulation:
    """This process is rank ``rank`` of ``world``. Raises ValueError for a rank outside of the world."""

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"an emulated rank must be from 0 to {self.world - 1}, got {self.rank}")


class EmulatedCommunicator:
    """Stands in for :class:`mdcs.runtime.communicator.Communicator`: same writes to memory, same backend buffers, no
    sends.
    """

    def __init__(self, collectives: Collectives, emulation: Emulation) -> None:
        self.collectives, self.rank, self.world = collectives, emulation.rank, emulation.world

    def all_reduce(self, buffer: Tensor, received: Tensor | None) -> Arriving:
        """Sum as if every rank had this rank's ``buffer``."""
        return Arriving(lambda: buffer.mul_(self.world))

    def reduce_scatter(self, buffer: Tensor, received: Tensor | None, out: Tensor) -> Arriving:
        """Sum as if every rank had this rank's ``buffer``; ``out`` gets this rank's part."""
        own = buffer.chunk(self.world)[self.rank]
        if self.collectives.sums_afterwards(Kind.RS):
            assert received is not None
            summands = received.view(self.world, -1)
            return Arriving(lambda: summands.copy_(own))
        return Arriving(lambda: torch.mul(own, self.world, out=out))

    def all_gather(self, buffer: Tensor) -> Arriving:
        """Copy this rank's part to the place of every other."""
        parts = buffer.view(self.world, -1)
        own = parts[self.rank]

        def bring() -> None:
            parts[: self.rank].copy_(own)
            parts[self.rank + 1 :].copy_(own)

        return Arriving(bring, buffer.new_empty(self.collectives.buffer(Kind.AG_F, buffer.numel(), self.world)))


class Arriving:
    """A message in flight: it writes its result when waited for, and holds a backend buffer until it is dropped."""

    def __init__(self, bring: Callable[[], object], held: Tensor | None = None) -> None:
        self._bring, self._held = bring, held

    def wait(self) -> None:
        """Write the result."""
        self._bring()
