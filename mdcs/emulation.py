"""Emulated links and worlds.

An emulated link delays real collectives to the end that a link of the model would give. The ranks share one machine and
so one clock. Each rank writes to shared memory when it starts a message. When the real collective has ended, every rank
has started it, and all ranks compute the same end with the simulator's formula (:meth:`mdcs.profile.link.Link.end`).

In an emulated world, one process is one rank of many: it computes, holds and schedules as this rank would, and sends
nothing. Shards, optimizer states and buffers have the sizes of ``world`` ranks, and every message takes the time that
the emulated link needs for the bytes of ``world`` ranks. Received values are made up: gradients are summed as if every
rank had this rank's, and a gather fills the other ranks' parts with copies of this rank's. Times, overlap and bytes are
a real rank's; losses and weights mean nothing.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.plan.plan import Plan
from mdcs.profile.link import Collectives, Kind, Link

_RING = 4096  # messages remembered per rank
_ENTRY = struct.Struct("<qd")


class Pacer:
    """Delays messages to the emulated link's times. ``path``: file of :meth:`create`, mapped by all ranks, or None."""

    @staticmethod
    def create(path: Path, world: int) -> None:
        """Make the file for ``world`` ranks."""
        path.write_bytes(b"\xff" * (_ENTRY.size * _RING * world))

    def __init__(self, path: Path | None, rank: int, world: int, link: Link) -> None:
        self.rank, self.world, self.link = rank, world, link
        if path is None:
            self._memory = mmap.mmap(-1, _ENTRY.size * _RING * world)
        else:
            with path.open("r+b") as f:
                self._memory = mmap.mmap(f.fileno(), _ENTRY.size * _RING * world)
        self._last_end = -inf

    def started(self, number: int) -> None:
        """Note that this rank starts message ``number`` of the training now."""
        where = (self.rank * _RING + number % _RING) * _ENTRY.size
        _ENTRY.pack_into(self._memory, where, number, time.monotonic())

    def hold(self, number: int, kind: Kind, wire: int) -> None:
        """Block until the emulated link has carried the message. Its real collective must have ended."""
        places = ((r * _RING + number % _RING) * _ENTRY.size for r in range(self.world))
        entries = [_ENTRY.unpack_from(self._memory, place) for place in places]
        start = max(when for seen, when in entries if seen == number)
        self._last_end = self.link.end(kind, wire, start, self._last_end)
        if (remaining := self._last_end - time.monotonic()) > 0:
            time.sleep(remaining)


def pacer_for(plan: Plan, rank: int, group: dist.ProcessGroup | None, processes: int) -> Pacer | None:
    """Return the pacer of a plan's emulated link, shared by ranks of ``group``; None for a real link. Collective."""
    if not plan.profile.link.emulated or plan.world == 1:
        return None
    if processes == 1:
        return Pacer(None, 0, 1, plan.profile.link)
    name: list[Any] = [None]
    try:
        if rank == 0:
            folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
            with tempfile.NamedTemporaryFile(prefix="mdcs-link-", dir=folder, delete=False) as f:
                name[0] = f.name
            Pacer.create(Path(f.name), plan.world)
        dist.broadcast_object_list(name, group_src=0, group=group)
        pacer = Pacer(Path(name[0]), rank, plan.world, plan.profile.link)
        dist.barrier(group=group)
    finally:  # all ranks have mapped it, or one has failed
        if rank == 0 and name[0] is not None:
            Path(name[0]).unlink()
    return pacer


@dataclass(frozen=True)
class Emulation:
    """One process in the place of rank ``rank`` of ``world``. Raises ValueError for a rank outside of the world."""

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"an emulated rank must be from 0 to {self.world - 1}, got {self.rank}")


class EmulatedCommunicator:
    """In place of :class:`mdcs.runtime.communicator.Communicator`: its writes and its backend's buffers, no sends."""

    def __init__(self, collectives: Collectives, emulation: Emulation) -> None:
        self.collectives, self.rank, self.world = collectives, emulation.rank, emulation.world

    def launch(
        self, kind: Kind, buffer: Tensor, scratch: Tensor | None = None, out: Tensor | None = None
    ) -> EmulatedCollective:
        """Start a message of this kind; its results are made up. ``buffer``: flat [world · part], ``out``: flat [part].
        """
        if kind is Kind.AR:
            return EmulatedCollective(lambda: buffer.mul_(self.world))
        parts = buffer.view(self.world, -1)
        own = parts[self.rank]
        if not kind.is_gather:
            return EmulatedCollective(lambda: torch.mul(own, self.world, out=out))

        def bring() -> None:
            parts[: self.rank].copy_(own)
            parts[self.rank + 1 :].copy_(own)

        return EmulatedCollective(bring, buffer.new_empty(self.collectives.buffer(kind, buffer.numel(), self.world)))


class EmulatedCollective:
    """A message in flight: it writes its result when waited for, and holds a backend buffer until it is dropped."""

    is_in_last_step = True
    """It has one step."""

    def __init__(self, bring: Callable[[], object], held: Tensor | None = None) -> None:
        self._bring, self._held = bring, held

    def wait(self, begun: Callable[[], None] | None = None) -> None:
        """Write the result. ``begun``: not called, as there is no second step."""
        self._bring()
