"""Whole units outside of the plan's messages: for state dicts, readers of parameters, and passes that no plan has.

In evaluations and side passes units are whole for any number of forward and backward passes per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mdcs.model.module_hooks import ModuleHook
from mdcs.model.units import ModelUnit
from mdcs.runtime.context import RunContext, named_range
from mdcs.runtime.executor import run_on_comm_stream
from mdcs.runtime.process_groups import ProcessGroups
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.wire import Wire
from mdcs.torch_compat import without_autograd

_NONE = -1  # no unit's number


class Unsharder:
    """Gathers and frees units. No message of the plan may be in flight; every rank must gather the same units."""

    def __init__(self, context: RunContext, wire: Wire) -> None:
        self.storages, self.place, self._context, self._wire = wire.storages, context.place, context, wire
        self._kept: set[int] = set()

    def _begin(self) -> None:
        """Keep the units that the plan has gathered by now: the next forward relies on them."""
        self._kept = {u for u, s in enumerate(self.storages) if s.strategy.sharded and s.is_full}

    def keep(self, units: Iterable[int]) -> None:
        """Free these units no more at the end of their use."""
        self._kept.update(units)

    def one_by_one(self, units: Iterable[int] | None = None) -> Iterator[UnitStorage]:
        """Gather each of these units (None: all) in turn, and free it before the next one."""
        self._begin()
        for u in range(len(self.storages)) if units is None else units:
            self.unshard(u)
            yield self.storages[u]
            self.reshard(u)

    @contextmanager
    def unsharded(self, units: Iterable[int]) -> Iterator[None]:
        """Gather these units, and free them at the end, after an error too."""
        self._begin()
        taken = []
        try:
            for u in units:
                taken.append(u)
                self.unshard(u)
            yield
        finally:
            for u in taken:
                self.reshard(u)

    def unshard(self, unit: int) -> None:
        """Make the unit whole and up to date, and open its parameters."""
        storage = self.storages[unit]
        if storage.strategy.value != "dp":
            with without_autograd():
                self._wire.gather(unit)
        storage.guard.open()

    def reshard(self, unit: int) -> None:
        """Free the memory that :meth:`unshard` took; close the parameters unless they are all there is of the unit."""
        storage = self.storages[unit]
        if storage.strategy.sharded and unit not in self._kept:
            storage.free()
        if not storage.is_open_between_steps:
            storage.guard.close()

    def gather_by_parameter(self, unit: int, blocks: dict[int, Tensor], what: str = "gradient") -> dict[str, Tensor]:
        """Return whole tensors [shape of the parameter] by its name, gathered as by :meth:`gather_flat`."""
        whole, storage = self.gather_flat(unit, blocks, what), self.storages[unit]
        return {name: place.view(whole).clone() for name, place in zip(storage.names, storage.places, strict=True)}

    def gather_flat(self, unit: int, blocks: dict[int, Tensor], what: str) -> Tensor:
        """Return a whole flat tensor, gathered from this rank's part of each block.

        ``blocks``: block -> this rank's part, flat [elements of the block / parts]. All are of one type.
        """
        storage = self.storages[unit]
        whole = torch.zeros(storage.layout.elements, dtype=next(iter(blocks.values())).dtype, device=storage.device)
        for b, part in blocks.items():
            whole[storage.owned_slice(b)] = part
        if storage.strategy.value != "dp":
            with run_on_comm_stream(self._context.executor), self._context.during(f"gather of {storage.name}'s {what}"):
                self._context.executor.wait_works(self._wire.messages.unshard_flat(unit, whole))
        return whole

    def fits(self, size: int) -> bool:
        """Return whether ``size`` bytes fit beside the reserved bytes."""
        with self._wire.lock:
            return self._wire.queue.admission.fits(size)


class Evaluation:
    """Gathers units that are sharded at rest: once if the budget has room for all of them, else for each forward.

    A unit whose memory other modules use through views is always gathered once. If units are gathered for each forward,
    a rank that has finished its batches joins the gathers of the other ranks. No message of the plan may be in flight.
    """

    def __init__(
        self, context: RunContext, units: Sequence[ModelUnit], unsharder: Unsharder, groups: ProcessGroups
    ) -> None:
        self._units, self._storages, self._unsharder, self._groups = units, unsharder.storages, unsharder, groups
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
                # units still in use: their forward raised
                for u in (u for u, uses in self._in_use.items() if uses > 0):
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
                u
                for (u,) in self._groups.agree_on_call("a forward pass in evaluate()", _NONE if unit is None else unit)
            } - {_NONE}
        if len(wanted) > 1:
            parts = " and ".join(self._units[u].name for u in sorted(wanted))
            raise self._place.error(
                f"ranks evaluate different parts of the model: {parts}. Run the same layers on every rank"
            )
        return wanted.pop() if wanted else None
