"""A run that ends between two steps gives its units to the next one, one by one: none but the one that moves is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mdcs.runtime.optimizer_state import OptimizerState
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.unshard import Unsharder


class Handover:
    """Parameters and optimizer state of a run without hooks, with nothing in flight.

    ``end``: ends that run for good; ``failed=True`` without the other ranks.
    """

    def __init__(
        self, storages: Sequence[UnitStorage], unsharder: Unsharder, state: OptimizerState, end: Callable[..., None]
    ) -> None:
        self._storages, self._unsharder, self._state, self._end = storages, unsharder, state, end
        self._started = state.started()
        for storage in storages:
            storage.guard.open()

    def end(self) -> None:
        """End the run, whose units the next one has. Collective."""
        self._end("a new plan has them")

    def fail(self) -> None:
        """End the run where the next one could not be made: some of its units are in pieces, and some are gone."""
        for storage in self._storages:
            storage.guard.close()
        self._end("planning anew failed", failed=True)

    def give_state(self, to: OptimizerState) -> None:
        """Give the optimizer's state to the next run, which has the parameters. Collective."""
        to.take_over(self._state, self._started)

    @contextmanager
    def whole(self, unit: int) -> Iterator[None]:
        """Hold a unit whole, for the last time: its parameters must have other memory at the end. Collective."""
        self._unsharder.unshard(unit)
        yield
        self._storages[unit].release()
