"""Passes outside of the plan: whole units for any number of forward and backward passes per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mdcs.model.hooks import ModuleHook
from mdcs.model.units import ModelUnit
from mdcs.runtime.context import RunContext, named_range
from mdcs.runtime.process_groups import ProcessGroups
from mdcs.runtime.unshard import Unsharder

_NONE = -1  # no unit's number


class Evaluation:
    """Gathers units that are sharded at rest: once if the budget has room for all of them, else for each forward.

    A unit whose memory other modules use through views is always gathered once. If units are gathered for each forward,
    a rank that has finished its batches joins the gathers of the other ranks. No message of the plan may be in flight.
    """

    def __init__(
        self, context: RunContext, units: Sequence[ModelUnit], unsharder: Unsharder, groups: ProcessGroups
    ) -> None:
        self._units, self._storages, self._unsharder, self._groups = units, unsharder.units.storages, unsharder, groups
        self._place = context.place
        self._slot_bytes = max(slot.peak for slot in context.ledger.slots)
        self._on_demand: set[int] = set()
        self._in_use: Counter[int] = Counter()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Let forward passes of the model run inside the block. Collective."""
        handles: list[Any] = []
        with self.unsharded():
            try:
                for u in self._on_demand:
                    for module in self._units[u].modules:
                        handles.append(module.register_forward_pre_hook(ModuleHook(self._before(u)), prepend=True))
                        handles.append(module.register_forward_hook(ModuleHook(self._after(u))))
                yield
            finally:
                for handle in handles:
                    handle.remove()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Have units whole inside the block, or those that are in use (:meth:`enter`). Collective."""
        missing = sum(s.full_bytes for s in self._storages if s.strategy.sharded and not s.is_full)
        at_once = self._unsharder.fits(missing + self._slot_bytes)
        before = [u for u, s in enumerate(self._storages) if at_once or s.is_aliased or not s.strategy.sharded]
        self._on_demand = set(range(len(self._storages))) - set(before)
        with named_range("evaluation"), self._unsharder.unsharded(before):
            try:
                yield
                if not at_once:
                    self._join()
            finally:
                for u in (u for u, uses in self._in_use.items() if uses > 0):  # units still in use: their forward raised
                    self._unsharder.reshard(u)
                self._in_use.clear()

    def enter(self, unit: int) -> None:
        """Begin a use of a unit. All ranks gather it now, if it is not whole."""
        if unit in self._on_demand:
            self._in_use[unit] += 1
            if self._in_use[unit] == 1:
                self._agree(unit)
                self._unsharder.unshard(unit)

    def leave(self, unit: int) -> None:
        """End a use of a unit."""
        if unit in self._on_demand:
            self._in_use[unit] -= 1
            if self._in_use[unit] == 0:
                self._unsharder.reshard(unit)

    def keep(self) -> list[int]:
        """Leave the sharded units that are whole to the caller, at the end of the block. Return them."""
        whole = [u for u, s in enumerate(self._storages) if s.strategy.sharded and s.is_full]
        self._unsharder.keep(whole)
        return whole

    def _before(self, unit: int) -> Any:
        return lambda module, args: self.enter(unit)

    def _after(self, unit: int) -> Any:
        return lambda module, args, output: self.leave(unit)

    def _join(self) -> None:
        """Take part in the gathers of other ranks until all have finished."""
        while (unit := self._agree(None)) is not None:
            self._unsharder.unshard(unit)
            self._unsharder.reshard(unit)

    def _agree(self, unit: int | None) -> int | None:
        """Return the unit that all ranks gather next; None when no rank needs one."""
        with self._place.during("evaluate()"):
            wanted = {
                u for (u,) in self._groups.agree_on_call("a forward pass in evaluate()", _NONE if unit is None else unit)
            } - {_NONE}
        if len(wanted) > 1:
            parts = " and ".join(self._units[u].name for u in sorted(wanted))
            raise self._place.error(f"ranks evaluate different parts of the model: {parts}. Run the same layers on every rank")
        return wanted.pop() if wanted else None
