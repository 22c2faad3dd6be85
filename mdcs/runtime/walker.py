"""Walks the slots of the plan with the training thread: what happens at every slot boundary.

Arriving at a slot ends the one before it (its gathered buffers are freed) and issues the messages of
the slot; entering it waits for what it needs and for its bytes. Between backward and the next forward (the turn)
compute has arrived at the first forward slot but not entered it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mdcs.measure.memory import Meter
from mdcs.measure.timeline import SlotMemory
from mdcs.plan.ledger import Ledger, SlotLimits
from mdcs.plan.messages import Plan
from mdcs.runtime.account import Account
from mdcs.runtime.dispatcher import Dispatcher, RunError
from mdcs.runtime.executor import Executor
from mdcs.runtime.record import Recorder
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Updates


class SlotWalker:
    """The hooks' listener (:class:`mdcs.model.hooks.Listener`)."""

    def __init__(
        self, plan: Plan, ledger: Ledger, storages: list[UnitStorage], dispatcher: Dispatcher, updates: Updates,
        account: Account, executor: Executor, recorder: Recorder, meter: Meter,
    ) -> None:  # fmt: skip
        self.plan, self.ledger, self.storages = plan, ledger, storages
        self.dispatcher, self.updates, self.account = dispatcher, updates, account
        self.executor, self.recorder, self.meter = executor, recorder, meter
        self.period = plan.period
        self.limits = SlotLimits(plan)
        self.step = 1
        self.rounds = 0  # periods begun; the prologue is period 0
        self.position = self.period.turn  # the slot to enter next
        self.arrived = False
        self.memory: dict[int, SlotMemory] = {}  # the last seen of every slot: the ledger's and the allocator's
        self._entered: Any = None  # stamp of the slot under way
        self._gradients: list[set[int]] = [set() for _ in storages]
        self._scale = 1.0 / plan.world

    @property
    def at_turn(self) -> bool:
        return self.position == self.period.turn and self._entered is None

    # -- hooks --------------------------------------------------------------------------------------------------

    def forward_begin(self, unit: int) -> None:
        self._slot(unit, "F")

    def forward_end(self, unit: int) -> None:
        pass  # buffers are freed at the end of the slot

    def backward_begin(self, unit: int) -> None:
        self._slot(unit, "B")

    def recomputed(self, unit: int) -> None:
        self._in_backward_of(unit, self.storages[unit].name, "computed again")

    def _in_backward_of(self, unit: int, name: str, what: str) -> None:
        """Raise RunError unless compute is in the backward slots that the profile saw."""
        span = self.period.backward(unit, self.period.slots[self.position - 1].micro)
        length = self.period.length
        if span is None or not span[0] % length < self.position <= span[1] % length + 1:
            raise self._error(
                f"{name} was {what} in slot {self.period.name(self.position - 1)}, not where it was when it was profiled"
            )

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        storage = self.storages[unit]
        micro = self.period.slots[self.position - 1].micro
        self._in_backward_of(unit, storage.names[index], "given its gradient")
        if index in self._gradients[unit]:
            raise self._error(f"{storage.names[index]} got two gradients in one backward pass")
        self._gradients[unit].add(index)
        last = micro == self.plan.micro_steps - 1
        storage.take_gradient(index, micro == 0, self._scale if last else None)

    def backward_end(self) -> None:
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
        self.dispatcher.check()
        expected = self.period.slots[self.position]
        if (expected.unit, expected.phase) != (unit, phase):
            raise self._error(
                f"{'forward' if phase == 'F' else 'backward'} of {self.storages[unit].name} ran where the plan has "
                f"{self.period.name(self.position)}: the model's control flow is not the profiled one, "
                f"or the loop takes another number of micro-steps than {self.plan.micro_steps}"
            )
        if not self.arrived:
            self._arrive()
        self._enter()

    def _arrive(self) -> None:
        """Compute has come to the boundary before ``position``."""
        q, lock = self.position, self.account.lock
        stamp = self.executor.stamp()
        if self._entered is not None:
            self.recorder.compute((q - 1) % self.period.length, self._entered, stamp)
            self._entered = None
        if q == 0:
            self.rounds += 1
            if self.rounds > self.step:
                raise self._error(
                    f"a second backward pass without step() between: the plan takes {self.plan.micro_steps} per step"
                )
            self.recorder.period(stamp)
            self.updates.snapshot()
        previous, slot = self.ledger.slots[q - 1], self.ledger.slots[q]
        if previous.released and (self.rounds or q > self.period.turn):
            here = self.executor.mark()  # compute must have left what is freed, and only then is it waited for
            with self.executor.communicating():
                self.executor.after(here)
                with lock:
                    for u, size in previous.released:
                        self.storages[u].free_full()
                        self.account.book("full_parameters", -size)
                    self.account.release(size for _, size in previous.released)
                    lock.notify_all()
        with lock:
            self._window((q - 1) % self.period.length)
            self.account.enter(slot.live)
        mark = self.executor.mark()
        n = self.dispatcher.n
        while self.dispatcher.issued < self.rounds * n + self.limits.issued[q]:
            self.dispatcher.issue(self.dispatcher.issued, slot.live, mark)
        self.arrived = True

    def _window(self, ended: int) -> None:
        """Keep the peaks of the slot that ended: those of the last ``length`` slots are one period."""
        name, predicted = self.period.name(ended), self.account.window()
        measured = {k: v for k, v in (self.meter.window() or {}).items() if v is not None}
        self.memory[ended] = SlotMemory(name, predicted, measured or None)

    def _enter(self) -> None:
        """Wait for what the slot at ``position`` needs, then compute."""
        q, lock, slot = self.position, self.account.lock, self.ledger.slots[self.position]
        name = self.period.name(q)
        with lock:
            self.dispatcher.wait_for(self.rounds * self.dispatcher.n + self.limits.done[q], f"what slot {name} needs")
            size = sum(b for _, b in slot.gradients)
            self.dispatcher.admit(size + slot.peak, f"slot {name}")
            for u, b in slot.gradients:
                self.storages[u].allocate_gradient()
                self.account.book("gradients", b)
            self.account.reserve(b for _, b in slot.gradients)
            self.account.enter(slot.peak)
        self._entered = self.executor.stamp()
        self.arrived = False
        self.position = (q + 1) % self.period.length

    def _error(self, what: str) -> RunError:
        return RunError(f"rank {self.storages[0].rank}, step {self.step}: {what}")
