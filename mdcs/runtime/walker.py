"""Follows the slots of the plan with the training thread: the work at every slot boundary.

Arriving at a slot ends the one before it (its gathered buffers are freed) and issues the messages of the slot. Entering
it waits for the messages that it needs and for its bytes. Between backward and the next forward (the turn) compute has
arrived at the first forward slot but not entered it. Reductions at the head of a slot's messages are issued earlier,
inside of the slot before, once their gradients are ready (:mod:`mdcs.plan.early`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mdcs.measure.memory import Meter
from mdcs.measure.timeline import SlotMemory
from mdcs.plan.early import needed
from mdcs.plan.ledger import Ledger
from mdcs.plan.messages import Plan
from mdcs.plan.worst_case import SlotLimits
from mdcs.runtime.account import Account
from mdcs.runtime.errors import RunError
from mdcs.runtime.excess import Excess
from mdcs.runtime.executor import Executor
from mdcs.runtime.record import Recorder
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.stream_transport import StreamTransport
from mdcs.runtime.thread_transport import ThreadTransport
from mdcs.runtime.updates import Updates


class SlotWalker:
    """The hooks' listener (:class:`mdcs.model.hooks.Listener`)."""

    def __init__(
        self, plan: Plan, ledger: Ledger, storages: list[UnitStorage], transport: ThreadTransport | StreamTransport,
        updates: Updates, account: Account, executor: Executor, recorder: Recorder, meter: Meter, excess: Excess,
    ) -> None:  # fmt: skip
        self.plan, self.ledger, self.storages = plan, ledger, storages
        self.transport, self.queue, self.updates, self.account = transport, transport.queue, updates, account
        self.executor, self.recorder, self.meter, self.excess = executor, recorder, meter, excess
        self.period = plan.period
        self.limits = SlotLimits(plan)
        self.step = 1
        self.periods = 0  # periods begun; the first is the prologue
        self.due = False  # the last micro-step's backward has begun, and step() has not ended the iteration
        self.watches_memory = not executor.runs_ahead  # a reading of CUDA's allocator takes longer than enqueuing a layer
        self.lent: str | None = None  # call of the loop that uses the parameters now, besides training
        self.position = self.period.turn  # the slot to enter next
        self.arrived = False
        self.memory: dict[int, SlotMemory] = {}  # by slot, the last seen
        self._entered: Any = None  # stamp of the slot under way
        self._gradients: list[set[int]] = [set() for _ in storages]
        self._scale = 1.0 / plan.world
        self._opens, self._closes = self._uses()
        self._early = self._leaving_early()

    def _uses(self) -> tuple[list[list[UnitStorage]], list[list[UnitStorage]]]:
        """Return for each slot the units whose parameters become usable at its begin, and those that stop at its end."""
        period = self.period
        opens: list[list[UnitStorage]] = [[] for _ in range(period.length)]
        closes: list[list[UnitStorage]] = [[] for _ in range(period.length)]
        for u, storage in enumerate(self.storages):
            for micro in range(period.micro_steps):
                first, last = period.forward(u, micro)
                backward = period.backward(u, micro)
                opens[first % period.length].append(storage)
                if storage.strategy.regathers and backward is not None:
                    closes[last % period.length].append(storage)
                    opens[backward[0] % period.length].append(storage)
                if storage.strategy.sharded or storage.trainable:  # trainable: the runtime holds its gradients from here on
                    closes[period.last_use(u, micro) % period.length].append(storage)
        return opens, closes

    def _leaving_early(self) -> dict[int, list[dict[int, range]]]:
        """Return by slot, for each message that may leave before it: unit -> parameters whose gradients it carries."""
        out: dict[int, list[dict[int, range]]] = {}
        for message, part in zip(self.plan.messages, self.plan.early, strict=True):
            if part < 1:
                carried: dict[int, range] = {}
                for u, b in message.parts:
                    own = needed(self.plan.profile, u, self.plan.blocks[u], b)
                    known = carried.setdefault(u, own)
                    carried[u] = range(min(known.start, own.start), max(known.stop, own.stop))
                out.setdefault(message.slot, []).append(carried)
        return out

    @property
    def at_turn(self) -> bool:
        """Whether compute is between a backward and the next forward pass."""
        return self.position == self.period.turn and self._entered is None

    # -- hooks --------------------------------------------------------------------------------------------------

    def forward_begin(self, unit: int) -> None:
        """Enter a forward slot, unless it is a frozen unit's in an evaluation."""
        if self.lent is None or torch.is_grad_enabled():
            self._slot(unit, "F")

    def forward_end(self, unit: int) -> None:
        """Do nothing: buffers are freed at the end of the slot."""

    def backward_begin(self, unit: int) -> None:
        """Enter a backward slot."""
        self._slot(unit, "B")

    def recomputed(self, unit: int) -> None:
        """Check that activation checkpointing recomputes the unit where the profile saw it."""
        self._in_backward_of(unit, self.storages[unit].name, "computed again")

    def _in_backward_of(self, unit: int, name: str, what: str) -> None:
        """Raise RunError unless compute is in a backward slot in which the profile saw the unit."""
        span = self.period.backward(unit, self.period.slots[self.position - 1].micro)
        length = self.period.length
        if span is None or not span[0] % length < self.position <= span[1] % length + 1:
            raise self._error(
                f"{name} was {what} in slot {self.period.name(self.position - 1)}, not where it was when it was profiled"
            )

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient, which is complete for this micro-step."""
        storage = self.storages[unit]
        micro = self.period.slots[self.position - 1].micro
        self._in_backward_of(unit, storage.names[index], "given its gradient")
        if index in self._gradients[unit]:
            raise self._error(f"{storage.names[index]} got two gradients in one backward pass")
        self._gradients[unit].add(index)
        last = micro == self.plan.micro_steps - 1
        storage.take_gradient(index, micro == 0, self._scale if last else None)
        if last and self.position in self._early:
            self._send_early()

    def backward_end(self) -> None:
        """Leave the last backward slot of the micro-step."""
        if self.period.slots[self.position - 1].phase != "B":
            raise self._error("backward ran, but no unit's backward did")
        missing = [
            storage.names[i]
            for storage, seen in zip(self.storages, self._gradients, strict=True)
            if storage.trainable
            for i in range(len(storage.parameters))
            if i not in seen
        ]
        if missing:
            raise self._error(
                f"{missing[0]} got no gradient in this step but did when it was profiled; "
                "parameters that are not used in every step must be frozen"
            )
        if self.position != self.period.turn and self.period.slots[self.position].phase != "F":
            raise self._error(f"backward ended before slot {self.period.name(self.position)}")
        for seen in self._gradients:
            seen.clear()
        self._arrive()

    # -- slots --------------------------------------------------------------------------------------------------

    def _slot(self, unit: int, phase: str) -> None:
        self.transport.check()
        if self.lent is not None:
            raise self._error(f"a pass with gradients inside {self.lent}")
        expected = self.period.slots[self.position]
        if phase == "B" and self._entered is None:
            raise self._error(
                f"a second backward pass of one forward pass, through {self.storages[unit].name}: add the losses up and call "
                "backward() once"
            )
        if (expected.unit, expected.phase) != (unit, phase):
            raise self._error(
                f"{'forward' if phase == 'F' else 'backward'} of {self.storages[unit].name} ran where the plan has "
                f"{self.period.name(self.position)}: after a pass that raised call parallel.abandon() on every rank; else the "
                f"model's control flow is not the profiled one, or the loop takes another number of micro-steps than "
                f"{self.plan.micro_steps}"
            )
        if not self.arrived:
            self._arrive()
        self._enter()

    def _arrive(self) -> None:
        """Arrive at the boundary before ``position``: end the slot before it, issue messages."""
        q, lock = self.position, self.account.lock
        stamp = self.executor.stamp()
        if self._entered is not None:
            self.recorder.compute((q - 1) % self.period.length, self._entered, stamp)
            self._entered = None
        if q == 0:
            if self.due:
                raise self._error(
                    f"a second backward pass without step() between: the plan takes {self.plan.micro_steps} per step"
                )
            self.periods += 1
            self.due = True
            self.recorder.period(stamp)
            self.updates.snapshot()
        previous, slot = self.ledger.slots[q - 1], self.ledger.slots[q]
        has_run = self.periods > self.queue.first_period or q > self.period.turn
        for storage in self._closes[q - 1] if has_run else ():
            storage.guard.close()
        if previous.released and has_run:
            with lock:
                for u, size in previous.released:
                    self.storages[u].free_full()
                    self.account.book("full_parameters", -size)
                self.queue.reserve(-previous.freed)
        with lock:
            self._window((q - 1) % self.period.length, has_run)
            self.account.enter(slot.live)
            self.queue.excess = self.excess.arrived(q, self.meter.live() if self._counts_excess else None)
        while self.queue.issued < self.periods * self.queue.n + self.limits.issued[q]:
            self.transport.issue(slot.live)
        self.arrived = True

    def _send_early(self) -> None:
        """Issue the messages that may leave before the slot ends, have all their gradients, and fit."""
        live = self.ledger.slots[self.position - 1].peak
        for carried in self._early[self.position][self._sent_early :]:
            if not all(self._gradients[u].issuperset(own) for u, own in carried.items()):
                return
            if not self.transport.has_room(live):
                return
            for storage, own in ((self.storages[u], own) for u, own in carried.items()):
                for i in own if not storage.strategy.sharded else ():
                    # The update is in place: a new version lets autograd raise if it still needs the old values.
                    torch.autograd.graph.increment_version(storage.parameters[i])
            self.transport.issue(live)

    @property
    def _sent_early(self) -> int:
        """Number of the next slot's messages issued before compute arrives there."""
        if self.arrived or self._entered is None or self.position not in self._early:
            return 0
        return self.queue.issued - self.periods * self.queue.n - self.limits.issued[self.position - 1]

    @property
    def _counts_excess(self) -> bool:
        return self.watches_memory and self.queue.cap is not None

    def _window(self, ended: int, has_run: bool) -> None:
        """Keep the peaks of the slot that ended; those of the last ``length`` slots are one period."""
        name, predicted = self.period.name(ended), self.account.window()
        reading = self.meter.window() if self.watches_memory else None
        measured = {k: v for k, v in (reading or {}).items() if v is not None}
        self.memory[ended] = SlotMemory(name, predicted, measured or None)
        if has_run:
            self.excess.ended(ended, measured)

    def _enter(self) -> None:
        """Wait for the messages and bytes that the slot at ``position`` needs, then let compute go on."""
        q, lock, slot = self.position, self.account.lock, self.ledger.slots[self.position]
        name = self.period.name(q)
        with lock:
            self.transport.wait_for(self.periods * self.queue.n + self.limits.done[q], f"what slot {name} needs")
            self.queue.excess = self.excess.entered(q)
            self.transport.admit(slot.allocated + slot.peak, f"slot {name}")
            for u, b in slot.gradients:
                self.storages[u].allocate_gradient()
                self.account.book("gradients", b)
            self.queue.reserve(slot.allocated)
            self.account.enter(slot.peak)
        for storage in self._opens[q]:
            if storage.guard.is_open:  # open between its slots: the loop could have changed it
                detached = storage.detached()
                if detached is not None:
                    raise self._error(
                        f"{detached} was given other memory (.data, model.to()): change values in place, or close() first"
                    )
            storage.guard.open()
        self._entered = self.executor.stamp()
        self.arrived = False
        self.position = (q + 1) % self.period.length

    # -- out of the ordinary ------------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Number of arrivals at slots and entries of slots in the current iteration."""
        q, turn, length = self.position, self.period.turn, self.period.length
        return 2 * (length if self.due and q == turn else (q - turn) % length) + self.arrived

    @property
    def committed(self) -> int:
        """The :attr:`progress` that every rank must reach: messages of a slot that one rank has issued, all send."""
        return self.progress + (self._sent_early > 0)

    @property
    def is_torn(self) -> bool:
        """Whether updates of the current iteration may have begun."""
        issued = range(self.queue.issued - self.periods * self.queue.n)
        reductions = [i for i, m in enumerate(self.plan.messages) if not m.kind.is_gather]
        begins = reductions[:1] if self.plan.cross_iteration else reductions[-1:]  # with a barrier the last one updates
        return self.due and any(i in issued for i in begins)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass of the current iteration has begun."""
        return self.due or (self.position - self.period.turn) % self.period.length > self.plan.profile.forward_slots

    @property
    def after_micro_step(self) -> bool:
        """Whether a micro-step of the iteration has ended, and the next has not begun."""
        starts = {self.period.forward_start(micro) for micro in range(1, self.period.micro_steps)}
        return self._entered is None and self.position in starts

    def walk(self, progress: int) -> None:
        """Go on to this :attr:`progress` without compute: messages are sent as usual, with the gradients as they are."""
        while self.progress < progress:
            if self.arrived:
                self._enter()
            else:
                self._arrive()

    def leave_forward(self) -> None:
        """Go on to the end of the forward pass that compute has left: another rank may be in it and wait for messages."""
        slots = self.period.slots
        while self._entered is not None and slots[self.position - 1].phase == slots[self.position].phase == "F":
            self.walk(self.progress + 2)

    def end_short(self) -> None:
        """End the accumulation of gradients before its last micro-step."""
        for storage in self.storages:
            for gradient in storage.gradients:
                gradient.mul_(self._scale)
        self.walk(2 * self.period.length + 1)

    def restart(self) -> None:
        """Give up the current iteration: back to the turn, as before step 1. No messages may be in flight.

        Updates already made stay.
        """
        with self.account.lock:
            for storage in self.storages:
                storage.forget()
            self.account.restart()
        for seen in self._gradients:
            seen.clear()
        self.periods = self.transport.restart()
        self.position, self.arrived, self.due, self._entered = self.period.turn, False, False, None

    def _error(self, what: str) -> RunError:
        return RunError(f"rank {self.storages[0].rank}, step {self.step}: {what}")
