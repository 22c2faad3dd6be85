"""Gradients of an iteration: which have come, and what stands in for those that do not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from mdcs.model.reentrant import ReentrantPasses
from mdcs.plan.plan import Plan
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import without_torch_function

LATE = (
    "got one more gradient after its gradients had been sent to the other ranks: a reentrant checkpoint used it that the "
    "measured step did not have. Write checkpoint(…, use_reentrant=False)"
)


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
        """Complete the gradients of units in this micro-step. Return False, with nothing changed, if autograd will bring
        more. ``ended``: it will not.
        """
        incomplete = {u: missing for u in units if (missing := self._missing(u))}
        asked = {u: range(len(self._storages[u].parameters)) for u in units} if self._reentrant.has_inner else incomplete
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
