"""Follows the slots of the plan with the training thread: the work at every slot boundary.

Arriving at a slot ends the one before it (its gathered buffers are freed) and issues the messages of the slot. Entering
it waits for its messages and bytes. In the turn compute has arrived at the first forward slot but not entered it.
Reductions at the head of a slot's messages are issued inside of the slot before, once their gradients are ready.

Compute may depart from the plan. Slots of units that do not come are passed over: their messages go. In forward every
slot can be passed over; in backward a slot after which a gradient is reduced is once autograd will not come to that
gradient any more: until then units are used out of their turn, and later messages wait. The end of a pass passes over
the rest, so each rank sends all messages, whatever the others do. A backward pass is a micro-step, with the forward
passes before it. In side passes (:mod:`mdcs.runtime.departures`) the plan waits.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from mdcs.model.hooks import Listener, ReentrantPasses
from mdcs.runtime.context import RunContext
from mdcs.runtime.departures import MORE, TOO_LATE, SidePasses
from mdcs.runtime.slots import LATE, ActivationExcess, PassGradients, SlotPosition, SlotTables
from mdcs.runtime.wire import Wire
from mdcs.telemetry.timeline import SlotMemory

_AGAIN = f"ran again before optimizer.step(), after the last backward pass of the step. {MORE}"


class SlotSequencer(SlotPosition, Listener):
    """The hooks' listener."""

    def __init__(
        self, context: RunContext, wire: Wire, side: SidePasses, excess: ActivationExcess, reentrant: ReentrantPasses
    ) -> None:
        plan, storages = context.plan, wire.storages
        super().__init__(plan)
        self.ledger, self.account, self.executor = context.ledger, context.account, context.executor
        self.place = context.place
        self.recorder, self.meter, self.excess = context.recorder, context.meter, excess
        self.wire, self.queue, self.storages = wire, wire.queue, storages
        self.departures, self.side, self.schedule = side.departures, side, plan.schedule
        # a reading of CUDA's allocator takes longer than enqueuing a layer
        self.watches_memory = not self.executor.runs_ahead
        self.exported_to: str | None = None  # call of the loop that uses the parameters now, besides training
        self.memory: dict[int, SlotMemory] = {}  # by slot, the last seen
        self._in_backward, self.first_number = False, 0
        self._names = [self.period.in_words(q) for q in range(self.period.length)]
        self.gradients, self._tables = PassGradients(plan, storages, reentrant), SlotTables(plan, storages)

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.place.step

    # -- hooks --------------------------------------------------------------------------------------------------

    def forward_begin(self, unit: int) -> None:
        """Enter a forward slot, unless it is a frozen unit's in an evaluation."""
        if self.exported_to is not None and not torch.is_grad_enabled():
            return self.side.use(unit, False)
        self._slot(unit, "F")
        self.departures.open_calls[unit] += 1

    def forward_end(self, unit: int) -> None:
        """Note that a module has returned; buffers are freed at the end of the slot."""
        if self.exported_to is not None and not torch.is_grad_enabled():
            return self.side.evaluation.leave(unit)
        self.departures.open_calls[unit] -= 1

    def backward_begin(self, unit: int) -> None:
        """Enter a backward slot."""
        self._slot(unit, "B")

    @property
    def accumulates(self) -> bool:
        """Return whether all passes are side passes now."""
        return self.side.accumulates

    def side_begin(self, unit: int, in_backward: bool) -> None:
        """Let a side pass or an evaluation use a unit. Inside of a forward pass of the plan it is one more use."""
        if self.exported_to is not None:
            return self.side.use(unit, in_backward)
        if any(self.departures.open_calls):
            self._use_again(unit)
            return
        if not self.side.is_open:
            self.wire.check()
            if self.step_pending:
                raise self.place.error(TOO_LATE)
            self.leave_forward()
            self.side.begin(self.progress, self.periods if self.at_turn else None)
            self.excess.skips = True
        self.side.use(unit, in_backward)

    def side_end(self, unit: int) -> None:
        """Note that a module has returned in a side pass, or in an evaluation."""
        self.side.evaluation.leave(unit)

    def side_backward_end(self) -> None:
        """Note that ``.grad`` may have gradients that are not in the plan's pass."""
        self.side.had_backward = True
        if self.side.ended is not None:
            self.side.ended()

    def used_outside(self, unit: int, is_side: bool) -> None:
        """Enter a forward slot that begins with the use of a parameter, or make the unit whole again."""
        self.side_begin(unit, False) if is_side else self._slot(unit, "F")

    def recomputed(self, unit: int) -> None:
        """Make sure that a unit is whole which activation checkpointing computes again."""
        if self.exported_to is None:
            self._in_backward = True
            self._use_again(unit)

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient, which is complete for this micro-step."""
        if self.entered is None:
            self._begin_backward()
        self._in_backward, storage, slot = True, self.storages[unit], self.period.slots[self.next_slot - 1]
        if self.has_left(unit) or index in storage.come and self._sent_early:
            raise self.place.error(f"{storage.names[index]} {LATE}")
        if storage.gradient is None:
            storage.allocate_gradient()
        is_last = slot.micro == self.micro_steps - 1
        storage.take_gradient(index, self.gradients.scale if is_last else None)
        if is_last and self.next_slot in self._tables.early:
            self._send_early()

    def backward_end(self) -> None:
        """Pass over the rest of the micro-step's slots."""
        with self.departures.timed() if self.next_slot != (end := self.end_of_pass) else nullcontext():
            while self.next_slot != end:
                self._pass_over(ended=True)
        self._complete(ended=True)
        self.departures.count_skipped()
        self.gradients.end_pass()
        self._in_backward = False
        self._arrive()
        self.departures.end_pass()  # after what the last slot frees

    # -- slots --------------------------------------------------------------------------------------------------

    def _slot(self, unit: int, phase: str) -> None:
        self.wire.check()
        if self.exported_to is not None:
            raise self.place.error(f"a pass with gradients inside {self.exported_to}: leave that with block to train")
        if self.side.is_open:
            self.side.end()
        if phase == "F" and self._in_backward:
            raise self.place.error(
                f"forward of {self.storages[unit].name} ran after a backward pass that raised: call "
                "parallel.abandon() on every rank"
            )
        if phase == "F" and self.step_pending:
            raise self.place.error(f"the model {_AGAIN}")
        expected = self.period.slots[self.next_slot]
        is_next = (expected.unit, expected.phase) == (unit, phase) and (phase == "B" or not self._in_backward)
        if is_next and (self.arrived or self._complete()):
            self._in_backward = phase == "B"
            self._enter()
        else:
            with self.departures.timed():
                self._depart(unit, phase)

    def _depart(self, unit: int, phase: str) -> None:
        """Let compute use a unit where the plan has another slot."""
        if phase == "B" and self.entered is None:
            self._begin_backward()
        self._in_backward = phase == "B"
        target = self.ahead(unit, phase)
        while target is not None and self.next_slot != target:
            if not self._pass_over():
                target = None
        if target is None or not (self.arrived or self._complete()):
            self._use_again(unit)
        else:
            self._enter()

    def _begin_backward(self) -> None:
        """Pass over the forward slots of a micro-step whose backward pass begins without a forward pass of its own."""
        if self.side.is_open:
            self.side.end()
        if self.step_pending:
            raise self.place.error(f"backward {_AGAIN}")
        self.departures.counts["ran a backward pass without a forward pass of its own"] += 1
        while self.period.slots[self.next_slot].phase == "F":
            self._enter()

    def _pass_over(self, ended: bool = False) -> bool:
        """Go through a slot without compute; return False, staying before it, while autograd may bring its gradients.
        This waits for the messages of the slot: what they gather is freed at its end.
        """
        if not self.arrived:
            if not self._complete(ended):
                return False
            self._arrive()
        slot = self.period.slots[self.next_slot]
        if self.plan.profile.slots[slot.place].seconds:  # 0: the profiled step left it out, too
            (self.departures.skipped_forward if slot.phase == "F" else self.departures.skipped_backward).add(slot.unit)
        self._enter()
        return True

    def _complete(self, ended: bool = False) -> bool:
        """Complete the gradients whose last slot compute is about to leave, as in :meth:`PassGradients.complete`."""
        last = self._tables.last[self.next_slot - 1]
        if not last or self.entered is None:
            return True
        is_last = self.period.slots[self.next_slot - 1].micro == self.micro_steps - 1
        return self.gradients.complete(last, is_last, ended)

    def _use_again(self, unit: int) -> None:
        """Make sure that a unit is whole which is used outside of its planned slots."""
        storage, departures = self.storages[unit], self.departures
        if self._in_backward and storage.trainable and self.has_left(unit):
            raise self.place.error(
                f"{storage.name} was used again in backward, after all of its gradients had come, when it may have "
                "been updated: use it in forward, or keep a copy there (.clone())"
            )
        if not self._in_backward:
            departures.count(
                unit, "ran {} in another order" if unit in departures.skipped_forward else "ran {} once more"
            )
            departures.skipped_forward.discard(unit)
        if not storage.guard.is_open:
            slot = self.period.slots[self.next_slot - 1]
            departures.make_whole(unit, None if self.has_left(unit) else slot, self.periods)

    def _arrive(self) -> None:
        """Arrive at the boundary before ``next_slot``: end the slot before it, issue messages."""
        q, lock, stamp = self.next_slot, self.account.lock, self.recorder.stamp()
        if self.entered is not None:
            self.recorder.ran("compute", (q - 1) % self.period.length, self.entered, stamp)
            self.entered = None
        if q == 0:
            self._begin_period(self.periods + 1)
            self.step_pending = True
            self.recorder.period(stamp)
            self.wire.messages.updates.freeze_options()
        previous, slot = self.ledger.slots[q - 1], self.ledger.slots[q]
        has_run = self.periods > self.queue.first_period or q > self.period.turn
        phase, departures = self.period.slots[q - 1].phase, self.departures
        for storage in self._tables.closes[q - 1] if has_run else ():
            if not departures.must_hold(storage.unit, phase):
                storage.guard.close()
        if previous.released and has_run:
            with lock:
                for u, _ in previous.released:
                    storage = self.storages[u]
                    storage.take_outside() if departures.must_hold(u, phase) else storage.free()
                self.queue.admission.reserve(-previous.freed)
        with lock:
            self._window((q - 1) % self.period.length, has_run)
            self.account.set_activations(slot.live)
            counts = self.watches_memory and self.queue.admission.cap is not None
            beyond = self.excess.arrived(q, self.meter.live() if counts else None)
            self.queue.admission.excess = beyond + self.account.outside
        self._issue(q, self.plan.held_update if self.step_pending else None)
        self.arrived = True

    def _begin_period(self, number: int) -> None:
        self.periods, self.first_number = number, number * self.queue.n  # the number of its first message

    def _issue(self, q: int, last: int | None = None) -> None:
        """Issue the messages of the slots up to ``q``, none behind the ``last``."""
        through = self.schedule.issued[q] if last is None else min(self.schedule.issued[q], last + 1)
        while self.queue.issued < self.first_number + through:
            self.wire.issue(self.ledger.slots[q].live)

    def _send_early(self) -> None:
        """Issue the messages that may leave before the slot ends, have all their gradients, and fit."""
        live = self.ledger.slots[self.next_slot - 1].peak
        for carried in self._tables.early[self.next_slot][self._sent_early :]:
            if not all(self.gradients.has_all(u, indices) for u, indices in carried.items()):
                return
            if not self.wire.has_room(live):
                return
            for storage, indices in ((self.storages[u], indices) for u, indices in carried.items()):
                for i in indices if not storage.strategy.sharded else ():
                    # The update is in place: a new version lets autograd raise if it still needs the old values.
                    torch.autograd.graph.increment_version(storage.parameters[i])
            self.wire.issue(live)

    @property
    def _sent_early(self) -> int:
        """Number of the next slot's messages issued before compute arrives there."""
        if self.arrived or self.entered is None or self.next_slot not in self._tables.early:
            return 0
        return self.queue.issued - self.first_number - self.schedule.issued[self.next_slot - 1]

    def _window(self, ended: int, has_run: bool) -> None:
        """Keep the peaks of the slot that ended; those of the last ``length`` slots are one period."""
        name, predicted = self.period.name(ended), self.account.take_window_peak()
        reading = self.meter.window() if self.watches_memory else None
        measured = {k: v for k, v in (reading or {}).items() if v is not None}
        self.memory[ended] = SlotMemory(name, predicted, measured or None)
        if has_run:
            self.excess.ended(ended, measured)

    def _enter(self) -> None:
        """Arrive, wait for the messages and bytes that the slot at ``next_slot`` needs, then let compute go on."""
        if not self.arrived:
            self._arrive()
        q, lock, slot = self.next_slot, self.account.lock, self.ledger.slots[self.next_slot]
        name = self._names[q]
        with lock:
            self.wire.wait_for(self.first_number + self.schedule.required[q], f"what {name} needs")
            self.queue.admission.excess = self.excess.entered(q) + self.account.outside
            self.wire.admit(slot.allocated + slot.peak, name)
            for u, _ in slot.gradients:
                self.storages[u].allocate_gradient()  # unless one came before this slot
            self.queue.admission.reserve(slot.allocated)
            self.account.set_activations(slot.peak)
        for storage in self._tables.opens[q]:
            # open between its slots: the loop could have changed it
            if storage.guard.is_open and (detached := storage.find_rebound_param()) is not None:
                raise self.place.error(
                    f"{detached} was given other memory (.data, model.to()): change values in place, or close() first"
                )
            storage.guard.open()
        self.entered = self.recorder.stamp()
        self.arrived, self.next_slot = False, (q + 1) % self.period.length

    # -- out of the ordinary ------------------------------------------------------------------------------------

    @property
    def agreed_progress(self) -> int:
        """The :attr:`progress` that every rank must reach before it gives up: all send what one has issued."""
        return self.progress + (self._sent_early > 0)

    @property
    def updates_begun(self) -> bool:
        """Return whether updates of the current iteration may have begun."""
        reduced = any(not m.kind.is_gather for m in self.plan.messages[: self.queue.issued - self.first_number])
        return self.step_pending and self.plan.held_update is None and reduced

    def advance_to(self, progress: int) -> None:
        """Go on to this :attr:`progress` without compute: messages are sent, with the gradients as they are."""
        while self.progress < progress:
            if self.arrived:
                self._enter()
            else:
                self._complete(ended=True)
                self._arrive()

    def leave_forward(self) -> None:
        """Go on to the end of the forward pass that compute has left: other ranks in it may wait for messages."""
        slots = self.period.slots
        while self.entered is not None and slots[self.next_slot - 1].phase == slots[self.next_slot].phase == "F":
            self.advance_to(self.progress + 2)

    def decide(self, applies: bool) -> None:
        """Let the held updates of the iteration be made, or drop them."""
        if self.step_pending and self.plan.held_update is not None:
            self.wire.decide(self.first_number + self.plan.held_update, applies)

    def end_short(self) -> None:
        """End the step before its last micro-step, if compute is between two, or has had side passes only."""
        if not (self.after_micro_step or self.at_turn and not self.step_pending and self.side.had_backward):
            return
        self.advance_to(2 * self.period.length + 1)

    def end_step(self) -> None:
        """Let held updates be made, and begin the next step."""
        self.decide(True)
        self._issue(self.period.turn)
        self.place.step += 1
        self.step_pending = self.side.had_backward = False
        self.gradients.restart()

    def restart(self) -> None:
        """Give up the current iteration, with nothing in flight: back to the turn. Updates already made stay."""
        self.departures.restart()
        self._in_backward = self.side.had_backward = False
        self.gradients.restart()
        self._begin_period(self.wire.restart())
        self.next_slot, self.arrived, self.step_pending, self.entered = self.period.turn, False, False, None
