"""The profile of a model that has not run: its units, with the costs of its optimizers' updates and of copies.

Elementwise updates are measured on runs of two lengths, others on a copy of each parameter. Nothing is timed by waiting
for CUDA, which runs behind its process.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mdcs.model.flat_optimizer import same_options
from mdcs.model.optimizers import UpdatePart, Updates, in_flat_order
from mdcs.model.units import ModelUnit, UnsupportedModel, dtype_name
from mdcs.profile.layout import WholeParameter
from mdcs.profile.link import Collectives, Link
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from mdcs.runtime.executor import DeviceTimestamp, execution_on
from mdcs.runtime.sharded_optimizer import later_step
from mdcs.sizes import MIB, aligned
from mdcs.telemetry.memory_meter import Meter, current_meter
from mdcs.torch_compat import spin

_CACHES = 64 * MIB  # more than the caches of a CPU, or of a GPU, hold
_SHORT, _LONG = 1 << 10, 1 << 20  # elements of the runs that are updated; the copied one is long, too
_LONG_ON_CUDA = 1 << 23  # with its state more than caches hold
_COPIED_ON_CUDA = 2 * _CACHES  # bytes
_REPEATS, _IN_A_ROW = 5, 20
_SCRATCH_OF_WHOLE = 3  # copies of a parameter, where nothing is measured
_STALL_CYCLES = 40_000_000  # of an empty kernel, some 20 ms: longer than the launches of the work that is timed

Timer = Callable[[Callable[[], object]], float]  # returns the seconds of a call


def unmeasured_profile(
    units: Sequence[ModelUnit], updates: Updates, device: torch.device, *, world: int, link: Link,
    collectives: Collectives, master_dtype: torch.dtype | None, grad_dtype: torch.dtype | None,
    about: dict[str, str] | None,
) -> Profile:  # fmt: skip
    """Return the profile with slots of no time, in the order of the units. Updates and copies are measured.

    Parameters as wide as ``master_dtype`` and ``grad_dtype`` keep their own. Raises ValueError for a type that is
    neither the parameters' nor a wider float.
    """
    meter, weight = current_meter(device), _narrowest(p.dtype for unit in units for _, p in unit.parameters)
    for name, dtype in (("master_dtype", master_dtype), ("grad_dtype", grad_dtype)):
        is_wider = dtype in (torch.float32, torch.float64) and dtype.itemsize > weight.itemsize
        if not (dtype in (None, weight) or is_wider):
            raise ValueError(f"{name} must be {weight}, or wider and float32 or float64, got {dtype}")
    timed = timer(device)

    @functools.cache  # parameters of one shape and one group are measured once
    def whole_costs(shape: torch.Size, dtype: torch.dtype, group: int) -> WholeParameter:
        like = torch.linspace(-1, 1, shape.numel(), dtype=dtype, device=device).view(shape)
        return _whole_costs(updates.parts[updates.part_of[group]], group, like, meter, timed)

    def planned(u: int, unit: ModelUnit) -> Unit:
        """Return a unit. Gradients are at least as wide as their parameters; there are masters where they are wider."""
        ordered, segments = in_flat_order(unit, updates)
        dtype = ordered[0][1].dtype
        grad, master = (
            other if other and other.itemsize > dtype.itemsize else None for other in (grad_dtype, master_dtype)
        )
        master = master if unit.trainable else None
        part, whole = updates.part_of[segments[0].group] if unit.trainable else 0, []
        if unit.trainable and part < len(updates.parts) and updates.parts[part].layout.whole:
            whole = [whole_costs(p.shape, master or dtype, updates.groups[p]) for _, p in ordered]
        return Unit(
            unit.name, tuple(s.numel for s in segments), unit.trainable, (u, u), backward.get(u), dtype_name(dtype),
            dtype_name(grad), dtype_name(master), part, tuple(whole),
        )  # fmt: skip

    trained = [u for u, unit in enumerate(units) if unit.trainable][::-1]
    backward = {u: (slot, slot) for slot, u in enumerate(trained)}
    of_profile, costs = tuple(planned(u, unit) for u, unit in enumerate(units)), []
    for i, part in enumerate(updates.parts):
        types = {getattr(torch, u.master_dtype or u.dtype) for u in of_profile if u.trainable and u.optimizer == i}
        like = torch.empty(0, dtype=_narrowest(types or {weight}), device=device)
        wider = [dtype for dtype in types if dtype.itemsize > like.element_size()]
        fixed = [(dtype.itemsize, optimizer_costs(part, like.to(dtype), meter, timed).scratch_fixed) for dtype in wider]
        costs.append(replace(optimizer_costs(part, like, meter, timed), scratch_fixed_of=tuple(sorted(fixed))))
    slots = [*((u, "F") for u in range(len(units))), *((u, "B") for u in trained)]
    return Profile(
        of_profile, tuple(Slot(u, phase, 0.0, 0, 0) for u, phase in slots), world, link, costs[0], collectives,
        execution=execution_on(device), more_optimizers=tuple(costs[1:]), about=about or {},
        copy_seconds_per_byte=copy_seconds_per_byte(torch.empty(0, dtype=weight, device=device), timed),
    )  # fmt: skip


def refuse_meta(model: nn.Module) -> None:
    """Raise UnsupportedModel for a parameter or buffer without memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedModel(
                f"{name}: is on the meta device, where nothing can be measured: call parallelize() without a plan"
            )


