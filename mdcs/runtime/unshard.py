"""Whole units outside of the plan's messages: for evaluation, state dicts and readers of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mdcs.runtime.context import RunContext
from mdcs.runtime.executor import run_on_comm_stream
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.wire import Wire
from mdcs.torch_compat import without_autograd


class Unsharder:
    """Gathers and frees units. No message of the plan may be in flight; every rank must gather the same units."""

    def __init__(self, context: RunContext, wire: Wire) -> None:
        self.units, self.place, self._context, self._wire = wire.units, context.place, context, wire
        self._storages = wire.units.storages
        self._kept: set[int] = set()

    def _begin(self) -> None:
        """Keep the units that the plan has gathered by now: the next forward relies on them."""
        self._kept = {u for u, s in enumerate(self._storages) if s.strategy.sharded and s.is_full}

    def keep(self, units: Iterable[int]) -> None:
        """Free these units no more at the end of their use."""
        self._kept.update(units)

    def one_by_one(self, units: Iterable[int] | None = None) -> Iterator[UnitStorage]:
        """Gather each of these units (None: all) in turn, and free it before the next one."""
        self._begin()
        for u in range(len(self._storages)) if units is None else units:
            self.unshard(u)
            yield self._storages[u]
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
        storage = self._storages[unit]
        if storage.strategy.value != "dp":
            with without_autograd():
                self._wire.gather(unit)
        storage.guard.open()

    def reshard(self, unit: int) -> None:
        """Free the memory that :meth:`unshard` took; close the parameters unless they are all there is of the unit."""
        storage = self._storages[unit]
        if unit not in self._kept:
            self.units.free(unit)
        if not storage.is_open_between_steps:
            storage.guard.close()

    def gather_by_parameter(self, unit: int, blocks: dict[int, Tensor], what: str = "gradient") -> dict[str, Tensor]:
        """Return whole tensors by parameter name, gathered as by :meth:`gather_flat`."""
        wholes, storage = self.gather_flat(unit, blocks, what), self._storages[unit]
        return {name: place.view(wholes).clone() for name, place in zip(storage.names, storage.places, strict=True)}

    def gather_flat(self, unit: int, blocks: dict[int, Tensor], what: str) -> list[Tensor]:
        """Return whole flat tensors by section, gathered from this rank's part of each block.

        ``blocks``: block -> this rank's part, flat [elements of the block / parts].
        """
        storage = self._storages[unit]
        dtypes = {storage.sections[b]: part.dtype for b, part in blocks.items()}
        wholes = [torch.zeros(n, dtype=dtypes[s], device=storage.device) for s, n in enumerate(storage.layout.sizes)]
        for b, part in blocks.items():
            wholes[storage.sections[b]][storage.owned_slice(b)] = part
        if storage.strategy.value != "dp":
            with run_on_comm_stream(self._context.executor), self._context.during(f"gather of {storage.name}'s {what}"):
                self._context.executor.wait_works(self._wire.messages.unshard_flat(unit, wholes))
        return wholes

    def fits(self, size: int) -> bool:
        """Return whether ``size`` bytes fit beside the reserved bytes."""
        with self._wire.lock:
            return self._wire.queue.admission.fits(size)
