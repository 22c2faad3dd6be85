"""The optimizer on shards, run by run, so that a block is updated as soon as it is reduced.

A run (:func:`mdcs.plan.runs.runs`) is a view of the rank's part of a block, with one parameter group's options. It is
updated as one tensor by torch's functional ``sgd``, ``adam`` or ``adamw``. Elementwise optimizers give the same bits
on any cut. State is made before the first step: later it would lie between buffers that come and go.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mdcs.measure.memory import Meter
from mdcs.plan.messages import Plan
from mdcs.plan.runs import runs
from mdcs.plan.strategy import Strategy
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import nothing_compiles, version_of

_OF_SGD = ("lr", "weight_decay", "momentum", "nesterov", "maximize", "foreach", "fused")
_OF_ADAM = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Options that torch's functions take by the same names."""

Part = tuple[int, int]
"""(unit, block)."""


class Run:
    """A piece of a block that is updated as one tensor.

    - ``group``: index of its parameter group in the optimizer.
    - ``place``: its slice in this rank's part of the block.
    - ``parameter``: what is updated [elements of the run].
    - ``state``: as in ``optimizer.state[parameter]``. Empty until it is made.
    - ``started``: whether the state comes from an update; if not, it is not saved.
    """

    __slots__ = ("group", "parameter", "place", "started", "state")

    def __init__(self, group: int, place: slice, parameter: Tensor) -> None:
        self.group, self.place, self.parameter = group, place, parameter
        self.clear()

    def clear(self) -> None:
        """Drop the state."""
        self.state: dict[str, Any] = {}
        self.started = False

    @property
    def saved(self) -> Mapping[str, Any]:
        """The state after the first update; empty before."""
        return {key: value for key, value in self.state.items() if value is not None} if self.started else {}

    def restore(self, key: str, value: Any) -> None:
        """Set a part of saved state."""
        if not self.started:
            self.clear()
        self.state[key], self.started = value, True


class Updates:
    """Updates the blocks of all units. ``group_of[unit]``: the optimizer's parameter group of each segment.

    ``runs``: the runs of each (unit, block) that this rank updates.
    """

    def __init__(
        self, plan: Plan, storages: list[UnitStorage], optimizer: torch.optim.Optimizer,
        group_of: list[list[int]], rank: int, meter: Meter,
    ) -> None:  # fmt: skip
        self.optimizer, self.storages, self.meter = optimizer, storages, meter
        self._algorithm = type(optimizer)
        self.runs: dict[Part, list[Run]] = {}
        self.kept: dict[int, dict[int, Tensor]] = {}  # watched unit -> {block: gradient of its last update}
        for u, storage in enumerate(storages):
            for b in range(len(storage.blocks) if storage.trainable else 0):
                pieces, local = runs(plan, u, b, rank), storage.at_rest(b)
                places = [slice(begin - pieces[0][0], begin - pieces[0][0] + length) for begin, length, _ in pieces]
                self.runs[u, b] = [
                    Run(group_of[u][segment], place, local[place]) for (*_, segment), place in zip(pieces, places, strict=True)
                ]
        self.groups = len(optimizer.param_groups)
        self.snapshot()

    def make_state(self) -> None:
        """Make the state of all runs that have none."""
        for run in itertools.chain.from_iterable(self.runs.values()):
            if not run.state:
                with self.meter.tag("optimizer"):
                    run.state = _new_state(self._algorithm, self._now[run.group], run.parameter)

    def _options(self, index: int) -> dict[str, Any]:
        """Return the options of a parameter group; tensors are copied, because schedules change them in place."""
        group = self.optimizer.param_groups[index]
        return {
            k: v.detach().clone() if isinstance(v, Tensor) else v
            for k, v in group.items()
            if k not in ("params", "param_names")
        }

    def snapshot(self) -> None:
        """Fix learning rate and other options for the updates of this iteration (schedules change them later)."""
        self._now = [self._options(i) for i in range(len(self.optimizer.param_groups))]
        # A tensor's version counter shows changes without a wait for its device.
        self._versions = [_versions(group) for group in self.optimizer.param_groups]

    def changed_option(self) -> tuple[int, str] | None:
        """Return (parameter group, name) of an option that changed since the snapshot; None if none did."""
        for i, (now, versions) in enumerate(zip(self._now, self._versions, strict=True)):
            group = self.optimizer.param_groups[i]
            if versions != _versions(group):
                return i, next(iter(dict(versions.items() ^ _versions(group).items())))
            for name, value in now.items():
                if not isinstance(value, Tensor) and group.get(name) != value:
                    return i, name
        return None

    def step(self, gradients: Mapping[Part, Tensor], scale: float | Tensor | None = None) -> None:
        """Update blocks with their reduced gradients times ``scale`` (None: 1).

        ``gradients``: (unit, block) -> this rank's part, flat [elements of the part]. They are scaled in place, unless
        the optimizer updates a copy in another precision.
        """
        together: dict[Any, list[tuple[Run, Tensor]]] = {}
        with nothing_compiles(), self.meter.tag("update_scratch"):
            for part, gradient in gradients.items():
                own = self.runs.get(part)
                if not own:
                    continue
                dtype = own[0].parameter.dtype
                is_copy = gradient.dtype != dtype
                gradient = gradient.to(dtype) if is_copy else gradient
                if scale is not None:
                    gradient.mul_(scale)
                if part[0] in self.kept:
                    self.kept[part[0]][part[1]] = gradient.clone()
                for run in own:
                    # Only fused updates of the gradient itself need no scratch: one call updates all runs of a message. Others
                    # go one by one, and no name holds a copy of a gradient while the next one is made.
                    if self._now[run.group].get("fused") and not is_copy:
                        together.setdefault((run.group, dtype, run.started), []).append((run, gradient[run.place]))
                    else:
                        _update(self._algorithm, self._now[run.group], [(run, gradient[run.place])])
            for (group, *_), updates in together.items():
                _update(self._algorithm, self._now[group], updates)
        for unit, block in gradients:
            if self.storages[unit].strategy is Strategy.dp:  # of other units the gather places it
                self.storages[unit].place_own(block)


