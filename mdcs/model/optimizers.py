"""The optimizers of a model: their parameters, how these are updated, and the order that this gives them in a unit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mdcs.model.elementwise import StateLayout, state_layouts
from mdcs.model.units import ModelUnit, UnsupportedModel, marked
from mdcs.sizes import aligned

NOT_TRAINED = -1
"""Parameter group of trainable parameters that no optimizer has: reduced, as by DDP, and never updated."""

GivenOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""The optimizer of a model, or several, each of which has some of the parameters."""


class Optimizers:
    """One or several optimizers. Their parameter groups are numbered through, in the order of the optimizers.

    Raises ValueError for none, and UnsupportedModel for a parameter that two of them have.
    """

    def __init__(self, given: GivenOptimizers) -> None:
        self.members = tuple(map(without_accelerate, given if isinstance(given, Sequence) else [given]))
        if not self.members:
            raise ValueError(
                "there must be an optimizer: parallelize(model, optimizer) or parallelize(model, [muon, adamw])"
            )
        owner: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for optimizer in self.members:
            for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if owner.setdefault(p, optimizer) is not optimizer:
                    raise UnsupportedModel(
                        f"parameter {number} of {type(optimizer).__name__}, of shape {tuple(p.shape)}: is in "
                        f"{type(owner[p]).__name__}, too: each parameter has one optimizer"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All parameter groups: those of the optimizers themselves."""
        return [group for optimizer in self.members for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """All state by parameter [in its shape where it is per element], in a new dictionary."""
        return {p: values for optimizer in self.members for p, values in optimizer.state.items()}

    def set_state(self, state: dict[Any, dict[str, Any]]) -> None:
        """Give each optimizer the state of its parameters."""
        for optimizer in self.members:
            members = parameters_of(optimizer)
            optimizer.state.update({p: values for p, values in state.items() if p in members})


class WithAverage(torch.optim.Optimizer):
    """Keeps a moving average (EMA) of the parameters as the optimizer's state ``average``, sharded as any state.

    Put it before the optimizer's own class: ``class AdamW(mdcs.WithAverage, torch.optim.AdamW): average_decay =
    0.9999``. The average is the parameter before its first step. After each step in which the parameter has a gradient
    the average moves by ``lerp_(parameter, 1 - average_decay)``, which may be an option of the groups.
    """

    average_decay = 0.999

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the optimizer, then move the averages."""
        groups = [
            (p, group.get("average_decay", self.average_decay)) for group in self.param_groups for p in group["params"]
        ]
        begun = {p: p.clone() for p, _ in groups if "average" not in self.state.get(p, ())}
        loss = super().step(closure)
        for p, decay in groups:
            if p.grad is not None:
                self.state[p].setdefault("average", begun.get(p)).lerp_(p, 1 - decay)
        return loss


class UpdatePart(NamedTuple):
    """Parameter ``groups`` of one optimizer that are updated in the same way, by their number among those of all
    optimizers, and the ``layout`` of their state.
    """

    optimizer: torch.optim.Optimizer
    groups: dict[int, dict[str, Any]]
    layout: StateLayout


class Updates:
    """Rules by which each parameter is updated. Raises UnsupportedModel for an optimizer that cannot run on shards.

    - ``parts``: the first is the first optimizer's. ``groups``: parameter -> number of its parameter group.
    - ``part_of``: number of a parameter group -> index of the part that updates it; one behind the last if none does.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizers, first = optimizers, 0
        parts = []
        for optimizer in optimizers.members:
            for members, layout in state_layouts(optimizer):
                parts.append(UpdatePart(optimizer, {first + i: optimizer.param_groups[i] for i in members}, layout))
            first += len(optimizer.param_groups)
        self.parts = tuple(parts)
        self.groups = {p: i for i, group in enumerate(optimizers.param_groups) for p in group["params"]}
        self.part_of = {group: i for i, part in enumerate(parts) for group in part.groups}
        # Parameters in no optimizer lie beside those of an elementwise one, if there is one.
        elementwise = [i for i, part in enumerate(parts) if not part.layout.whole]
        self.part_of[NOT_TRAINED] = elementwise[0] if elementwise else len(parts)

    def name_of(self, part: int) -> str:
        """Return the class of the optimizer of a part in words; with a number where several parts are of one class."""
        if part == len(self.parts):
            return "no optimizer"
        names = [type(each.optimizer).__name__ for each in self.parts]
        return names[part] if names.count(names[part]) == 1 else f"{names[part]} {names[: part + 1].count(names[part])}"

    def layout_of(self, p: Any) -> StateLayout:
        """Return the state that is kept for a parameter."""
        return self.parts[min(self.part_of[self.groups.get(p, NOT_TRAINED)], len(self.parts) - 1)].layout


def parameters_of(optimizer: torch.optim.Optimizer) -> set[Any]:
    """Return the parameters of one optimizer."""
    return {p for group in optimizer.param_groups for p in group["params"]}


class Segment(NamedTuple):
    """Neighbours in a unit's flat order with one parameter group (0 for frozen ones). ``numel``: with padding."""

    numel: int
    group: int


def in_flat_order(unit: ModelUnit, updates: Updates) -> tuple[list[tuple[str, nn.Parameter]], tuple[Segment, ...]]:
    """Return the unit's (name, parameter) pairs by parameter group, frozen ones as registered; and its segments."""
    def group_of(pair: tuple[str, nn.Parameter]) -> int:
        return updates.groups.get(pair[1], NOT_TRAINED) if unit.trainable else 0

    ordered = sorted(unit.parameters, key=group_of)
    groups = itertools.groupby(ordered, key=group_of)
    return ordered, tuple(Segment(sum(aligned(p.numel()) for _, p in members), group) for group, members in groups)


def by_optimizer(units: Sequence[ModelUnit], updates: Updates) -> list[ModelUnit]:
    """Return the units of :func:`mdcs.partition`, split where parameters are updated in several ways: a unit has one.
    The part with the most elements keeps the name. Units that are split already stay.
    """
    out = []
    for unit in units:
        alike: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, p in unit.parameters if unit.trainable else ():
            alike.setdefault(updates.part_of[updates.groups.get(p, NOT_TRAINED)], []).append((name, p))
        if len(alike) < 2:
            out.append(unit)
            continue
        name, _, marks = unit.name.partition("[")
        for i, part in enumerate(sorted(alike, key=lambda part: -sum(p.numel() for _, p in alike[part]))):
            brackets = [mark for mark in (marks.removesuffix("]"), updates.name_of(part) if i else "") if mark]
            out.append(dataclasses.replace(unit, name=name + marked(brackets), parameters=tuple(alike[part])))
    return out


# ---- wrappers that DistributedDataParallel and accelerate put around a model and its optimizer


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the module in DistributedDataParallel, which then only calls it. Raises ValueError for one inside."""
    plain = model
    if isinstance(model, DistributedDataParallel):
        plain = model.module
        model.reducer = model.logger = None  # type: ignore[assignment]  # its hooks and buckets go with it
        model.forward = plain.__call__  # type: ignore[method-assign]
    for name, module in plain.named_modules():
        if isinstance(module, DistributedDataParallel):
            where = f"model.{name}" if name else "the model"
            raise ValueError(f"{where} is in DistributedDataParallel, which mdcs replaces: leave that line out")
    return plain


def without_accelerate(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of accelerate's, whose ``step`` only calls it. Raises UnsupportedModel for another
    wrapper, whose own work in ``step`` would be left out, and for what changes parameters outside of ``step``.
    """
    attributes = getattr(optimizer, "__dict__", {}).values()
    inner = next((value for value in attributes if isinstance(value, torch.optim.Optimizer)), None)
    name = type(optimizer).__name__
    if inner is None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedModel(f"{name} is no torch.optim.Optimizer")
    if inner is not None and any(base.__module__.startswith("accelerate.") for base in type(optimizer).__mro__):
        return without_accelerate(inner)
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise UnsupportedModel(
            f"optimizer {name}: its train() and eval() change the parameters (schedule-free): stay with DDP"
        )
    if inner is not None:
        raise UnsupportedModel(
            f"optimizer {name}: wraps {type(inner).__name__}: give mdcs that one, and do what {name} adds after its "
            "step(), on every rank: with parallel.full_parameters(writeback=True): …"
        )
    return optimizer


class ParameterPlace(NamedTuple):
    """A parameter's ``numel`` elements from ``offset`` on in flat buffers; ``order``: dimensions by falling stride."""

    offset: int
    numel: int
    shape: torch.Size
    order: tuple[int, ...]

    def flattened(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as its elements lie in the flat buffers: a view, if it is dense."""
        return tensor.permute(self.order).reshape(-1)

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's part of a flat buffer, in its shape and strides."""
        return self.shaped(flat[self.offset : self.offset + self.numel])

    def shaped(self, flat: Tensor) -> Tensor:
        """Return the parameter's elements [flat] in its shape and strides."""
        if self.order == tuple(range(len(self.shape))):
            return flat.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dim] for dim in self.order]).permute(inverse)


def dense_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the largest stride to the smallest; in order if the tensor leaves gaps or overlaps."""
    strides, step = tensor.stride(), 1
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    for dim in reversed(order):
        if tensor.shape[dim] > 1:
            if strides[dim] != step:
                return tuple(range(tensor.dim()))
            step *= tensor.shape[dim]
    return order
