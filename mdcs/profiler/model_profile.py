"""A profile of what was recorded of a model: slots and bytes, with the costs of its optimizers' updates and of copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from mdcs.model.optimizers import UpdatePart, Updates, in_flat_order
from mdcs.model.units import ModelUnit, UnsupportedModel, dtype_name
from mdcs.profile.link import Collectives, Link
from mdcs.profile.schema import Optimizer, Profile, Unit
from mdcs.profiler.regression import p10_p90
from mdcs.profiler.slot_recorder import SlotRecorder
from mdcs.profiler.update_timing import WholeCosts, copy_seconds_per_byte, optimizer_costs, passing_data
from mdcs.runtime.executor import execution_on
from mdcs.telemetry.memory_meter import Meter, current_meter


def assembled(
    units: Sequence[ModelUnit],
    updates: Updates,
    recorder: SlotRecorder,
    device: torch.device,
    *,
    world: int,
    link: Link,
    collectives: Collectives,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    about: dict[str, str] | None = None,
) -> Profile:
    """Return the profile of what was recorded; updates and copies are measured on ``device``.

    Of a recorder without passes it has slots of no time, in the order of the units. Parameters as wide as
    ``master_dtype`` and ``grad_dtype`` keep their own. Raises ValueError for a type that is neither the parameters' nor
    a wider float.
    """
    meter, weight = current_meter(device), narrowest(p.dtype for unit in units for _, p in unit.parameters)
    for name, dtype in (("master_dtype", master_dtype), ("grad_dtype", grad_dtype)):
        is_wider = dtype in (torch.float32, torch.float64) and dtype.itemsize > weight.itemsize
        if not (dtype in (None, weight) or is_wider):
            raise ValueError(f"{name} must be {weight}, or wider and float32 or float64, got {dtype}")
    whole, others = WholeCosts(meter, device), passing_data(device) if device.type == "cpu" else None
    planned = [
        _with_types(planned, unit, updates, master_dtype, grad_dtype, whole)
        for unit, planned in zip(units, recorder.units(updates), strict=True)
    ]
    costs = []
    for i, part in enumerate(updates.parts):
        types = {getattr(torch, u.master_dtype or u.dtype) for u in planned if u.trainable and u.optimizer == i}
        costs.append(_optimizer_costs(part, types or {weight}, meter, device))
    copy_s = copy_seconds_per_byte(torch.empty(0, dtype=weight, device=device))
    del others
    return Profile(
        units=tuple(planned),
        slots=recorder.slots(),
        world=world,
        link=link,
        optimizer=costs[0],
        more_optimizers=tuple(costs[1:]),
        collectives=collectives,
        execution=execution_on(device),
        copy_seconds_per_byte=copy_s,
        about=about or {},
        spread={f"slot {i}": p10_p90(samples) for i, samples in enumerate(zip(*recorder.seconds, strict=True))},
    )


def refuse_meta(model: nn.Module) -> None:
    """Raise UnsupportedModel for a parameter or buffer without memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedModel(
                f"{name}: is on the meta device, where nothing can be measured: call parallelize() without a plan"
            )


def narrowest(types: Iterable[torch.dtype]) -> torch.dtype:
    """Return the first type of the fewest bytes."""
    return min(types, key=lambda dtype: dtype.itemsize)


def _with_types(
    planned: Unit,
    unit: ModelUnit,
    updates: Updates,
    master: torch.dtype | None,
    grad: torch.dtype | None,
    costs: WholeCosts,
) -> Unit:
    """Return the unit with its types, its optimizer, and the costs of parameters that are updated whole.

    Gradients are at least as wide as their parameters. There are masters only where they are wider.
    """
    ordered, segments = in_flat_order(unit, updates)
    dtype = ordered[0][1].dtype
    grad_dtype, master_dtype = (
        other if other and other.itemsize > dtype.itemsize else None for other in (grad, master)
    )
    master_dtype = master_dtype if unit.trainable else None
    part, whole = updates.part_of[segments[0].group] if unit.trainable else 0, []
    if unit.trainable and part < len(updates.parts) and updates.parts[part].layout.whole:
        whole = [costs.of(p, updates.parts[part], updates.groups[p], master_dtype or dtype) for _, p in ordered]
    return replace(
        planned, dtype=dtype_name(dtype), grad_dtype=dtype_name(grad_dtype), master_dtype=dtype_name(master_dtype),
        optimizer=part, whole=tuple(whole),
    )  # fmt: skip


def _optimizer_costs(part: UpdatePart, types: Collection[torch.dtype], meter: Meter, device: torch.device) -> Optimizer:
    """Return the costs of updates in the narrowest of these types, and the fixed scratch of wider ones."""
    like = torch.empty(0, dtype=narrowest(types), device=device)
    wider = [dtype for dtype in types if dtype.itemsize > like.element_size()]
    fixed = [(dtype.itemsize, optimizer_costs(part, like.to(dtype), meter).scratch_fixed) for dtype in wider]
    return replace(optimizer_costs(part, like, meter), scratch_fixed_of=tuple(sorted(fixed)))
