"""One message on the wire: pack, launch the collective, unpack. A message of one block is not packed.

A block, and the buffer of a packed (fused) message, is viewed as a matrix [ranks of its group, elements per rank]. The
columns of a packed message are those of its blocks in order. One collective therefore serves both, and packing and
unpacking are one call each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdcs.emulation import EmulatedCommunicator
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind
from mdcs.runtime.communicator import Communicator, NodeCommunicator
from mdcs.runtime.executor import Waitable
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.trace_ranges import named_range
from mdcs.telemetry.memory_meter import Meter
from mdcs.torch_compat import copy_all


class _Units(NamedTuple):
    """The units of a message, whose names are looked up when a trace asks for them."""

    storages: list[UnitStorage]
    message: Message

    def __str__(self) -> str:
        return "+".join(dict.fromkeys(self.storages[u].name for u, _ in self.message.parts))


class _Sizes(NamedTuple):
    """Element counts of a message.

    - ``whole``: payload, padding included.
    - ``columns``: elements per rank of each part.
    - ``buffer``: scratch of the algorithm.
    """

    whole: int
    columns: list[int]
    buffer: int


@dataclass
class Transfer:
    """Buffers and works of a message in flight.

    - ``packed``: the packed message [whole], if it is packed.
    - ``scratch``: scratch of the algorithm, if it has any.
    - ``reduced``: this rank's reduced gradients [sum of columns], of a reduce-scatter.
    - ``shards``: (unit, block) -> its piece of ``reduced``.
    """

    message: Message
    packed: Tensor | None = None
    scratch: Tensor | None = None
    reduced: Tensor | None = None
    shards: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    works: list[Waitable] = field(default_factory=list)

    def free_staging(self) -> None:
        """Free the memory of ``packed`` and ``scratch``."""
        for buffer in (self.packed, self.scratch):
            if buffer is not None:
                buffer.untyped_storage().resize_(0)
        self.packed = self.scratch = None


Connected = Communicator | NodeCommunicator | EmulatedCommunicator
Connect = Callable[[Collectives, bool], Connected]
"""(algorithms, within a node) -> communicator."""


class CollectiveOps:
    """Packs and sends messages. ``connect`` makes the communicators: of the world, and of nodes if the plan needs them."""

    def __init__(self, plan: Plan, storages: list[UnitStorage], connect: Connect, meter: Meter) -> None:
        self.plan, self.storages, self.meter = plan, storages, meter
        self.world = plan.world
        self.rank = storages[0].rank
        self.collectives = plan.profile.collectives
        self._known_sizes: dict[Message, _Sizes] = {}
        levels = sorted({False, *(k.in_node for k in plan.strategies)}) if self.world > 1 else []
        self._communicators = {in_node: connect(self.collectives, in_node) for in_node in levels}
        # Gathers outside of the plan have no scratch reserved. Rings need none; only on CPUs does gloo send from rank to rank.
        on_cpu = storages[0].device.type == "cpu"
        outside = Collectives.default(self.collectives.backend) if on_cpu else self.collectives
        self._out_of_plan_comms = {in_node: connect(outside, in_node) for in_node in levels}

    def allocate(self, message: Message) -> Transfer:
        """Allocate staging and gradient shards of a message."""
        transfer, sizes = Transfer(message), self._sizes(message)
        unit, block = message.parts[0]  # the others are of its type
        first = self.storages[unit]
        device = first.device
        dtype = first.flat_param(block).dtype if message.kind.is_gather else first.gradient_dtypes[first.sections[block]]
        packed = self.world > 1 and len(message.parts) > 1
        if packed or sizes.buffer:
            with self.meter.tag("staging"):
                if packed:
                    transfer.packed = torch.empty(sizes.whole, dtype=dtype, device=device)
                if sizes.buffer:
                    transfer.scratch = torch.empty(sizes.buffer, dtype=dtype, device=device)
        if message.kind.plain is Kind.RS:
            with self.meter.tag("gradient_shards"):
                transfer.reduced = torch.empty(sum(sizes.columns), dtype=dtype, device=device)
            pieces = transfer.reduced.split(sizes.columns) if len(message.parts) > 1 else (transfer.reduced,)
            transfer.shards = dict(zip(message.parts, pieces, strict=True))
        return transfer

    def _sizes(self, message: Message) -> _Sizes:
        sizes = self._known_sizes.get(message)
        if sizes is None:
            ranks = self.plan.profile.group(message.kind)
            columns = [self.storages[u].blocks[b] // ranks for u, b in message.parts]
            whole = sum(columns) * ranks
            communicator = self._communicators.get(message.kind.in_node)
            buffer = communicator.scratch(message.kind, whole) if communicator else 0
            sizes = self._known_sizes[message] = _Sizes(whole, columns, buffer)
        return sizes

    def launch(self, transfer: Transfer) -> None:
        """Pack and start the collective, without waiting for it."""
        message, communicator = transfer.message, self._communicators.get(transfer.message.kind.in_node)
        if message.kind.is_gather:
            for u, b in message.parts:
                self.storages[u].copy_shard_into_flat(b)
        if communicator is None:
            return
        with self.range("pack", message):
            buffer = self._packed(transfer)
        with self.range("collective", message), self.meter.tag("staging"):  # the backend may allocate a copy
            transfer.works = [communicator.launch(message.kind, buffer, transfer.scratch, transfer.reduced)]

    def _packed(self, transfer: Transfer) -> Tensor:
        """Return the collective's buffer: the one block of the message, or all blocks packed."""
        buffer, message = transfer.packed, transfer.message
        if buffer is None:
            [block] = self._blocks(message)
            return block
        rows = self._rows(buffer, message)
        if message.kind.is_gather:
            own = [self.storages[u].flat_param(b)[self.storages[u].owned_slice(b)] for u, b in message.parts]
            torch.cat(own, out=rows[self.rank % len(rows)])
        else:
            torch.cat([self._rows(block, message) for block in self._blocks(message)], dim=1, out=rows)
        return buffer

    def land(self, transfer: Transfer) -> None:
        """Unpack what has arrived; the staging buffers can then be freed."""
        transfer.works = []
        with self.range("unpack", transfer.message):
            self._unpack(transfer)

    def _unpack(self, transfer: Transfer) -> None:
        message, reduced = transfer.message, transfer.reduced
        if reduced is not None:
            if self.world == 1:
                torch.cat(self._blocks(message), out=reduced)
        elif transfer.packed is not None:
            blocks = [self._rows(block, message) for block in self._blocks(message)]
            columns = self._rows(transfer.packed, message).split(self._sizes(message).columns, dim=1)
            copy_all(blocks, columns)

    def unshard_now(self, unit: int) -> list[Waitable]:
        """Start to gather a whole unit in place, outside the plan; return the works. Its full buffers must be
        allocated.
        """
        storage = self.storages[unit]
        for b in range(len(storage.blocks)):
            storage.copy_shard_into_flat(b)
        return self.unshard_flat(unit, storage.flat_params)

    def unshard_flat(self, unit: int, flats: list[Tensor]) -> list[Waitable]:
        """Start to gather flat tensors by section, laid out as the unit; return the works. Every rank has its own
        parts.
        """
        storage = self.storages[unit]
        outside = self._out_of_plan_comms.get(storage.strategy.in_node)
        if outside is None:
            return []
        return [outside.launch(Kind.AG_F, flats[s][storage.block_slice(b)]) for b, s in enumerate(storage.sections)]

    def range(self, phase: str, message: Message) -> AbstractContextManager[Any]:
        """Return a context that names a phase of a message in traces."""
        return named_range(phase, message.kind, _Units(self.storages, message))

    def _blocks(self, message: Message) -> list[Tensor]:
        """Return the message's blocks, as slices of the flat parameters or gradients."""
        storages = self.storages
        if message.kind.is_gather:
            return [storages[u].flat_param(b)[storages[u].block_slice(b)] for u, b in message.parts]
        return [storages[u].gradient(b)[storages[u].block_slice(b)] for u, b in message.parts]

    def _rows(self, buffer: Tensor, message: Message) -> Tensor:
        """Return ``buffer`` as a matrix [ranks of the message's group, elements per rank]."""
        return buffer.view(self.plan.profile.group(message.kind), -1)
