"""Where compute is in a plan: between which slots, in which step."""

from __future__ import annotations

from typing import Any

from mdcs.plan.plan import Plan


class SlotPosition:
    """Position of the training thread.

    - ``step``: number of the step. ``periods``: periods begun; the first is the prologue.
    - ``step_pending``: the last micro-step's backward has begun, and step() has not ended the iteration.
    - ``next_slot``: the slot to enter next. ``arrived``: whether compute is at the boundary before it.
    - ``entered``: stamp of the slot under way; None between passes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.period = plan, plan.period
        self.step, self.periods = 1, 0
        self.step_pending = self.arrived = False
        self.next_slot = self.period.turn
        self.entered: Any = None

    @property
    def at_turn(self) -> bool:
        """Whether compute is between a backward and the next forward pass."""
        return self.next_slot == self.period.turn and self.entered is None

    def ahead(self, unit: int, phase: str) -> int | None:
        """Return the next slot of a unit in this pass; None if there is none."""
        slots, length = self.period.slots, self.period.length
        left = (self.end_of_pass - self.next_slot) % length or (0 if self.entered is not None else length)
        for q in (q % length for q in range(self.next_slot, self.next_slot + left)):
            if phase == "F" and slots[q].phase == "B":
                break
            if (slots[q].unit, slots[q].phase) == (unit, phase):
                return q
        return None

    @property
    def end_of_pass(self) -> int:
        """The slot behind the last one of the micro-step that compute is in, or comes to."""
        return self.period.end(self.period.slots[self.next_slot - (self.entered is not None)].micro)

    def has_left(self, unit: int) -> bool:
        """Return whether compute has left the unit's last backward slot of this pass."""
        slot = self.period.slots[self.next_slot - 1]
        return slot.phase == "B" and self.period.last_use(unit, slot.micro) % self.period.length < self.next_slot - 1

    @property
    def progress(self) -> int:
        """Number of arrivals at slots and entries of slots in the current iteration."""
        q, turn, length = self.next_slot, self.period.turn, self.period.length
        return 2 * (length if self.step_pending and q == turn else (q - turn) % length) + self.arrived

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass of the current iteration has begun."""
        return self.step_pending or (self.next_slot - self.period.turn) % self.period.length > self.plan.profile.forward_slots

    @property
    def after_micro_step(self) -> bool:
        """Whether a micro-step of the iteration has ended, and the next has not begun."""
        starts = {self.period.forward_start(micro) for micro in range(1, self.period.micro_steps)}
        return self.entered is None and self.next_slot in starts
