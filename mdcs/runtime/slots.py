"""The slots of a plan as compute goes through them: where it is, what happens at each, which gradients have come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from mdcs.model.hooks import ReentrantPasses
from mdcs.plan.period import parameters_in_block
from mdcs.plan.plan import Plan
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import without_torch_function

LATE = (
    "received a gradient after its reduction was sent, from a reentrant checkpoint that was not in the measured step: "
    "write checkpoint(…, use_reentrant=False)"
)


class SlotPosition:
    """Position of the training thread.

    - ``periods``: periods begun; the first is the prologue.
    - ``step_pending``: the last micro-step's backward has begun, and step() has not ended the iteration.
    - ``next_slot``: the slot to enter next. ``arrived``: whether compute is at the boundary before it.
    - ``entered``: stamp of the slot under way; None between passes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.period, self.micro_steps = plan, plan.period, plan.micro_steps
        units, length = range(len(plan.profile.units)), plan.period.length
        self._last_use = [[plan.period.last_use(u, m) % length for u in units] for m in range(plan.micro_steps)]
        self.periods = 0
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
        return slot.phase == "B" and self._last_use[slot.micro][unit] < self.next_slot - 1

    @property
    def progress(self) -> int:
        """Number of arrivals at slots and entries of slots in the current iteration."""
        q, turn, length = self.next_slot, self.period.turn, self.period.length
        return 2 * (length if self.step_pending and q == turn else (q - turn) % length) + self.arrived

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass of the current iteration has begun."""
        return (
            self.step_pending
            or (self.next_slot - self.period.turn) % self.period.length > self.plan.profile.forward_slots
        )

    @property
    def after_micro_step(self) -> bool:
        """Whether a micro-step of the iteration has ended, and the next has not begun."""
        starts = {self.period.forward_start(micro) for micro in range(1, self.period.micro_steps)}
        return self.entered is None and self.next_slot in starts


class SlotTables:
    """Tables by slot.

    - ``opens``: units whose parameters become usable at its begin. ``closes``: units that stop at its end.
    - ``last``: trainable units whose gradients of a micro-step end with it.
    - ``early``: for each message that may leave before it: unit -> parameters whose gradients the message carries.
    """

    def __init__(self, plan: Plan, storages: list[UnitStorage]) -> None:
        period, length = plan.period, plan.period.length
        self.opens: list[list[UnitStorage]] = [[] for _ in range(length)]
        self.closes: list[list[UnitStorage]] = [[] for _ in range(length)]
        self.last: list[list[int]] = [[] for _ in range(length)]
        for u, storage in enumerate(storages):
            for micro in range(period.micro_steps):
                first, last = period.forward(u, micro)
                backward, end = period.backward(u, micro), period.last_use(u, micro) % length
                self.opens[first % length].append(storage)
                if storage.strategy.regathers and backward is not None:
                    self.closes[last % length].append(storage)
                    self.opens[backward[0] % length].append(storage)
                # trainable: the runtime holds its gradients from here on
                if storage.strategy.sharded or storage.trainable:
                    self.closes[end].append(storage)
                if storage.trainable:
                    self.last[end].append(u)
        self.early = _leaving_early(plan)


def _leaving_early(plan: Plan) -> dict[int, list[dict[int, range]]]:
    out: dict[int, list[dict[int, range]]] = {}
    for message, part in zip(plan.messages, plan.schedule.ready, strict=True):
        if part < 1:
            carried: dict[int, range] = {}
            for u, b in message.parts:
                indices = parameters_in_block(plan.profile, u, plan.blocks[u], b)
                known = carried.setdefault(u, indices)
                carried[u] = range(min(known.start, indices.start), max(known.stop, indices.stop))
            out.setdefault(message.slot, []).append(carried)
    return out


class PassGradients:
    """``come``: by unit, parameters whose gradient has come in this micro-step."""

    def __init__(self, plan: Plan, storages: Sequence[UnitStorage], reentrant: ReentrantPasses) -> None:
        self._reentrant = reentrant
        self._storages, self._micro_steps, self._scale = storages, plan.micro_steps, 1.0 / plan.world
        self.come: list[set[int]] = [set() for _ in storages]
        self._had: list[set[int]] = [set() for _ in storages]  # with a gradient so far in the iteration

    def take(self, unit: int, index: int, micro: int) -> None:
        """Move a parameter's gradient into the unit's; the last micro-step's averages over ranks."""
        scale = self._scale if micro == self._micro_steps - 1 else None
        gradient = self._storages[unit].parameters[index].grad
        if scale is not None and gradient is not None and index in self.come[unit]:
            gradient.mul_(scale)  # alone: the one that it adds to is averaged already
            scale = None
        self.come[unit].add(index)
        self._storages[unit].accumulate_gradient(index, index not in self._had[unit], scale)
        self._had[unit].add(index)

    def complete(self, units: Sequence[int], micro: int, ended: bool) -> bool:
        """Complete the gradients of units in this micro-step. Return False, with nothing changed, if autograd will
        bring more. ``ended``: it will not.
        """
        incomplete = {u: missing for u in units if (missing := self._missing(u))}
        asked = (
            {u: range(len(self._storages[u].parameters)) for u in units} if self._reentrant.has_inner else incomplete
        )
        if not ended and any(self._brings(u, indices) for u, indices in asked.items()):
            return False
        is_last = micro == self._micro_steps - 1
        for u, missing in incomplete.items():
            for i in missing:
                with without_torch_function(), torch.no_grad():
                    if self._storages[u].parameters[i].grad is not None:  # side passes have left it
                        self.take(u, i, micro)
                    elif is_last and i in self._had[u]:
                        self._storages[u].average(i, self._scale)
                    elif is_last:
                        self._storages[u].leave_out(i)
        for u in units if is_last else ():
            had, count = self._had[u], len(self._storages[u].parameters)
            self._storages[u].unused = () if len(had) == count else tuple(set(range(count)) - had)
        return True

    def has_all(self, unit: int, indices: range) -> bool:
        """Whether these gradients of a unit are complete."""
        return self.come[unit].issuperset(indices) and not (self._reentrant.has_inner and self._brings(unit, indices))

    def _brings(self, unit: int, indices: Collection[int]) -> bool:
        return self._reentrant.brings(unit, [self._storages[unit].parameters[i] for i in indices])

    def _missing(self, unit: int) -> set[int]:
        come, count = self.come[unit], len(self._storages[unit].parameters)
        return set() if len(come) == count else set(range(count)) - come

    def end_pass(self) -> None:
        """Begin the next micro-step."""
        for come in self.come:
            come.clear()

    def restart(self) -> None:
        """Begin the next iteration, or forget this one."""
        for known in (*self.come, *self._had):
            known.clear()
        self._reentrant.end_step()