def _narrowest(types: Iterable[torch.dtype]) -> torch.dtype:
    return min(types, key=lambda dtype: dtype.itemsize)


# ---- updates and copies


def optimizer_costs(part: UpdatePart, like: Tensor, meter: Meter, timed: Timer) -> Optimizer:
    """Return state, scratch and seconds of an update on the device and type of ``like``, from runs of two lengths.
    Where ``meter`` measures nothing, scratch is estimated. Where parameters are updated whole only the name counts.
    """
    layout, name, width = part.layout, type(part.optimizer).__name__.lower(), like.element_size()
    if layout.whole:
        return Optimizer(name, layout.tensors(width))

    def of_run(elements: int) -> tuple[float, int | None]:  # in all parameter groups
        p = torch.zeros(elements, dtype=like.dtype, device=like.device)
        p.grad = torch.ones_like(p)
        made = (later_step(same_options(part.optimizer, group, p), layout) for group in part.groups.values())
        return _measured((again for _, again in made), meter, timed)

    short, long = _SHORT, _LONG_ON_CUDA if like.device.type == "cuda" else _LONG
    (short_s, short_bytes), (long_s, long_bytes) = of_run(short), of_run(long)
    scratch, scratch_fixed = layout.scratch, 0
    if short_bytes is not None and long_bytes is not None:
        scratch = (long_bytes - short_bytes) // ((long - short) * width)
        scratch_fixed = short_bytes - scratch * short * width
    return Optimizer(
        name, layout.tensors(width), layout.fixed, scratch,
        seconds_per_element=max(0.0, long_s - short_s) / (long - short),
        seconds_per_run=short_s, scratch_fixed=scratch_fixed,
    )  # fmt: skip


def _whole_costs(part: UpdatePart, group: int, like: Tensor, meter: Meter, timed: Timer) -> WholeParameter:
    """Return the costs of the update of a parameter as ``like``, in the parameter group of this number."""
    like.grad = like.flip(0) if like.dim() else like.clone()
    options = part.groups[group]
    run, again = later_step(same_options(part.optimizer, options, like), part.layout)
    seconds, scratch = _measured([again], meter, timed)
    state = sum(value.nbytes for value in run.state.values() if isinstance(value, Tensor))
    most = _SCRATCH_OF_WHOLE * like.nbytes if scratch is None else scratch
    return WholeParameter(aligned(like.numel()), state, most, seconds)


def _measured(updates: Iterable[Callable[[], object]], meter: Meter, timed: Timer) -> tuple[float, int | None]:
    """Return the median seconds of several calls, and the most bytes that one allocates (None: not measured)."""
    seconds: list[float] = []
    scratch: list[int] = []
    for again in updates:
        again()
        for _ in range(_REPEATS):
            seconds.append(timed(again))
            meter.window()
            before = meter.live()
            again()
            highest = meter.window()
            if before is not None and highest is not None:
                scratch.append((highest["total"] or 0) - (before["total"] or 0))
    return statistics.median(seconds), max(scratch, default=None)


def copy_seconds_per_byte(like: Tensor, timed: Timer) -> float:
    """Return the median seconds of a copy per byte copied, on the device and type of ``like``."""
    elements = _COPIED_ON_CUDA // like.element_size() if like.device.type == "cuda" else _LONG
    a = torch.zeros(elements, dtype=like.dtype, device=like.device)
    b = torch.zeros_like(a)
    samples = [timed(lambda: b.copy_(a)) for _ in range(_REPEATS)]
    return statistics.median(samples) / (a.numel() * a.element_size())


def timer(device: torch.device) -> Timer:
    """Return a function that times a call on a device, in seconds.

    On a CPU the caches are flushed first, because in a step other data passes through them between the parts of a
    message. On a GPU several calls are timed in a row, while the device is kept idle at first, so that they are queued
    as in a step: one alone would include its launch and the wait for its end.
    """
    other = None if device.type == "cuda" else torch.zeros(_CACHES, dtype=torch.uint8, device=device)

    def timed(work: Callable[[], object]) -> float:
        if other is not None:
            other.add_(1)
            begin_s = time.perf_counter()
            work()
            return time.perf_counter() - begin_s
        with torch.cuda.device(device):
            spin(_STALL_CYCLES)
        begin = DeviceTimestamp(device)
        for _ in range(_IN_A_ROW):
            work()
        return begin.until(DeviceTimestamp(device)) / _IN_A_ROW

    return timed
