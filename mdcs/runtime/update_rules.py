"""How a run is updated: by torch's functional kernels for SGD, Adam and AdamW, by the optimizer's own class otherwise.

A run is a flat piece of parameters, or a whole one (:class:`mdcs.runtime.sharded_optimizer.UpdateRun`), with the state that
torch's optimizer would keep for it. A rule holds no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mdcs.model.elementwise import FUNCTIONAL, FlatOptimizer, StateLayout
from mdcs.telemetry.memory_meter import Meter

_OF_SGD = ("lr", "weight_decay", "momentum", "nesterov", "maximize", "foreach", "fused")
_OF_ADAM = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Options that torch's functions take by the same names."""

Options = Mapping[str, Any]


class Piece(Protocol):
    """A run to update: ``parameter`` [flat, or whole in its shape] with its ``state``.

    ``started``: whether the state comes from an update.
    """

    parameter: Tensor
    state: dict[str, Any]
    started: bool


class Rule(Protocol):
    """Updates runs of one parameter group and type. ``updates`` of one call are all started, or none is."""

    def reserve(self, options: Options, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a run before its first update: its bytes, if not its values."""

    def update(self, options: Options, updates: Sequence[tuple[Piece, Tensor]]) -> None:
        """Update (run, gradient) pairs in place."""


def rule_for(optimizer: torch.optim.Optimizer, layout: StateLayout, meter: Meter) -> Rule:
    """Return the rule of an optimizer that passed the trial (:func:`mdcs.model.elementwise.state_layouts`)."""
    return Functional(type(optimizer)) if type(optimizer) in FUNCTIONAL else OwnClass(optimizer, layout, meter)


class Functional:
    """torch's ``sgd``, ``adam`` or ``adamw``: half of the host's time of the class, and one call for several runs."""

    def __init__(self, algorithm: type[torch.optim.Optimizer]) -> None:
        self._algorithm = algorithm

    def reserve(self, options: Options, parameter: Tensor) -> dict[str, Any]:
        """Return the state that torch's optimizer makes for a parameter in its first step."""
        p = parameter
        if self._algorithm is torch.optim.SGD:
            # torch copies the first gradient. -0.0 + gradient has the same bits, for -0.0 and NaN, too.
            return {"momentum_buffer": torch.full_like(p, -0.0)} if options["momentum"] else {}
        is_read_by_kernel = options["capturable"] or options["fused"]
        exact = torch.get_default_dtype() is torch.float64 and not options["fused"]
        dtype = torch.float64 if exact else torch.float32
        # As torch makes it: a step that no kernel reads is a number of the host's, which reading does not wait for the device.
        step = torch.zeros((), dtype=dtype, device=p.device) if is_read_by_kernel else torch.tensor(0.0, dtype=dtype)
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options["amsgrad"] else ("exp_avg", "exp_avg_sq")
        return {"step": step, **{name: torch.zeros_like(p) for name in names}}

    def update(self, options: Options, updates: Sequence[tuple[Piece, Tensor]]) -> None:
        """Call torch's function once for all runs."""
        tensors = [run.parameter for run, _ in updates], [gradient for _, gradient in updates]
        states = [run.state for run, _ in updates]
        if self._algorithm is torch.optim.SGD:
            momenta = [state.get("momentum_buffer") for state in states]
            dampening = options["dampening"] if updates[0][0].started else 0.0  # torch does not dampen the first gradient
            sgd(*tensors, momenta, dampening=dampening, **{name: options[name] for name in _OF_SGD})
            for state, momentum in zip(states, momenta, strict=True):
                if momentum is not None:  # else made here: momentum was 0 when the state was made
                    state["momentum_buffer"] = momentum
        else:
            function = adamw if options.get("decoupled_weight_decay", self._algorithm is torch.optim.AdamW) else adam
            function(
                *tensors,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if options["amsgrad"] else [],
                [state["step"] for state in states],
                beta1=options["betas"][0],
                beta2=options["betas"][1],
                **{name: options[name] for name in _OF_ADAM},
            )
        for run, _ in updates:
            run.started = True


class OwnClass:
    """The optimizer's own class, run by run. It makes a run's state in its first step, as only the class knows how.

    Until then the bytes of the state are reserved: state that is made later would lie between buffers that come and go.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layout: StateLayout, meter: Meter) -> None:
        self._flat, self._layout, self._meter = FlatOptimizer(optimizer), layout, meter

    def reserve(self, options: Options, parameter: Tensor) -> dict[str, Any]:
        """Return memory for the state per element. Only the class knows the shapes of a whole parameter's state."""
        if self._layout.whole:
            return {}
        return {key: torch.empty_like(parameter, dtype=dtype) for key, dtype in self._layout.per_element.items()}

    def update(self, options: Options, updates: Sequence[tuple[Piece, Tensor]]) -> None:
        """Step the class for one run after the other."""
        for run, gradient in updates:
            known = [id(value) for value in run.state.values()] if run.started else []
            if not run.started:
                run.state = {}  # frees what was reserved
                run.state = self._flat.first_state(options, run.parameter)
            run.state = self._flat.step(options, run.parameter, gradient, run.state)
            run.started = True
            for value in run.state.values():
                if isinstance(value, Tensor) and id(value) not in known:
                    self._meter.retag(value, "optimizer")
