"""Measure a profile by running the real model on the real device: slots, spans and activation bytes.

The model runs alone, without communication. Gradients are taken away as the runtime takes them, so that activations and
workspace remain. All ranks of a machine should measure at the same time, because they compute at the same time in
training.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mdcs.model.guard import GRADIENT, Guard, attributes_over_parameters, only_reads, still_held
from mdcs.model.hooks import Hooks
from mdcs.model.optimizers import GivenOptimizers, Optimizers, UpdatePart, Updates, by_optimizer, in_flat_order
from mdcs.model.recompute import Recomputation
from mdcs.model.units import ModelUnit, UnsupportedModel, alias_refused, dtype_name
from mdcs.profile.link import Collectives, Link
from mdcs.profile.recompute import RecomputeOption
from mdcs.profile.schema import INPUTS, Optimizer, Profile, Unit
from mdcs.profiler.alias_tracker import AliasTracker
from mdcs.profiler.model_alone import ModelAlone
from mdcs.profiler.model_snapshot import preserve_model
from mdcs.profiler.recompute_profile import measure_recomputation
from mdcs.profiler.regression import p10_p90
from mdcs.profiler.running_steps import watching
from mdcs.profiler.slot_recorder import Measures, SlotRecorder
from mdcs.profiler.update_timing import WholeCosts, copy_seconds_per_byte, optimizer_costs, passing_data
from mdcs.runtime.executor import execution_on
from mdcs.runtime.slots import BatchSizes, in_words
from mdcs.telemetry.memory_meter import Meter, current_meter

_STABLE = 0.02
"""Relative difference of two passes below which no more are measured."""


def measure_profile(
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
    *,
    world: int,
    link: Link,
    iterations: int = 3,
    warmup: int = 1,
    collectives: Collectives | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    about: dict[str, str] | None = None,
    seconds: float = math.inf,
    recompute: bool = False,
    agree: Callable[[bool], bool] = bool,
) -> Profile:
    """Return this rank's profile: slots (median seconds, most bytes), updates, copies.

    Measures at most ``iterations`` steps after ``warmup``: fewer when two in a row take the same time within 2 %, or
    when ``seconds`` are over. One step is measured in any case.

    - ``step``: runs a forward pass and returns the loss; backward is called here.
    - ``world``, ``link``, ``collectives``: the job's, stored as given.
    - ``about``: stored, with the sizes of the batch.
    - ``master_dtype``: in mixed precision, type of the copy that the optimizer updates; None: the parameters' type.
    - ``grad_dtype``: type in which gradients are summed; None: the parameters' type.
    - ``recompute``: measure as many steps twice more, in which units free their activations and compute them again
      (:attr:`Profile.recompute`).
    - ``agree``: given whether this rank has measured enough, returns whether all ranks end: a forward may have
      collectives of its own, which need as many steps on every rank.

    Parameters as wide as these types keep their own. Weights are not changed; buffers such as BatchNorm's statistics
    and the random state are restored.

    Raises ValueError for a type that is neither the parameters' nor a wider float. Raises UnsupportedModel for a
    parameter on the meta device, or used outside its module's forward; for units that run in
    another order from step to step; for a tensor over a parameter's memory that is kept from step to step; and for an
    optimizer that cannot run on shards.
    """
    device = units[0].parameters[0][1].device
    meter = current_meter(device)
    weight = min((p for unit in units for _, p in unit.parameters), key=lambda p: p.element_size())
    for name, dtype in (("master_dtype", master_dtype), ("grad_dtype", grad_dtype)):
        own = weight.dtype
        if dtype not in (None, own) and (dtype not in (torch.float32, torch.float64) or dtype.itemsize <= own.itemsize):
            raise ValueError(f"{name} must be {own}, or wider and float32 or float64, got {dtype}")
    refuse_meta(model)
    for unit in units:
        for _, p in unit.parameters:
            meter.retag(p.data, "parameters")
    updates = Updates(Optimizers(optimizer))
    units = by_optimizer(units, updates)
    state = [v for of in updates.optimizers.state.values() for v in of.values() if isinstance(v, Tensor)]
    for value in state:  # state of training so far: not activations
        meter.retag(value, "optimizer")
    batch = BatchSizes(module for unit in units for module in unit.modules)
    record = partial(
        _recorded, model, units, step, iterations=iterations, warmup=warmup, state=state,
        limit_s=seconds / (3 if recompute else 1), agree=agree,
    )  # fmt: skip
    options: tuple[RecomputeOption, ...] = ()
    kept: dict[str, str] = {}
    try:
        recorder = record(watch=True)
        if recompute:
            options, kept = measure_recomputation(model, units, recorder, lambda choice: record(selective=choice))
    finally:
        batch.remove()
    about = (about or {}) | ({} if batch.sizes is None else {INPUTS: in_words(batch.sizes)}) | kept
    return assembled(
        units, updates, recorder, device, world=world, link=link, collectives=collectives, master_dtype=master_dtype,
        grad_dtype=grad_dtype, recompute=options, about=about,
    )  # fmt: skip


def assembled(
    units: Sequence[ModelUnit],
    updates: Updates,
    recorder: SlotRecorder,
    device: torch.device,
    *,
    world: int,
    link: Link,
    collectives: Collectives | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    recompute: tuple[RecomputeOption, ...] = (),
    about: dict[str, str] | None = None,
) -> Profile:
    """Return the profile of what was recorded; updates and copies are measured on ``device``.

    Of a recorder without passes it has slots of no time, in the order of the units.
    """
    meter, weight = current_meter(device), narrowest(p.dtype for unit in units for _, p in unit.parameters)
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
        collectives=collectives or Collectives(),
        execution=execution_on(device),
        copy_seconds_per_byte=copy_s,
        recompute=recompute,
        about=about or {},
        spread={f"slot {i}": p10_p90(samples) for i, samples in enumerate(zip(*recorder.seconds, strict=True))},
    )


def refuse_meta(model: nn.Module) -> None:
    """Raise UnsupportedModel for a parameter or buffer without memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedModel(
                f"{name}: is on the meta device, where nothing can be measured: see mdcs.materialize"
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
    part, whole = updates.part_of(segments[0].group) if unit.trainable else 0, []
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


def _recorded(
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    iterations: int,
    warmup: int,
    state: Sequence[Tensor] = (),
    watch: bool = False,
    limit_s: float = math.inf,
    selective: dict[int, bool] | None = None,
    agree: Callable[[bool], bool] = bool,
) -> SlotRecorder:
    until = time.monotonic() + limit_s
    device = units[0].parameters[0][1].device
    meter = current_meter(device)
    with preserve_model(model, meter) as same_numbers:
        known = [*(p for unit in units for _, p in unit.parameters), *model.buffers(), *state]  # buffers: their copies

        def used(unit: int, name: str, what: str) -> UnsupportedModel | None:
            hooks = listening()
            if hooks is None or not only_reads(what):
                return None if what == GRADIENT else _changed_outside(name, what)
            hooks.used_outside(unit)
            return None

        guards = [Guard(unit.parameters, partial(used, u)) for u, unit in enumerate(units)]
        alone = ModelAlone(units, guards, meter, sum(t.numel() * t.element_size() for t in known))
        recorder = SlotRecorder(units, meter, device, alone, alone.activations)

        def begin(kept: Measures) -> None:
            alone.begin()
            recorder.restart(kept)

        held = attributes_over_parameters(model)
        hooks, before = Hooks(units, recorder, model), _weights(units)
        recomputation = Recomputation(units, selective or {}, hooks.recomputing)
        listening = weakref.ref(hooks)  # weak: guards must not keep the model alive until the next collection
        loss: Tensor | None = None
        try:
            for kept in _passes(meter, iterations, warmup):
                same_numbers()
                begin(kept)
                try:
                    loss = step()  # alive until the next step returns, as in a loop
                    loss.backward()
                except RuntimeError as e:
                    if not alone.marks or _CHANGED not in str(e):
                        raise
                    alone.marks = recorder.takes_early = False
                    same_numbers()
                    begin(kept)
                    loss = step()
                    loss.backward()
                if agree(_is_enough(recorder.seconds, until)):
                    break
            loss = None
            alias = still_held(model, held)  # tensors that forward makes anew in every step are gone
            if alias is not None:
                raise alias_refused(alias)
            if watch:
                same_numbers()
                _watch(recorder, model, partial(begin, Measures(False, False)), step)
        finally:
            recomputation.remove()
            hooks.remove()
            for guard in guards:
                guard.open()
        changed = [name for name, weight in _weights(units).items() if weight != before[name]]
        if changed:
            raise UnsupportedModel(
                f"{changed[0]}: is changed by forward (max_norm, clamping, .data), which would be lost where it is "
                "sharded: change weights between steps, in full_parameters(writeback=True)"
            )
    return recorder


def _watch(recorder: SlotRecorder, model: nn.Module, begin: Callable[[], None], step: Callable[[], Tensor]) -> None:
    """Run one more step, unmeasured, that records where the memory of parameters is used, through any tensor."""
    with watching(recorder), AliasTracker(recorder.model_units, recorder.used) as watch:
        begin()
        loss = step()
        loss.backward()
        del loss  # its graph holds views of parameters
        watch.check(model)
    recorder.check_order()


def _passes(meter: Meter, iterations: int, warmup: int) -> list[Measures]:
    """Return the passes: warm-up, then measured ones. Where reading bytes takes time, one pass reads only bytes."""
    first = [Measures(False, False)] * warmup
    if meter.disturbs:
        return [*first, Measures(False, True), *[Measures(True, False)] * iterations]
    return [*first, *[Measures(True, True)] * iterations]


def _is_enough(seconds: Sequence[Sequence[float]], until: float) -> bool:
    """Whether time is over, or the two last passes took nearly the same seconds."""
    passes = [sum(slots) for slots in seconds]
    stable = len(passes) > 1 and abs(passes[-1] - passes[-2]) < _STABLE * passes[-2]
    return stable or bool(passes) and time.monotonic() > until


_CHANGED = "has been modified by an inplace operation"
"""Autograd's error when backward needs an overwritten value."""


def _weights(units: Sequence[ModelUnit]) -> dict[str, tuple[int, str]]:
    """Return address and norm of every parameter."""
    return {n: (p.data_ptr(), str(torch.linalg.vector_norm(p.detach()).item())) for u in units for n, p in u.parameters}


def _changed_outside(name: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name}: is changed or copied in forward ({what}), when it may be in pieces: change and copy weights between "
        "steps, in full_parameters()"
    )
