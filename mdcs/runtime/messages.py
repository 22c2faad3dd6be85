"""The messages of a plan, one phase after the other, with their bytes booked and their times recorded.

    prepare     full parameters, for the first gather of a unit
    launch      buffers of the message; pack, start the collective
    land        unpack, free the staging buffers
    update      update the blocks that the message has reduced

A transport says in which thread or on which stream a phase runs, and when the memory of shards and gradients is free.

A block, and the buffer of a packed (fused) message, is viewed as a matrix [ranks of its group, elements per rank]. The
columns of a packed message are those of its blocks in order. One collective therefore serves both, and packing and
unpacking are one call each. A message of one block is not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.emulation import EmulatedCollective, EmulatedCommunicator
from mdcs.plan.ledger import MessageBytes
from mdcs.plan.schedule import Message
from mdcs.profile.link import Collectives, Kind
from mdcs.runtime.communicator import Communicator, NodeCommunicator, PendingCollective
from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import RunError
from mdcs.runtime.executor import Waitable
from mdcs.runtime.gradient_scaling import UpdateScale
from mdcs.runtime.sharded_optimizer import Part, ShardedOptimizer
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import copy_all, named_range

Connected = Communicator | NodeCommunicator | EmulatedCommunicator

_IN_WORDS = {
    Kind.AR: "all-reduce", Kind.RS: "reduce-scatter", Kind.AG_F: "all-gather before the forward",
    Kind.AG_B: "all-gather before the backward",
}  # fmt: skip


class _Sizes(NamedTuple):
    """Elements of a message: ``whole`` with padding; by rank of its group, ``columns`` of each part and scratch."""

    ranks: int
    whole: int
    columns: list[int]
    buffer: int


@dataclass
class Transfer:
    """A message that is sent, its buffers and works.

    - ``number``: messages before it since the start of training. ``index``: its place in the plan.
    - ``step``: the iteration that the prologue or period belongs to. ``began``: stamp of the collective's start.
    - ``packed``: the packed message [whole], if it is packed. ``scratch``: of the algorithm, if it has any.
    - ``reduced``: this rank's reduced gradients [sum of columns], of a reduce-scatter; ``shards``: its pieces by part.
    """

    number: int
    index: int
    step: int
    message: Message
    bytes: MessageBytes
    began: Any = None
    packed: Tensor | None = None
    scratch: Tensor | None = None
    reduced: Tensor | None = None
    shards: dict[Part, Tensor] = field(default_factory=dict)
    works: list[PendingCollective | EmulatedCollective] = field(default_factory=list)


@dataclass
class Update:
    """The update that a message completes.

    - ``gradients``: (unit, block) -> this rank's reduced gradient, flat. ``shards``: to free when the update is done.
    - ``is_due``: False if a gradient is not finite. ``scale``: factor on the gradients; None: 1. ``scratch``: booked
      bytes. ``end``: on streams, the point behind it.
    """

    transfer: Transfer
    gradients: dict[Part, Tensor]
    shards: list[Tensor]
    is_due: bool = True
    scale: Tensor | None = None
    scratch: int = 0
    end: Any = None


class Messages:
    """Runs the phases of messages. ``connect``: (algorithms, within a node) -> communicator.

    - ``decided``: messages whose updates the loop has let be made, or has dropped. ``drops``: it drops them.
    - ``last_reduction``: index of the plan's last reduction; -1 without one.
    """

    def __init__(
        self, context: RunContext, storages: list[UnitStorage], updates: ShardedOptimizer, scale: UpdateScale,
        connect: Callable[[Collectives, bool], Connected],
    ) -> None:  # fmt: skip
        self.context, self.storages, self.updates, self.scale = context, storages, updates, scale
        self.plan, self.n, self._ledger = context.plan, len(context.plan.messages), context.ledger
        self._account, self._recorder, self._meter = context.account, context.recorder, context.meter
        self._is_alone = self.plan.world == 1
        self._waiting: dict[Part, Tensor] = {}  # reduced gradients that wait for a later message's update
        self._step_of_period_0 = context.place.step - 1
        self._updated: dict[int, list[Part]] = {}  # index of a message -> what its update updates
        for message, update in zip(self.plan.messages, self.plan.schedule.updated_by, strict=True):
            if update >= 0:
                self._updated.setdefault(update, []).extend(message.parts)
        self.last_reduction = max((i for i, m in enumerate(self.plan.messages) if not m.kind.is_gather), default=-1)
        self.decided, self.drops = 0, False
        collectives = self.plan.profile.collectives
        levels = sorted({False, *(k.in_node for k in self.plan.strategies)}) if self.plan.world > 1 else []
        self._communicators = {in_node: connect(collectives, in_node) for in_node in levels}
        # Gathers outside of the plan have no scratch reserved. Rings need none; only on CPUs does gloo send from rank
        # to rank.
        outside = Collectives.default(collectives.backend) if context.device.type == "cpu" else collectives
        self._out_of_plan_comms = {in_node: connect(outside, in_node) for in_node in levels}
        self._sizes = [self._sizes_of(message) for message in self.plan.messages]
        self._names = [names for _, names, _ in self.plan.labels]  # in traces

    def is_held(self, number: int) -> bool:
        """Return whether the message's updates wait for the loop to decide."""
        return number % self.n == self.plan.held_update and number >= self.decided

    def restart(self, first_period: int) -> None:
        """Drop what earlier periods have left. ``first_period``: number of the next prologue."""
        self._step_of_period_0 = self.context.place.step - 1 - first_period
        self._waiting.clear()
        self.drops = False

    # -- phases ---------------------------------------------------------------------------------------------------

    def prepare(self, number: int) -> Transfer:
        """Begin a message: allocate the full parameters of units that it is the first to gather."""
        period, index = divmod(number, self.n)
        effect = self._ledger.messages[index]
        for unit, _ in effect.full:
            self.storages[unit].begin_gather()
        return Transfer(number, index, self._step_of_period_0 + period, self.plan.messages[index], effect)

    def launch(self, transfer: Transfer) -> None:
        """Allocate the message's buffers, pack, and start the collective, without waiting for it."""
        message, effect = transfer.message, transfer.bytes
        with self._account.lock:
            self._allocate(transfer)
            self._account.record("staging", effect.staging)
            self._account.record("gradient_shards", effect.shards)
        transfer.began = self._recorder.stamp()
        if message.kind.is_gather:
            for u, b in message.parts:
                self.storages[u].copy_shard_into_flat(b)
        if (communicator := self._communicators.get(message.kind.in_node)) is None:
            return
        with named_range("pack", message.kind, self._names[transfer.index]):
            buffer = self._packed(transfer)
        name = named_range("collective", message.kind, self._names[transfer.index])
        with name, self._meter.tag("staging"):  # the backend may allocate a copy
            transfer.works = [communicator.launch(message.kind, buffer, transfer.scratch, transfer.reduced)]

    def land(self, transfer: Transfer) -> None:
        """Record that the collective has ended, unpack, and free the staging buffers."""
        message = transfer.message
        self._recorder.ran("message", transfer.index, transfer.began, self._recorder.stamp(), transfer.step)
        transfer.works = []
        with named_range("unpack", message.kind, self._names[transfer.index]):
            if transfer.reduced is not None:
                if self._is_alone:
                    torch.cat(self._blocks(message), out=transfer.reduced)
            elif transfer.packed is not None:
                blocks = [self._rows(block, transfer) for block in self._blocks(message)]
                columns = self._sizes[transfer.index].columns
                copy_all(blocks, self._rows(transfer.packed, transfer).split(columns, dim=1))
        with self._account.lock:
            for buffer in (transfer.packed, transfer.scratch):
                if buffer is not None:
                    buffer.untyped_storage().resize_(0)
            transfer.packed = transfer.scratch = None
            self._account.record("staging", -transfer.bytes.staging)

    def completed_update(self, transfer: Transfer) -> Update | None:
        """Return the update that the message runs: of what it reduced; with a barrier, of all that was reduced."""
        self._waiting |= transfer.shards
        gradients: dict[Part, Tensor] = {}
        shards: list[Tensor] = []
        for u, b in self._updated.get(transfer.index, ()):
            storage, shard = self.storages[u], self._waiting.pop((u, b), None)
            if shard is not None:
                shards.append(shard)
            gradients[u, b] = storage.full_gradient[storage.block_slices[b]] if shard is None else shard
        return Update(transfer, gradients, shards) if gradients else None

    def find_scale(self, update: Update) -> None:
        """Reduce the global norm over ranks, where it is needed, and set the factor on the gradients."""
        update.scratch = update.transfer.bytes.scratch
        work = None
        if self.scale.is_needed:
            with self._meter.tag("update_scratch"):
                work = self.scale.workspace(update.gradients)
            update.scratch = max(update.scratch, work.nbytes)
        with self._account.lock:
            self._account.record("update_scratch", update.scratch)
        if work is not None:
            update.is_due, update.scale = self.scale.factor(update.gradients, work)
            if update.is_due and self.scale.norm is not None:
                # copied to the host behind what is enqueued now, and read with the record
                norm = self.scale.norm.to("cpu", non_blocking=True)
                self._recorder.note(update.transfer.step, grad_norm=norm)

    def update(self, update: Update) -> None:
        """Update parameters and optimizer state."""
        transfer, begin = update.transfer, self._recorder.stamp()
        if update.is_due and not self.drops:
            with named_range("update", transfer.message.kind, self._names[transfer.index]):
                self.updates.step(update.gradients, update.scale)
        self._recorder.ran("update", transfer.index, begin, self._recorder.stamp(), transfer.step)
        with self._account.lock:
            self._account.record("update_scratch", -update.scratch)

    def free_shards(self, update: Update) -> None:
        """Free the gradient shards of an update that is done."""
        with self._account.lock:
            for shard in update.shards:
                shard.untyped_storage().resize_(0)
            self._account.record("gradient_shards", -update.transfer.bytes.shards_freed)

    # -- outside of the plan --------------------------------------------------------------------------------------

    def unshard_flat(self, unit: int, flat: Tensor) -> list[Waitable]:
        """Start to gather a flat tensor [elements of the unit], of which every rank has its parts; return the works."""
        storage = self.storages[unit]
        if (outside := self._out_of_plan_comms.get(storage.strategy.in_node)) is None:
            return []
        return [outside.launch(Kind.AG_F, flat[block]) for block in storage.block_slices]

    def recut_flat(self, unit: int, flat: Tensor, to: UnitStorage) -> tuple[list[Waitable], Callable[[], None]]:
        """Start to fill this rank's parts in ``to`` of a flat tensor [elements of the unit] that has those so far.

        Both cut the unit among all ranks, in different blocks: only what another rank has changes hands. Return the
        works, and what puts the parts in their places when they are done.
        """
        own, rank, outside = self.storages[unit], self.context.rank, self._out_of_plan_comms[False]
        if not isinstance(outside, Communicator):  # emulated: what others have is made up
            return self.unshard_flat(unit, flat), lambda: None
        ranks = range(own.parts)
        sent = [shared(own.owned_slices(rank), to.owned_slices(r)) if r != rank else [] for r in ranks]
        came = [shared(own.owned_slices(r), to.owned_slices(rank)) if r != rank else [] for r in ranks]
        to_us, by_us = ([sum(s.stop - s.start for s in pieces) for pieces in of] for of in (came, sent))
        packed = torch.cat([flat[:0], *(flat[piece] for pieces in sent for piece in pieces)])
        arrived = flat.new_empty(sum(to_us))
        work = dist.all_to_all_single(arrived, packed, to_us, by_us, group=outside.group, async_op=True)

        def put() -> None:
            places = [piece for pieces in came for piece in pieces]
            for place, part in zip(places, arrived.split([s.stop - s.start for s in places]), strict=True):
                flat[place] = part

        return [work], put

    # -- buffers --------------------------------------------------------------------------------------------------

    def _allocate(self, transfer: Transfer) -> None:
        message, sizes = transfer.message, self._sizes[transfer.index]
        first, device = self.storages[message.parts[0][0]], self.context.device  # the others are of its type
        dtype = first.flat_param.dtype if message.kind.is_gather else first.gradient_dtype
        packed = not self._is_alone and len(message.parts) > 1
        if packed or sizes.buffer:
            with self._meter.tag("staging"):
                if packed:
                    transfer.packed = torch.empty(sizes.whole, dtype=dtype, device=device)
                if sizes.buffer:
                    transfer.scratch = torch.empty(sizes.buffer, dtype=dtype, device=device)
        if message.kind.plain is Kind.RS:
            with self._meter.tag("gradient_shards"):
                transfer.reduced = torch.empty(sum(sizes.columns), dtype=dtype, device=device)
            pieces = transfer.reduced.split(sizes.columns) if len(message.parts) > 1 else (transfer.reduced,)
            transfer.shards = dict(zip(message.parts, pieces, strict=True))

    def _sizes_of(self, message: Message) -> _Sizes:
        profile, kind = self.plan.profile, message.kind
        ranks = profile.group(kind)
        columns = [self.storages[u].blocks[b] // ranks for u, b in message.parts]
        whole, is_ring = sum(columns) * ranks, profile.collectives.algorithm == "ring" and not self._is_alone
        return _Sizes(ranks, whole, columns, profile.buffer(kind, whole) if is_ring else 0)

    def _packed(self, transfer: Transfer) -> Tensor:
        """Return the collective's buffer: the one block of the message, or all blocks packed."""
        buffer, message = transfer.packed, transfer.message
        if buffer is None:
            [block] = self._blocks(message)
            return block
        rows = self._rows(buffer, transfer)
        if message.kind.is_gather:
            parts = [self.storages[u].flat_param[self.storages[u].owned[b]] for u, b in message.parts]
            torch.cat(parts, out=rows[self.context.rank % len(rows)])
        else:
            torch.cat([self._rows(block, transfer) for block in self._blocks(message)], dim=1, out=rows)
        return buffer

    def _blocks(self, message: Message) -> list[Tensor]:
        """Return the message's blocks, as slices of the flat parameters or gradients."""
        storages = self.storages
        if message.kind.is_gather:
            return [storages[u].flat_param[storages[u].block_slices[b]] for u, b in message.parts]
        return [storages[u].full_gradient[storages[u].block_slices[b]] for u, b in message.parts]

    def _rows(self, buffer: Tensor, transfer: Transfer) -> Tensor:
        """Return ``buffer`` as a matrix [ranks of the message's group, elements per rank]."""
        return buffer.view(self._sizes[transfer.index].ranks, -1)

    # -- words ----------------------------------------------------------------------------------------------------

    def describe(self, number: int) -> str:
        """Return the message in words."""
        index = number % self.n
        message = self.plan.messages[index]
        units = ", ".join(dict.fromkeys(self.storages[u].name for u, _ in message.parts))
        return f"message {index} ({_IN_WORDS[message.kind.plain]} of {units})"

    def raise_error(self, number: int, error: Exception) -> NoReturn:
        """Raise the error of a message with its name and the step that issued it; compute may be in the next one."""
        if isinstance(error, RunError):
            raise error
        period, index = divmod(number, self.n)
        step = self._step_of_period_0 + period + (self.plan.messages[index].slot >= self.plan.period.turn)
        place = self.context.place
        raise RunError(place.explain(f"rank {place.rank}, step {step}: {self.describe(number)}: {error}")) from error


def shared(one: Sequence[slice], other: Sequence[slice]) -> list[slice]:
    """Return what two lists of slices have in common, in order."""
    both = [(max(a.start, b.start), min(a.stop, b.stop)) for a in one for b in other]
    return [slice(begin, end) for begin, end in both if begin < end]
