"""The phases of one message, with their bytes booked and their times recorded. Both transports compose them.

    allocate    full parameters, for the first gather of a unit
    launch      buffers of the message; pack, start the collective
    land        unpack, free the staging buffers
    update      update the blocks that the message has reduced

A transport says in which thread or on which stream a phase runs, and when the memory of gradients and shards is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan
from mdcs.profile.link import Kind
from mdcs.runtime.byte_account import ByteAccount
from mdcs.runtime.collective_ops import CollectiveOps, Transfer
from mdcs.runtime.errors import ErrorContext, RunError
from mdcs.runtime.executor import Executor
from mdcs.runtime.failure_channel import FailureChannel
from mdcs.runtime.gradient_scaling import UpdateScale
from mdcs.runtime.sharded_optimizer import ShardedOptimizer
from mdcs.runtime.step_trace import StepRecorder
from mdcs.runtime.storage import UnitStorage

Gradients = tuple[tuple[int, int], ...]
"""(unit, bytes of its full gradients) pairs."""

_IN_WORDS = {
    Kind.AR: "all-reduce", Kind.RS: "reduce-scatter", Kind.AG_F: "all-gather before the forward",
    Kind.AG_B: "all-gather before the backward",
}  # fmt: skip


@dataclass
class Update:
    """The update that a message completes, with the gradients of iteration ``step``.

    - ``gradients``: (unit, block) -> this rank's reduced gradient, flat.
    - ``shards``: gradient shards to free when the update is done.
    - ``is_due``: False if a gradient is not finite. ``scale``: factor on the gradients; None: 1.
    - ``scratch``: booked bytes.
    """

    message: int
    step: int
    gradients: dict[tuple[int, int], Tensor]
    shards: list[Tensor]
    is_due: bool = True
    scale: Tensor | None = None
    scratch: int = 0


class MessageRunner:
    """Runs the phases of messages. ``index`` counts messages since the start of training, ``i`` those of the plan."""

    def __init__(
        self, plan: Plan, ledger: Ledger, storages: list[UnitStorage], wire: CollectiveOps, updates: ShardedOptimizer,
        account: ByteAccount,
        executor: Executor, recorder: StepRecorder, scale: UpdateScale, place: ErrorContext, failures: FailureChannel,
    ) -> None:  # fmt: skip
        self.plan, self.ledger, self.storages, self.n = plan, ledger, storages, len(plan.messages)
        self.wire, self.updates, self.account = wire, updates, account
        self.executor, self.recorder, self.scale = executor, recorder, scale
        self.place, self.failures = place, failures
        self._periods_ahead = 0  # number of a period minus number of its iteration
        self._kept: dict[tuple[int, int], Tensor] = {}  # reduced gradients that wait for the barrier
        reductions = [i for i, m in enumerate(plan.messages) if not m.kind.is_gather]
        self.last_reduction = reductions[-1] if reductions else -1
        self.decided = 0  # messages whose updates the loop has let be made, or has dropped
        self.drops = False

    def is_held(self, index: int) -> bool:
        """Return whether the message's updates wait for the loop to decide."""
        return index % self.n == self.plan.held_update and index >= self.decided

    def restart(self, first_period: int) -> None:
        """Drop what earlier periods have left. ``first_period``: number of the next prologue."""
        self._periods_ahead = first_period + 1 - self.place.step
        self._kept.clear()
        self.drops = False

    # -- phases ---------------------------------------------------------------------------------------------------

    def allocate(self, index: int) -> None:
        """Allocate the full parameters of units that this message is the first to gather."""
        full = self.ledger.messages[index % self.n].full
        if full:
            with self.account.lock:
                for u, size in full:
                    if self.storages[u].is_outside:  # kept whole for a use that the plan does not have: the gather
                        self.storages[u].is_outside = False  # writes the same values, and the bytes are the plan's again
                        continue
                    self.storages[u].allocate_full()
                    self.account.record("full_parameters", size)

    def launch(self, index: int) -> tuple[Transfer, Any]:
        """Allocate the message's buffers, pack, and start the collective. Return the transfer and the time it began."""
        message, effect = self.plan.messages[index % self.n], self.ledger.messages[index % self.n]
        with self.account.lock:
            transfer = self.wire.allocate(message)
            self.account.record("staging", effect.staging)
            self.account.record("gradient_shards", effect.shards)
        begin = self.recorder.stamp()
        self.wire.launch(transfer)
        return transfer, begin

    def land(self, index: int, transfer: Transfer, begin: Any) -> None:
        """Record that the collective has ended, unpack, and free the staging buffers."""
        period, i = divmod(index, self.n)
        self.recorder.message(i, period - self._periods_ahead, begin, self.recorder.stamp())
        self.wire.land(transfer)
        with self.account.lock:
            transfer.free_staging()
            self.account.record("staging", -self.ledger.messages[i].staging)

    def completed_update(self, index: int, transfer: Transfer) -> Update | None:
        """Return the update of the blocks that the message has reduced; in barrier mode of all, with the last reduction."""
        (period, i), message = divmod(index, self.n), transfer.message
        if message.kind.is_gather:
            return None
        ready = {part: transfer.shards.get(part) for part in message.parts}
        if not self.plan.cross_iteration:
            self._kept |= {p: s for p, s in ready.items() if s is not None}
            if i != self.last_reduction:
                return None
            reduced = dict.fromkeys(p for m in self.plan.messages if not m.kind.is_gather for p in m.parts)
            ready = {part: self._kept.pop(part, None) for part in reduced}
        gradients: dict[tuple[int, int], Tensor] = {}
        for (u, b), shard in ready.items():
            storage = self.storages[u]
            gradients[u, b] = storage.gradient(b)[storage.block_slice(b)] if shard is None else shard
        return Update(i, period - self._periods_ahead, gradients, [shard for shard in ready.values() if shard is not None])

    def find_scale(self, update: Update) -> None:
        """Reduce the global norm over ranks, where it is needed, and set the factor on the gradients."""
        update.scratch = self.ledger.messages[update.message].scratch
        work = None
        if self.scale.is_needed:
            with self.updates.meter.tag("update_scratch"):
                work = self.scale.workspace(update.gradients)
            update.scratch = max(update.scratch, work.nbytes)
        with self.account.lock:
            self.account.record("update_scratch", update.scratch)
        if work is not None:
            update.is_due, update.scale = self.scale.factor(update.gradients, work)
            if update.is_due and self.scale.norm is not None:
                self.recorder.norm(update.step, self.scale.norm)

    def update(self, update: Update) -> None:
        """Update parameters and optimizer state."""
        begin = self.recorder.stamp()
        if update.is_due and not self.drops:
            with self.wire.range("update", self.plan.messages[update.message]):
                self.updates.step(update.gradients, update.scale)
        self.recorder.update(update.message, begin, self.recorder.stamp())
        with self.account.lock:
            self.account.record("update_scratch", -update.scratch)

    def free_shards(self, update: Update) -> None:
        """Free the gradient shards of an update that is done."""
        with self.account.lock:
            for shard in update.shards:
                shard.untyped_storage().resize_(0)
            self.account.record("gradient_shards", -self.ledger.messages[update.message].shards_freed)

    def free_gradients(self, gradients: Gradients) -> None:
        """Free full gradients that are reduced."""
        if gradients:
            with self.account.lock:
                for u, size in gradients:
                    self.storages[u].free_gradient()
                    self.account.record("gradients", -size)

    # -- errors ---------------------------------------------------------------------------------------------------

    def describe(self, index: int) -> str:
        """Return the message in words."""
        i = index % self.n
        m = self.plan.messages[i]
        names = ", ".join(dict.fromkeys(self.storages[u].name for u, _ in m.parts))
        return f"message {i} ({_IN_WORDS[m.kind.plain]} of {names})"

    @contextmanager
    def errors_of(self, index: int) -> Iterator[None]:
        """Name the message in errors, and the step that issued it; compute may be in the next one by now."""
        try:
            yield
        except RunError:
            raise
        except Exception as e:
            period, i = divmod(index, self.n)
            step = period - self._periods_ahead + (self.plan.messages[i].slot >= self.plan.period.turn)
            what = f"rank {self.place.rank}, step {step}: {self.describe(i)}: {e}"
            raise RunError(self.failures.annotate(what)) from e
