"""One process as one rank of many: it computes, holds and schedules as that rank would, and nothing is sent.

Shards, optimizer states and buffers have the sizes that they have on ``world`` ranks, and every message takes the time
that the emulated link needs for the bytes of ``world`` ranks (:mod:`mdcs.runtime.pacing`). What a message would bring is
made up: gradients are summed as if every rank had this rank's, and a gather fills the parts of the other ranks with
copies of its own. So times, overlap and bytes are those of a rank, while losses and weights mean nothing.
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
    """In the place of :class:`mdcs.runtime.communicator.Communicator`: writes to memory what its algorithms would write,
    and holds the buffer that the backend would hold.
    """

    def __init__(self, collectives: Collectives, emulation: Emulation) -> None:
        self.collectives, self.rank, self.world = collectives, emulation.rank, emulation.world

    def all_reduce(self, buffer: Tensor, received: Tensor | None) -> Arriving:
        """As if every rank had this rank's ``buffer``."""
        return Arriving(lambda: buffer.mul_(self.world))

    def reduce_scatter(self, buffer: Tensor, received: Tensor | None, out: Tensor) -> Arriving:
        """As if every rank had this rank's ``buffer``; ``out`` gets this rank's part of the sum."""
        own = buffer.chunk(self.world)[self.rank]
        if self.collectives.sums_afterwards(Kind.RS):
            assert received is not None
            summands = received.view(self.world, -1)
            return Arriving(lambda: summands.copy_(own))
        return Arriving(lambda: torch.mul(own, self.world, out=out))

    def all_gather(self, buffer: Tensor) -> Arriving:
        """This rank's part in the place of every other."""
        parts = buffer.view(self.world, -1)
        own = parts[self.rank]

        def bring() -> None:
            parts[: self.rank].copy_(own)
            parts[self.rank + 1 :].copy_(own)

        return Arriving(bring, buffer.new_empty(self.collectives.buffer(Kind.AG_F, buffer.numel(), self.world)))


class Arriving:
    """A message on its way: it writes what it brings when it is waited for, and holds a buffer until it is dropped."""

    def __init__(self, bring: Callable[[], object], held: Tensor | None = None) -> None:
        self._bring, self._held = bring, held

    def wait(self) -> None:
        """Write it."""
        self._bring()
