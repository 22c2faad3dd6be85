"""One message on the wire: pack, launch the collective, unpack. A message of one block is not packed.

Layout of a staged (fused) buffer: rank by rank, and within a rank's part the message's parts in order, so that
one collective serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdcs.measure.memory import Meter
from mdcs.plan.messages import Message, Plan
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind
from mdcs.runtime.communicator import Communicator
from mdcs.runtime.emulation import EmulatedCommunicator
from mdcs.runtime.executor import Waitable
from mdcs.runtime.storage import UnitStorage


@dataclass
class Transfer:
    """Buffers and works of a message in flight. ``shards`` are the reduced gradients, per part.

    ``sent`` is the packed message, if it is packed, ``received`` the algorithm's own buffer, if it has one.
    """

    message: Message
    sent: Tensor | None = None
    received: Tensor | None = None
    shards: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    works: list[Waitable] = field(default_factory=list)

    def free_staging(self) -> None:
        """Give the memory of packed and received bytes back."""
        for buffer in (self.sent, self.received):
            if buffer is not None:
                buffer.untyped_storage().resize_(0)
        self.sent = self.received = None


Connect = Callable[[Collectives], Communicator | EmulatedCommunicator]


class Wire:
    """``connect`` makes what runs collectives, if there is more than one rank."""

    def __init__(self, plan: Plan, storages: list[UnitStorage], connect: Connect, meter: Meter) -> None:
        self.plan, self.storages, self.meter = plan, storages, meter
        self.world = plan.world
        self.rank = storages[0].rank
        self.collectives = plan.profile.collectives
        self._communicator = connect(self.collectives) if self.world > 1 else None
        # What is gathered outside of the plan has no buffer reserved, and the default algorithm needs none.
        default = Collectives.default(self.collectives.backend)
        self._outside = connect(default) if self.world > 1 else None

    def allocate(self, message: Message) -> Transfer:
        """Staging and gradient shards."""
        transfer = Transfer(message)
        unit, block = message.parts[0]
        first = self.storages[unit]
        section = first.sections[block]
        device, dtype = first.device, first.fulls[section].dtype if message.kind.is_gather else first.gradient_dtypes[section]
        elements = self.plan.elements(message)
        with self.meter.tag("staging"):
            if self.world > 1 and len(message.parts) > 1:
                transfer.sent = torch.empty(elements, dtype=dtype, device=device)
            more = self.collectives.buffer(message.kind, elements, self.world)
            if more and self.collectives.of(message.kind) != "native":
                transfer.received = torch.empty(more, dtype=dtype, device=device)
        if message.kind is Kind.RS:
            with self.meter.tag("gradient_shards"):
                for part in message.parts:
                    n = self._size(part) // self.world
                    transfer.shards[part] = torch.empty(n, dtype=dtype, device=device)
        return transfer

    def launch(self, transfer: Transfer) -> None:
        """Pack and start the collective, without waiting for it."""
        message, communicator = transfer.message, self._communicator
        if message.kind.is_gather:
            for u, b in message.parts:
                self.storages[u].place_own(b)
        if communicator is None:
            return
        buffer = transfer.sent
        if buffer is None:
            buffer = self._only(message)
        elif message.kind.is_gather:
            for u, b, _, where in self._pieces(message, only=self.rank):
                buffer[where].copy_(self.storages[u].at_rest(b))
        elif message.kind is Kind.AR:
            start = 0
            for u, b in message.parts:
                n = self._size((u, b))
                buffer[start : start + n].copy_(self._gradient(u, b))
                start += n
        else:
            for u, b, r, where in self._pieces(message):
                storage = self.storages[u]
                buffer[where].copy_(storage.gradient(b)[storage.part(b, r)])
        with self.meter.tag("staging"):  # a backend may copy
            if message.kind.is_gather:
                transfer.works = [communicator.all_gather(buffer)]
            elif message.kind is Kind.AR:
                transfer.works = [communicator.all_reduce(buffer, transfer.received)]
            else:
                transfer.works = [communicator.reduce_scatter(buffer, transfer.received, self._reduced(transfer))]

    def land(self, transfer: Transfer) -> None:
        """Unpack or sum what has arrived; the staging buffers are then done with."""
        message = transfer.message
        if self.world == 1:
            for (u, b), shard in transfer.shards.items():
                shard.copy_(self._gradient(u, b))
        elif self.collectives.sums_afterwards(message.kind):
            assert transfer.received is not None
            by_rank = transfer.received.view(self.world, -1)
            start = 0
            for shard in transfer.shards.values():
                n = shard.numel()
                # Summed in rank order on every rank: the result does not depend on who arrives first.
                torch.sum(by_rank[:, start : start + n], dim=0, out=shard)
                start += n
        elif transfer.sent is not None and message.kind is Kind.RS:
            start = 0
            out = self._reduced(transfer)
            for shard in transfer.shards.values():
                shard.copy_(out[start : start + shard.numel()])
                start += shard.numel()
        elif transfer.sent is not None and message.kind is Kind.AR:
            start = 0
            for u, b in message.parts:
                n = self._size((u, b))
                self._gradient(u, b).copy_(transfer.sent[start : start + n])
                start += n
        elif transfer.sent is not None:
            for u, b, r, where in self._pieces(message):
                storage = self.storages[u]
                storage.full(b)[storage.part(b, r)].copy_(transfer.sent[where])
        transfer.works = []

    def gather_now(self, unit: int) -> list[Waitable]:
        """Gather a whole unit in place, outside the plan; its full buffer must be allocated."""
        storage = self.storages[unit]
        for b in range(len(storage.blocks)):
            storage.place_own(b)
        return self.gather_flat(unit, storage.fulls)

    def gather_flat(self, unit: int, flats: list[Tensor]) -> list[Waitable]:
        """Gather what is laid out as the unit is, by section, and of which every rank has its parts."""
        if self._outside is None:
            return []
        storage = self.storages[unit]
        return [self._outside.all_gather(flats[s][storage.region(b)]) for b, s in enumerate(storage.sections)]

    def _reduced(self, transfer: Transfer) -> Tensor:
        """Reduce-scatter's output: the shard itself, or this rank's part of the packed buffer, in place."""
        if transfer.sent is None:
            return next(iter(transfer.shards.values()))
        return transfer.sent.chunk(self.world)[self.rank]

    def _size(self, part: tuple[int, int]) -> int:
        return self.storages[part[0]].blocks[part[1]]

    def _only(self, message: Message) -> Tensor:
        """What a message of one block carries, where it lies."""
        unit, block = message.parts[0]
        storage = self.storages[unit]
        return storage.full(block)[storage.region(block)] if message.kind.is_gather else self._gradient(unit, block)

    def _gradient(self, unit: int, block: int) -> Tensor:
        storage = self.storages[unit]
        return storage.gradient(block)[storage.region(block)]

    def _pieces(self, message: Message, only: int | None = None) -> list[tuple[int, int, int, slice]]:
        """(unit, block, rank, place in the staged buffer) of every piece."""
        out, start = [], 0
        for r in range(self.world):
            for u, b in message.parts:
                n = self._size((u, b)) // self.world
                if only is None or r == only:
                    out.append((u, b, r, slice(start, start + n)))
                start += n
        return out
