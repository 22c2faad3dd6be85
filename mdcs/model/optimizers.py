"""Which parameters share an optimizer's options."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import nn

from mdcs.model.units import ModelUnit
from mdcs.sizes import aligned


def parameter_groups(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """Return parameter -> index of its group in ``optimizer.param_groups``."""
    return {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


NOT_TRAINED = -1
"""Parameter group of trainable parameters that the optimizer does not have: reduced, as by DDP, and never updated."""


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
    parameters keep the order of registration.
    """
    types = list(dict.fromkeys(p.dtype for _, p in unit.parameters))
    keyed = []
    for name, p in unit.parameters:
        group = groups.get(p, NOT_TRAINED) if unit.trainable else 0
        keyed.append(((types.index(p.dtype), group), (name, p)))
    keyed.sort(key=lambda item: item[0])
    segments = []
    for (t, group), members in itertools.groupby(keyed, key=lambda item: item[0]):
        sizes = [p.numel() for _, (_, p) in members]
        segments.append(Segment(sum(map(aligned, sizes)), sum(sizes), types[t], group))
    return [pair for _, pair in keyed], tuple(segments)
