"""The units of a run. All memory of full parameters and gradients is given and taken here, and booked with it.

A sharded unit's full parameters come with the plan's first gather of it, and go at the end of the slot that the plan
says. A unit is *outside* of the plan while its full parameters are held although the plan has freed them: it was
used again, or may be (:mod:`mdcs.runtime.departures`). Gradients come with the unit's first backward slot, or before it
with the first gradient, and go with the message that has reduced them. Buffers of messages are in
:mod:`mdcs.runtime.messages`.
"""

from __future__ import annotations

from mdcs.runtime.context import RunContext
from mdcs.runtime.storage import UnitStorage

Gradients = tuple[tuple[int, int], ...]
"""(unit, bytes of its full gradients) pairs."""


class Units:
    """``storages``: by unit. ``outside``: units that are whole outside of the plan. Any thread may call any method."""

    def __init__(self, context: RunContext, storages: list[UnitStorage]) -> None:
        self.storages, self._account = storages, context.account
        self.outside: set[int] = set()

    # -- full parameters ------------------------------------------------------------------------------------------

    def allocate(self, unit: int) -> None:
        """Allocate the full parameters, if they have no memory. Their values are undefined."""
        storage = self.storages[unit]
        with self._account.lock:
            if not storage.is_full:
                storage.allocate_full()
                self._account.record("full_parameters", storage.full_bytes)

    def free(self, unit: int) -> None:
        """Free the full parameters of a sharded unit, if they have memory: after a failed allocation they have none."""
        storage = self.storages[unit]
        with self._account.lock:
            if storage.is_full:
                storage.free_full()
                self._account.record("full_parameters", -storage.full_bytes)

    def begin_gather(self, unit: int) -> None:
        """Allocate for the plan's gather. Of a unit that is outside it writes the same values, and the bytes are the
        plan's."""
        with self._account.lock:
            if unit in self.outside:
                self.outside.remove(unit)
                return
            self.storages[unit].allocate_full()
            self._account.record("full_parameters", self.storages[unit].full_bytes)

    def take_outside(self, unit: int) -> None:
        """Hold full parameters outside of the plan from now on; allocate them if the plan does not hold them."""
        with self._account.lock:
            self.allocate(unit)
            self.outside.add(unit)

    def free_outside(self) -> None:
        """Free and close the units that are outside of the plan."""
        with self._account.lock:
            for unit in self.outside:
                self.free(unit)
                self.storages[unit].guard.close()
            self.outside.clear()

    @property
    def outside_bytes(self) -> int:
        """Bytes held outside of the plan."""
        return sum([self.storages[u].full_bytes for u in self.outside]) if self.outside else 0

    # -- gradients ------------------------------------------------------------------------------------------------

    def allocate_gradient(self, unit: int) -> None:
        """Allocate the full gradient, if it has no memory; only the padding is set."""
        storage = self.storages[unit]
        with self._account.lock:
            if storage.gradient is None:
                storage.allocate_gradient()
                self._account.record("gradients", storage.layout.grad_bytes)

    def free_gradients(self, gradients: Gradients) -> None:
        """Free full gradients that are reduced."""
        if gradients:
            with self._account.lock:
                for unit, size in gradients:
                    self.storages[unit].free_gradient()
                    self._account.record("gradients", -size)

    # -- the whole iteration --------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Free what an iteration holds, with nothing in flight: only the parts at rest stay."""
        with self._account.lock:
            self.outside.clear()
            for storage in self.storages:
                storage.reset_iteration()
            self._account.restart()
