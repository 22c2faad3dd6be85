"""Gradients of an iteration: which have come, and what stands in for those that do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mdcs.plan.plan import Plan
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import will_get_gradient, without_torch_function


class PassGradients:
    """``come``: by unit, parameters whose gradient has come in this micro-step."""

    def __init__(self, plan: Plan, storages: Sequence[UnitStorage]) -> None:
        self._storages, self._micro_steps, self._scale = storages, plan.micro_steps, 1.0 / plan.world
        self.come: list[set[int]] = [set() for _ in storages]
        self._had: list[set[int]] = [set() for _ in storages]  # with a gradient so far in the iteration

    def take(self, unit: int, index: int, micro: int) -> None:
        """Move a parameter's gradient into the unit's; the last micro-step's averages over ranks."""
        self.come[unit].add(index)
        scale = self._scale if micro == self._micro_steps - 1 else None
        self._storages[unit].accumulate_gradient(index, index not in self._had[unit], scale)
        self._had[unit].add(index)

    def complete(self, units: Sequence[int], micro: int, ended: bool) -> bool:
        """Complete the gradients of units in this micro-step. Return False, with nothing changed, if autograd will bring
        more. ``ended``: it will not.
        """
        incomplete = {u: missing for u in units if (missing := self._missing(u))}
        if not ended and any(
            will_get_gradient(self._storages[u].parameters[i]) for u, missing in incomplete.items() for i in missing
        ):
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
