"""One message on the wire: pack, launch the collective, unpack. A message of one block is not packed.

Every buffer is seen as a matrix with a row per rank, a block's and that of a packed (fused) message, whose columns are
those of its blocks in order. So one collective serves all of them, and packing and unpacking are one call each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

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


class _Sizes(NamedTuple):
    """In elements: of a message, of what each of its blocks has in a row, and of the algorithm's own buffer."""

    whole: int
    columns: list[int]
    buffer: int


@dataclass
class Transfer:
    """Buffers and works of a message in flight. ``shards`` are the reduced gradients, per part: pieces of ``reduced``.

    ``sent`` is the packed message, if it is packed, ``received`` the algorithm's own buffer, if it has one.
    """

    message: Message
    sent: Tensor | None = None
    received: Tensor | None = None
    reduced: Tensor | None = None
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
        self._known_sizes: dict[Message, _Sizes] = {}
        self._communicator = connect(self.collectives) if self.world > 1 else None
        # What is gathered outside of the plan has no buffer reserved, and the default algorithm needs none.
        default = Collectives.default(self.collectives.backend)
        self._outside = connect(default) if self.world > 1 else None

    def allocate(self, message: Message) -> Transfer:
        """Staging and gradient shards."""
        transfer, sizes = Transfer(message), self._sizes(message)
        unit, block = message.parts[0]  # the others are of its type
        first = self.storages[unit]
        device = first.device
        dtype = first.full(block).dtype if message.kind.is_gather else first.gradient_dtypes[first.sections[block]]
        packed = self.world > 1 and len(message.parts) > 1
        if packed or sizes.buffer:
            with self.meter.tag("staging"):
                if packed:
                    transfer.sent = torch.empty(sizes.whole, dtype=dtype, device=device)
                if sizes.buffer:
                    transfer.received = torch.empty(sizes.buffer, dtype=dtype, device=device)
        if message.kind is Kind.RS:
            with self.meter.tag("gradient_shards"):
                transfer.reduced = torch.empty(sizes.whole // self.world, dtype=dtype, device=device)
            pieces = transfer.reduced.split(sizes.columns) if len(message.parts) > 1 else (transfer.reduced,)
            transfer.shards = dict(zip(message.parts, pieces, strict=True))
        return transfer

    def _sizes(self, message: Message) -> _Sizes:
        sizes = self._known_sizes.get(message)
        if sizes is None:
            columns = [self.storages[u].blocks[b] // self.world for u, b in message.parts]
            whole = sum(columns) * self.world
            native = self.collectives.of(message.kind) == "native"  # the backend allocates what that needs
            buffer = 0 if native else self.collectives.buffer(message.kind, whole, self.world)
            sizes = self._known_sizes[message] = _Sizes(whole, columns, buffer)
        return sizes

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
            [buffer] = self._blocks(message)
        elif message.kind.is_gather:
            own = [self.storages[u].full(b)[self.storages[u].own(b)] for u, b in message.parts]
            torch.cat(own, out=self._rows(buffer)[self.rank])
        else:
            torch.cat([self._rows(block) for block in self._blocks(message)], dim=1, out=self._rows(buffer))
        with self.meter.tag("staging"):  # a backend may copy
            if message.kind.is_gather:
                work = communicator.all_gather(buffer)
            elif message.kind is Kind.AR:
                work = communicator.all_reduce(buffer, transfer.received)
            else:
                assert transfer.reduced is not None
                work = communicator.reduce_scatter(buffer, transfer.received, transfer.reduced)
        transfer.works = [work]

    def land(self, transfer: Transfer) -> None:
        """Unpack or sum what has arrived; the staging buffers are then done with."""
        message, reduced = transfer.message, transfer.reduced
        transfer.works = []
        if reduced is not None:
            if self.world == 1:
                torch.cat(self._blocks(message), out=reduced)
            elif self.collectives.sums_afterwards(message.kind):
                assert transfer.received is not None
                # Summed in rank order on every rank: the result does not depend on who arrives first.
                first, second, *others = self._rows(transfer.received)
                torch.add(first, second, out=reduced)
                for row in others:
                    reduced += row
        elif transfer.sent is not None:
            blocks = [self._rows(block) for block in self._blocks(message)]
            columns = self._rows(transfer.sent).split(self._sizes(message).columns, dim=1)
            torch._foreach_copy_(blocks, columns)

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

    def _blocks(self, message: Message) -> list[Tensor]:
        """The message's parts of the flat parameters or gradients."""
        storages = self.storages
        if message.kind.is_gather:
            return [storages[u].full(b)[storages[u].region(b)] for u, b in message.parts]
        return [storages[u].gradient(b)[storages[u].region(b)] for u, b in message.parts]

    def _rows(self, buffer: Tensor) -> Tensor:
        """As a matrix with a row per rank."""
        return buffer.view(self.world, -1)
