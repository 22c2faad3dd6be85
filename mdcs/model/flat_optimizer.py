"""The class of an optimizer, stepped for one piece of the parameters after the other."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]


def options_of(group: Options) -> dict[str, Any]:
    """Return the options of a parameter group: what it has besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def same_options(
    optimizer: torch.optim.Optimizer, group: Options, *parameters: Tensor, beside: Sequence[Tensor] = ()
) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class for other parameters [any shapes] with the options of one of its groups,
    and the options that the class keeps as attributes. ``beside``: parameters of a second group.
    """
    options = {k: v for k, v in options_of(group).items() if k != "initial_lr"}
    attributes = {k: v for k, v in vars(optimizer).items() if is_plain(v)}
    accepted, known = inspect.signature(type(optimizer)).parameters, {**attributes, **optimizer.defaults, **options}
    required = [k for k, p in accepted.items() if p.default is p.empty and k in known]
    groups = [{**options, "params": list(members)} for members in (parameters, beside) if members]
    made: torch.optim.Optimizer = type(optimizer)(groups, **{k: known[k] for k in required})
    vars(made).update(attributes)
    made.defaults.update(optimizer.defaults)
    return made


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, or a tuple of them."""
    return isinstance(value, (int, float, str)) or isinstance(value, tuple) and all(map(is_plain, value))


class FlatOptimizer:
    """The class of an optimizer on flat tensors, each of which brings its options and its state.

    ``counts``: each step finds the numbers of ``optimizer``'s object, and does not move them on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, counts: bool = False) -> None:
        self._like, self._counts = optimizer, counts
        self._made: torch.optim.Optimizer | None = None

    def first_state(self, options: Options, tensor: Tensor) -> dict[str, Any]:
        """Return the state that the class makes for a tensor [any shape] before its first step (Adagrad), if any."""
        return dict(same_options(self._like, options, tensor).state.get(tensor, {}))

    def step(self, options: Options, tensor: Tensor, gradient: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Update a tensor [any shape] in place with a gradient of its shape; return its state after the step."""
        if self._made is None:
            self._made = same_options(self._like, options, tensor)
        made = self._made
        if self._counts:
            vars(made).update(_counted(self._like))
            options = copy.deepcopy(options)  # counts may be tensors
        made.param_groups = [{**options, "params": [tensor]}]
        made.state = defaultdict(dict, {tensor: state} if state else {})
        tensor.grad = gradient
        try:
            made.step()
            return made.state[tensor]
        finally:
            tensor.grad = None
            made.param_groups, made.state = [], defaultdict(dict)  # keep neither memory nor gradients


class Counts:
    """Numbers that an optimizer counts in its groups or on its object. A plain loop's ``step()`` moves them on once.

    The runtime steps one piece after the other, each with the numbers that the iteration began with. Those after it are
    found by a step for all groups, on a tensor of a few elements each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        nothing = torch.zeros(1)  # for a group that is empty
        firsts = [next(iter(group["params"]), nothing) for group in optimizer.param_groups]
        self._small = [torch.zeros([min(side, 2) for side in p.shape], dtype=p.dtype, device=p.device) for p in firsts]
        self._made = same_options(optimizer, optimizer.param_groups[0], self._small[0])
        self._next: list[dict[str, Any]] = []

    @torch.no_grad()
    def look_ahead(self) -> None:
        """Find the numbers after the next step."""
        made, before = self._made, [*map(options_of, self._optimizer.param_groups)]
        made.param_groups = [
            {**copy.deepcopy(group), "params": [p]} for group, p in zip(before, self._small, strict=True)
        ]
        vars(made).update(_counted(self._optimizer))
        for p in self._small:
            p.grad = torch.ones_like(p)
        made.step()
        self._next = [
            {k: v for k, v in after.items() if k != "params" and repr(v) != repr(group.get(k))}
            for group, after in zip(before, made.param_groups, strict=True)
        ]

    def move_on(self) -> None:
        """Give the optimizer the numbers after the step."""
        for group, changed in zip(self._optimizer.param_groups, self._next, strict=True):
            group.update(changed)
        known = vars(self._optimizer)
        known.update({k: v for k, v in _counted(self._made).items() if [*_numbers(v)] != [*_numbers(known.get(k))]})


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the options of an optimizer's groups, and the numbers of its object, by name, in words."""
    groups = map(options_of, optimizer.param_groups)
    options = {f"{k} of its parameter groups": repr(v) for group in groups for k, v in group.items()}
    return options | {f"its attribute {name}": repr(number) for name, number in _numbers(vars(optimizer))}


def _counted(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the attributes that have numbers."""
    attributes = {k: v for k, v in vars(optimizer).items() if k not in _NO_NUMBERS}
    return {k: copy.deepcopy(v) for k, v in attributes.items() if next(_numbers(v), None) is not None}


_NO_NUMBERS = "param_groups", "state", "defaults"


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)) or isinstance(value, Tensor) and value.numel() == 1:
        yield name, float(value)
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in _NO_NUMBERS:
                yield from _numbers(item, f"{name}.{key}" if name else str(key))
