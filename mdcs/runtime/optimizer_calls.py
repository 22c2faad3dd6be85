"""The loop's own optimizer drives the run: its calls do what they do in a plain loop."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from mdcs.runtime.errors import RunError
from mdcs.torch_compat import count_as_scheduled


class Run(Protocol):
    """Does what the calls ask for."""

    def step(self) -> None:
        """End an iteration."""

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the state dict of a plain loop."""
        ...

    def load_optimizer_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the state dict of a plain loop."""


class OptimizerCalls:
    """Redirects ``step``, ``state_dict`` and ``load_state_dict`` of one optimizer to ``run`` until :meth:`end`.

    All ranks must make each of these calls. The other members, such as ``param_groups``, are the optimizer's own, so
    schedules of the learning rate work, whether they are made before or after.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        self._optimizer = optimizer
        weak = weakref.ref(run)  # the optimizer must not keep a run alive that the loop has dropped

        def running() -> Run:
            found = weak()
            if found is None:
                raise RunError("the optimizer's run is gone: keep the result of parallelize() while you train")
            return found

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            running().step()
            return loss

        def state_dict(_: torch.optim.Optimizer) -> dict[str, Any]:
            return running().optimizer_state_dict()

        def load_state_dict(_: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
            running().load_optimizer_state_dict(state_dict)

        count_as_scheduled(step)
        calls: dict[str, Callable[..., Any]] = {"step": step, "state_dict": state_dict, "load_state_dict": load_state_dict}
        self._before = {name: vars(optimizer).get(name) for name in calls}  # a schedule's, or an outer run's
        for name, call in calls.items():
            setattr(optimizer, name, types.MethodType(call, optimizer))

    def end(self) -> None:
        """Give the optimizer its own calls back."""
        for name, before in self._before.items():
            if before is not None:
                setattr(self._optimizer, name, before)
            else:
                vars(self._optimizer).pop(name, None)
