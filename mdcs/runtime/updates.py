"""The optimizer on shards: one torch.optim instance per block, so that a block is updated as soon as it is reduced.

A block's run (:func:`mdcs.plan.ledger.runs`) is a view of the rank's parameters with one parameter group's options.
Elementwise optimizers give the same bits on any cut.

An instance's first step makes its state. What Adam and AdamW do after that is torch's function of their names, called
here without the instance, which costs more than the update of a small block. A fused one, which has no scratch, updates
all blocks of a message at once, and is called as the kernel that it is.
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
"""Options of Adam and AdamW that their fused kernel takes by the same names, and those that only their function does."""
_WITH_FUNCTION = (torch.optim.Adam, torch.optim.AdamW)
_FUNCTIONS: dict[bool, Callable[..., object]] = {False: adam, True: adamw}
_KERNELS: dict[bool, Callable[..., object]] = {False: torch._fused_adam_, True: torch._fused_adamw_}
"""By whether weight decay is decoupled. A kernel leaves counting steps to its caller."""

Part = tuple[int, int]
"""A unit, and a block of it."""


class _Run(NamedTuple):
    """One that has state, and this update's gradient of it."""

    group: int
    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class Updates:
    """``group_of[unit]`` maps a unit's segments to the optimizer's parameter groups."""

    def __init__(
        self, plan: Plan, storages: list[UnitStorage], optimizer: torch.optim.Optimizer,
        group_of: list[list[int]], rank: int, meter: Meter,
    ) -> None:  # fmt: skip
        self.optimizer, self.storages, self.meter = optimizer, storages, meter
        self.blocks: dict[Part, tuple[torch.optim.Optimizer, list[slice]]] = {}
        self._has_function = type(optimizer) in _WITH_FUNCTION
        self._tagged: set[Part] = set()  # blocks whose state is counted as the optimizer's
        self.kept: dict[int, dict[int, Tensor]] = {}  # of units that are watched: what their blocks were last updated with
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
        """Of a parameter group; tensors are copied, for schedules change them in place."""
        group = self.optimizer.param_groups[index]
        return {
            k: v.detach().clone() if isinstance(v, Tensor) else v
            for k, v in group.items()
            if k not in ("params", "param_names")
        }

    def snapshot(self) -> None:
        """Fix learning rate and other options for the updates of this iteration (schedules change them later)."""
        self._now = [self._options(i) for i in range(len(self.optimizer.param_groups))]
        # A tensor's version tells of changes without waiting for its device.
        self._versions = [_versions(group) for group in self.optimizer.param_groups]

    def changed_option(self) -> tuple[int, str] | None:
        """A parameter group, and the option that has changed in it since the snapshot."""
        for i, (now, versions) in enumerate(zip(self._now, self._versions, strict=True)):
            group = self.optimizer.param_groups[i]
            if versions != _versions(group):
                return i, next(iter(dict(versions.items() ^ _versions(group).items())))
            for name, value in now.items():
                if not isinstance(value, Tensor) and group.get(name) != value:
                    return i, name
        return None

    def step(self, gradients: Mapping[Part, Tensor], scale: float | Tensor | None = None) -> None:
        """Update blocks with ``scale`` (None: 1) times this rank's reduced gradients of them, flat, as long as its parts.

        Gradients are scaled in place, unless the optimizer updates a copy in another precision.
        """
        with _nothing_compiles(), self.meter.tag("update_scratch"):
            together: list[_Run] = []
            for part, gradient in gradients.items():
                if part not in self.blocks:
                    continue
                optimizer, places = self.blocks[part]
                like = optimizer.param_groups[0]["params"][0]
                whole = gradient.dtype == like.dtype  # no copy that would have to go before the next one is made
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
            if self.storages[unit].strategy is Strategy.dp:  # of the others their gather does it
                self.storages[unit].place_own(block)

    def _apply(self, runs: Sequence[_Run]) -> None:
        """The optimizer's function, once per parameter group and type."""
        for index, dtype in dict.fromkeys((run.group, run.parameter.dtype) for run in runs):
            own = [run for run in runs if run.group == index and run.parameter.dtype == dtype]
            _call(type(self.optimizer), self._now[index], own)

    def _whole_step(self, part: Part, gradient: Tensor) -> None:
        """The step of the block's optimizer: the first makes its state."""
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
    """What takes the place of ``optimizer.step()`` once its one parameter has state and a gradient: what is to be timed."""
    (group,) = optimizer.param_groups
    (p,) = group["params"]
    if type(optimizer) not in _WITH_FUNCTION:
        return optimizer.step
    return lambda: _call(type(optimizer), group, [_Run(0, p, p.grad, optimizer.state[p])])


def _call(algorithm: type[torch.optim.Optimizer], options: Mapping[str, Any], runs: Sequence[_Run]) -> None:
    """The function of Adam or AdamW, or its kernel, on runs of one parameter group and type."""
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
        # What the function comes to: its checks and its sorting of tensors take longer than a small block.
        functions = _KERNELS
        torch._foreach_add_(steps, 1)
    else:
        named |= {name: options[name] for name in _OF_FUNCTION}
    functions[is_decoupled](*tensors, **named, **{name: options[name] for name in _OF_KERNEL})


def _nothing_compiles() -> contextlib.AbstractContextManager[Any]:
    """While a model is compiled in one thread, torch's optimizers round otherwise in all of them: its flag is the process's."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return contextlib.nullcontext() if compiler is None else compiler.compile_lock


def _versions(group: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {k: (id(v), v._version) for k, v in group.items() if isinstance(v, Tensor)}