def later_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return a call that updates as the runtime does, for timing. ``optimizer`` has one parameter, with a gradient."""
    (group,) = optimizer.param_groups
    (p,) = group["params"]
    run = Run(0, slice(None), p)
    run.state = _new_state(type(optimizer), group, p)
    return lambda: _update(type(optimizer), group, [(run, p.grad)])


def _new_state(algorithm: type[torch.optim.Optimizer], options: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """Return the state that torch's optimizer makes for a parameter in its first step."""
    if algorithm is torch.optim.SGD:
        # torch copies the first gradient. -0.0 + gradient has the same bits, for -0.0 and NaN, too.
        return {"momentum_buffer": torch.full_like(p, -0.0)} if options["momentum"] else {}
    is_read_by_kernel = options["capturable"] or options["fused"]
    exact = torch.get_default_dtype() is torch.float64 and not options["fused"]
    dtype = torch.float64 if exact else torch.float32
    # As torch makes it: a step that no kernel reads is a number of the host's, which reading does not wait for the device.
    step = torch.zeros((), dtype=dtype, device=p.device) if is_read_by_kernel else torch.tensor(0.0, dtype=dtype)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options["amsgrad"] else ("exp_avg", "exp_avg_sq")
    return {"step": step, **{name: torch.zeros_like(p) for name in names}}


def _update(
    algorithm: type[torch.optim.Optimizer], options: Mapping[str, Any], updates: Sequence[tuple[Run, Tensor]]
) -> None:
    """Call torch's function on (run, gradient) pairs of one parameter group and type, all started or none."""
    tensors = [run.parameter for run, _ in updates], [gradient for _, gradient in updates]
    states = [run.state for run, _ in updates]
    if algorithm is torch.optim.SGD:
        momenta = [state.get("momentum_buffer") for state in states]
        dampening = options["dampening"] if updates[0][0].started else 0.0  # torch does not dampen the first gradient
        sgd(*tensors, momenta, dampening=dampening, **{name: options[name] for name in _OF_SGD})
        for state, momentum in zip(states, momenta, strict=True):
            if momentum is not None:  # else made here: momentum was 0 when the state was made
                state["momentum_buffer"] = momentum
    else:
        function = adamw if options.get("decoupled_weight_decay", algorithm is torch.optim.AdamW) else adam
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


def _versions(group: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {k: (id(v), version_of(v)) for k, v in group.items() if isinstance(v, Tensor)}
