"""Facts about an optimizer: which parameters share its options, and the bytes that its updates hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.sizes import aligned


def parameter_groups(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """Return parameter -> index of its group in ``optimizer.param_groups``."""
    return {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


class Segment(NamedTuple):
    """Neighbours in a unit's flat order with one type and one parameter group (0 for frozen parameters).

    - ``numel``: elements, each parameter with its padding (:func:`mdcs.sizes.aligned`).
    - ``packed``: elements without padding.
    """

    numel: int
    packed: int
    dtype: torch.dtype
    group: int


def in_flat_order(
    unit: ModelUnit, groups: dict[nn.Parameter, int]
) -> tuple[list[tuple[str, nn.Parameter]], tuple[Segment, ...]]:
    """Return the unit's (name, parameter) pairs in flat order, and the segments that they form.

    Parameters are sorted by type, then by parameter group. Types keep the order of the unit's parameters; frozen
    parameters keep the order of registration. Raises UnsupportedModel for a trainable parameter that the optimizer does
    not have.
    """
    types = list(dict.fromkeys(p.dtype for _, p in unit.parameters))
    keyed = []
    for name, p in unit.parameters:
        if unit.trainable and p not in groups:
            raise UnsupportedModel(f"{name}: is trainable but not in the optimizer")
        keyed.append(((types.index(p.dtype), groups[p] if unit.trainable else 0), (name, p)))
    keyed.sort(key=lambda item: item[0])
    segments = []
    for (t, group), members in itertools.groupby(keyed, key=lambda item: item[0]):
        sizes = [p.numel() for _, (_, p) in members]
        segments.append(Segment(sum(map(aligned, sizes)), sum(sizes), types[t], group))
    return [pair for _, pair in keyed], tuple(segments)


def same_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class for another parameter, with the options of one of its groups."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}
    made: torch.optim.Optimizer = type(optimizer)([{**options, "params": [parameter]}])  # type: ignore[call-arg]  # has defaults
    return made


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Return (state tensors, fixed state bytes, scratch tensors) per run; scratch is an estimate for unmeasured
    updates.

    A state or scratch tensor is as large as the run that is updated. SGD has one state tensor with momentum. Adam and
    AdamW have two moments, a third with amsgrad, and 4 bytes of step counter. Fused updates need no scratch. Raises
    UnsupportedModel for an optimizer that cannot run on shards.
    """
    algorithm = type(optimizer)
    if algorithm not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedModel(
            f"optimizer {algorithm.__name__}: only SGD, Adam and AdamW of torch.optim are supported (elementwise updates)"
        )
    groups = optimizer.param_groups
    fused = any(g.get("fused") for g in groups)
    decayed = any(g.get("weight_decay") for g in groups)
    if algorithm is torch.optim.SGD:
        momentum = any(g["momentum"] for g in groups)
        nesterov = any(g["nesterov"] for g in groups)
        state, fixed, scratch = int(momentum), 0, int(decayed) + int(nesterov)
    else:
        state, fixed = 2 + int(any(g["amsgrad"] for g in groups)), 4
        scratch = 2 + int(decayed and algorithm is torch.optim.Adam)
    return state, fixed, 0 if fused else scratch
