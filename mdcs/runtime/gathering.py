"""Whole units outside of the plan: for evaluation, state dicts and whoever looks at parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mdcs.runtime.account import Account
from mdcs.runtime.errors import Place
from mdcs.runtime.executor import Executor, between
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.wire import Wire


class Gathering:
    """Gathers units, and frees them. Nothing of the plan may be in flight; every rank must gather the same."""

    def __init__(
        self, storages: Sequence[UnitStorage], wire: Wire, account: Account, executor: Executor, place: Place
    ) -> None:
        self._storages, self._wire, self._account, self._executor = storages, wire, account, executor
        self._place = place
        self._kept: set[int] = set()

    def begin(self) -> None:
        """What the plan has gathered by now stays so: the next forward counts on it."""
        self._kept = {u for u, s in enumerate(self._storages) if s.strategy.sharded and s.is_full}

    def gather(self, unit: int) -> None:
        """Make the unit whole and up to date, for all to use."""
        storage = self._storages[unit]
        if storage.strategy.value != "dp":
            with torch.inference_mode(False), torch.no_grad():
                self.allocate(unit)
                with between(self._executor), self._place.during(f"gather of {storage.name}"):
                    self._executor.finish(self._wire.gather_now(unit))
        storage.guard.open()

    def allocate(self, unit: int) -> None:
        """Room for the whole unit, if there is none."""
        storage = self._storages[unit]
        if not storage.is_full:
            with self._account.lock:
                storage.allocate_full()
                self._account.book("full_parameters", storage.full_bytes)

    def free(self, unit: int) -> None:
        """Give back what :meth:`gather` took; parameters that are not all there is of the unit are closed again."""
        storage = self._storages[unit]
        if self.is_transient(unit):
            with self._account.lock:
                storage.free_full()
                self._account.book("full_parameters", -storage.full_bytes)
        if not storage.is_plain:
            storage.guard.close()

    def flat(self, unit: int, blocks: dict[int, Tensor], what: str = "gradient") -> Tensor:
        """A whole flat buffer of the unit's layout, from this rank's part of every one of its ``blocks``."""
        storage, first = self._storages[unit], next(iter(blocks.values()))
        whole = torch.zeros(storage.full.numel(), dtype=first.dtype, device=first.device)
        for b, part in blocks.items():
            whole[storage.own(b)] = part
        if storage.strategy.value != "dp":
            with between(self._executor), self._place.during(f"gather of {storage.name}'s {what}"):
                self._executor.finish(self._wire.gather_flat(unit, whole))
        return whole

    def is_transient(self, unit: int) -> bool:
        """Whether :meth:`free` will free the unit."""
        return self._storages[unit].strategy.sharded and unit not in self._kept

    def fits(self, size: int) -> bool:
        """Whether so many bytes fit beside what is held."""
        with self._account.lock:
            return self._account.fits(size, 0)
