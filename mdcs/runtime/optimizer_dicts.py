"""State dicts of the loop's optimizers: of all, and of each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mdcs.model.optimizers import parameters_of
from mdcs.runtime import optimizer_state
from mdcs.runtime.engine import Engine
from mdcs.torch_compat import without_autograd


class OptimizerDicts:
    """The part of :class:`mdcs.Parallel` that is about the optimizers' state."""

    _engine: Engine
    optimizers: tuple[torch.optim.Optimizer, ...]
    rank: int

    @without_autograd()
    def optimizer_state_dict(self, *, rank0_only: bool = False, cpu: bool = False) -> Any:
        """Return the ``optimizer.state_dict()`` of a plain loop, on every rank or on rank 0 (else empty); drains first.

        A list of them where there are several optimizers. Units are gathered one by one, and kept on the CPU with ``cpu``.
        State of masters has their precision. Collective.
        """
        self._engine.drain("optimizer_state_dict()", needs_ranks=True)
        keep = not rank0_only or self.rank == 0
        found = self._engine.optimizer_state.full(keep=keep, cpu=cpu)
        dicts = [optimizer_state.to_state_dict(optimizer, found) if keep else {} for optimizer in self.optimizers]
        return dicts if len(dicts) > 1 else dicts[0]

    @without_autograd()
    def load_optimizer_state_dict(self, saved: Any) -> None:
        """Load a plain loop's ``optimizer.state_dict()``, or :meth:`optimizer_state_dict` (the same on every rank).

        Options, such as the learning rate, are loaded too. Raises ValueError for the state of another optimizer.
        """
        self._engine.drain("load_optimizer_state_dict()")
        dicts = optimizer_state.as_list(saved)
        if len(dicts) != len(self.optimizers):
            raise ValueError(f"there are {len(self.optimizers)} optimizers, and {len(dicts)} state dicts: give one for each")
        self._load_state_dicts(list(zip(self.optimizers, dicts, strict=True)), {})

    def _load_state_dicts(
        self, given: list[tuple[torch.optim.Optimizer, Mapping[str, Any]]], others: Mapping[Any, Mapping[str, Any]]
    ) -> None:
        """Load options and state of these optimizers. ``others``: the state of the parameters of the other ones."""
        engine, found = self._engine, dict(others)
        for optimizer, saved in given:
            found |= optimizer_state.from_state_dict(optimizer, saved)
        named = [list(zip(s.names, s.parameters, strict=True)) for s in engine.storages]
        optimizer_state.histories(named, engine.updates.updates, found)
        for optimizer, saved in given:
            optimizer_state.load_options(optimizer.param_groups, saved)
        engine.optimizer_state.load(found)

    # Calls of one of the optimizers (:class:`mdcs.runtime.optimizer_calls.Run`).

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RunError if the optimizer's options have changed since the iteration's updates."""
        changed = self._engine.updates.changed_option(optimizer)
        if changed is not None:
            raise self._engine.place.error(
                f"{changed[1]} of {type(optimizer).__name__} was changed after the first optimizer's step(), which updates the "
                "parameters of all: change it before backward or after the last step()"
            )

    @without_autograd()
    def state_dict_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the ``state_dict()`` that this optimizer has in a plain loop; drains first. Collective."""
        self._engine.drain("optimizer_state_dict()", needs_ranks=True)
        found = self._engine.optimizer_state.full(keep=True, cpu=False, of=parameters_of(optimizer))
        return optimizer_state.to_state_dict(optimizer, found)

    @without_autograd()
    def load_state_dict_of(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Load a plain loop's ``state_dict()`` of this optimizer. Collective where there are several optimizers."""
        self._engine.drain("load_optimizer_state_dict()")
        others: Any = {}
        if len(self.optimizers) > 1:
            rest = {p for other in self.optimizers if other is not optimizer for p in parameters_of(other)}
            others = self._engine.optimizer_state.full(keep=True, cpu=True, of=rest)
        self._load_state_dicts([(optimizer, saved)], others)
