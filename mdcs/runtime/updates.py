"""The optimizer on shards: one torch.optim instance per block, so that a block is updated as soon as it is reduced.

A block's run (:func:`mdcs.plan.ledger.runs`) is a view of the rank's parameters with one parameter group's options.
Elementwise optimizers give the same bits on any cut.

The first step of an instance makes its state. Later updates of Adam and AdamW call torch's functional ``adam`` and
``adamw`` directly: the instance's overhead costs more than the update of a small block. A fused update needs no
scratch; it runs on all blocks of a message at once, by its kernel.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from mdcs.measure.memory import Meter
from mdcs.plan.ledger import runs
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy
from mdcs.runtime.storage import UnitStorage

_OF_KERNEL = ("weight_decay", "eps", "amsgrad", "maximize")
_OF_FUNCTION = ("foreach", "capturable", "differentiable", "fused")
"""Options that the fused kernels take by the same names (_OF_KERNEL), and options of the functions only (_OF_FUNCTION).
"""
_WITH_FUNCTION = (torch.optim.Adam, torch.optim.AdamW)
_FUNCTIONS: dict[bool, Callable[..., object]] = {False: adam, True: adamw}
_KERNELS: dict[bool, Callable[..., object]] = {False: torch._fused_adam_, True: torch._fused_adamw_}
"""Functions and kernels by whether weight decay is decoupled. A kernel leaves the step count to its caller."""

Part = tuple[int, int]
"""(unit, block)."""


class _Run(NamedTuple):
    """A run that has state, and its gradient in this update (flat, as long as the run)."""

    group: int
    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class Updates:
    """Updates the blocks of all units. ``group_of[unit]``: the optimizer's parameter group of each segment."""

    def __init__(
        self, plan: Plan, storages: list[UnitStorage], optimizer: torch.optim.Optimizer,
        group_of: list[list[int]], rank: int, meter: Meter,
    ) -> None:  # fmt: skip
        self.optimizer, self.storages, self.meter = optimizer, storages, meter
        self.blocks: dict[Part, tuple[torch.optim.Optimizer, list[slice]]] = {}
        self._has_function = type(optimizer) in _WITH_FUNCTION
        self._tagged: set[Part] = set()  # blocks whose state is counted as the optimizer's
        self.kept: dict[int, dict[int, Tensor]] = {}  # watched unit -> {block: gradient of its last update}
        for u, storage in enumerate(storages):
            if not storage.trainable:
                continue
            for b in range(len(storage.blocks)):
                pieces = runs(plan, u, b, rank)
                local, groups, slices = storage.at_rest(b), [], []
                start = pieces[0][0] if pieces else 0
                for begin, length, segment in pieces:
                    part = slice(begin - start, begin - start + length)
                    slices.append(part)
                    index = group_of[u][segment]
                    groups.append({**self._options(index), "params": [local[part]], "mdcs_group": index})
                if groups:
                    self.blocks[u, b] = (type(optimizer)(groups), slices)  # type: ignore[call-arg]  # all have defaults
        self.groups = len(optimizer.param_groups)
        self.snapshot()

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
        with _nothing_compiles(), self.meter.tag("update_scratch"):
            together: list[_Run] = []
            for part, gradient in gradients.items():
                if part not in self.blocks:
                    continue
                optimizer, places = self.blocks[part]
                like = optimizer.param_groups[0]["params"][0]
                whole = gradient.dtype == like.dtype  # else a converted copy: update at once, so that one copy exists at a time
                gradient = gradient if whole else gradient.to(like.dtype)
                if scale is not None:
                    gradient.mul_(scale)
                if part[0] in self.kept:
                    self.kept[part[0]][part[1]] = gradient.clone()
                if not self._has_function or len(optimizer.state) < len(places):
                    self._whole_step(part, gradient)
                    continue
                for group, place in zip(optimizer.param_groups, places, strict=True):
                    p = group["params"][0]
                    run = _Run(group["mdcs_group"], p, gradient[place], optimizer.state[p])
                    if whole and self._now[run.group]["fused"]:
                        together.append(run)
                    else:
                        self._apply([run])
            if together:
                self._apply(together)
        for unit, block in gradients:
            if self.storages[unit].strategy is Strategy.dp:  # of other units the gather places it
                self.storages[unit].place_own(block)

    def _apply(self, runs: Sequence[_Run]) -> None:
        """Call the optimizer's function once per parameter group and type."""
        for index, dtype in dict.fromkeys((run.group, run.parameter.dtype) for run in runs):
            own = [run for run in runs if run.group == index and run.parameter.dtype == dtype]
            _call(type(self.optimizer), self._now[index], own)

    def _whole_step(self, part: Part, gradient: Tensor) -> None:
        """Run the step of the block's own optimizer, which makes its state."""
        optimizer, slices = self.blocks[part]
        for group, place in zip(optimizer.param_groups, slices, strict=True):
            group.update(self._now[group["mdcs_group"]])
            group["params"][0].grad = gradient[place]
        optimizer.step()
        for group in optimizer.param_groups:
            group["params"][0].grad = None
        if part not in self._tagged:
            self._tagged.add(part)
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.meter.retag(value, "optimizer")


def later_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return a call that updates as the runtime does after the first step, for timing.

    ``optimizer`` has one parameter, with state and a gradient.
    """
    (group,) = optimizer.param_groups
    (p,) = group["params"]
    if type(optimizer) not in _WITH_FUNCTION:
        return optimizer.step
    return lambda: _call(type(optimizer), group, [_Run(0, p, p.grad, optimizer.state[p])])


def _call(algorithm: type[torch.optim.Optimizer], options: Mapping[str, Any], runs: Sequence[_Run]) -> None:
    """Call the function of Adam or AdamW, or its kernel, on runs of one parameter group and type."""
    tensors = (
        [run.parameter for run in runs],
        [run.gradient for run in runs],
        [run.state["exp_avg"] for run in runs],
        [run.state["exp_avg_sq"] for run in runs],
        [run.state["max_exp_avg_sq"] for run in runs] if options["amsgrad"] else [],
        steps := [run.state["step"] for run in runs],
    )
    is_decoupled = options.get("decoupled_weight_decay", algorithm is torch.optim.AdamW)
    named = {"lr": options["lr"], "beta1": options["betas"][0], "beta2": options["betas"][1]}
    functions = _FUNCTIONS
    if options["fused"] and not any(isinstance(rate, Tensor) for rate in named.values()):
        # The function would end in this kernel; its checks and grouping of tensors cost more than a small block.
        functions = _KERNELS
        torch._foreach_add_(steps, 1)
    else:
        named |= {name: options[name] for name in _OF_FUNCTION}
    functions[is_decoupled](*tensors, **named, **{name: options[name] for name in _OF_KERNEL})


def _nothing_compiles() -> contextlib.AbstractContextManager[Any]:
    """Hold off torch.compile: its process-wide flag makes torch's optimizers round differently in all threads."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return contextlib.nullcontext() if compiler is None else compiler.compile_lock


def _versions(group: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {k: (id(v), v._version) for k, v in group.items() if isinstance(v, Tensor)}
