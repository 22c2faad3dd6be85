"""Measure a profile by running the real model on the real device: slots, spans and activation bytes.

The model runs alone, without communication. Gradients are taken away as the runtime takes them, so that activations and
workspace remain. All ranks of a machine should measure at the same time, because they compute at the same time in
training.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mdcs.calibrate.clock import Mark
from mdcs.calibrate.put_back import BuffersBefore
from mdcs.calibrate.regression import spread
from mdcs.calibrate.update_timing import copy_seconds_per_byte, optimizer_costs
from mdcs.calibrate.uses import Watch
from mdcs.checkpoint.numbers import random_state, set_random_state
from mdcs.measure.memory import TOTAL, UNTAGGED, Meter, Reading, current_meter
from mdcs.model.aliases import attributes_over_parameters, still_held
from mdcs.model.guard import GRADIENT, Guard
from mdcs.model.hooks import Hooks
from mdcs.model.inputs import INPUTS, BatchSizes, in_words
from mdcs.model.optimizers import Segment, in_flat_order, parameter_groups
from mdcs.model.units import ModelUnit, UnsupportedModel, alias_refused
from mdcs.profile.algorithms import Collectives
from mdcs.profile.contents import Optimizer, Profile, Slot, Unit
from mdcs.profile.layout import Section
from mdcs.profile.link import Link


def measure_profile(
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    world: int,
    link: Link,
    iterations: int = 3,
    warmup: int = 1,
    collectives: Collectives | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    about: dict[str, str] | None = None,
) -> Profile:
    """Return this rank's profile of ``iterations`` steps after ``warmup``: slots (median seconds, most bytes), updates,
    copies.

    - ``step``: runs a forward pass and returns the loss; backward is called here.
    - ``world``, ``link``, ``collectives``: the job's, stored as given.
    - ``about``: stored, with the sizes of the batch.
    - ``master_dtype``: in mixed precision, type of the copy that the optimizer updates; None: the parameters' type.
    - ``grad_dtype``: type in which gradients are summed; None: the parameters' type.

    Parameters as wide as these types keep their own. Weights are not changed; buffers such as BatchNorm's statistics
    and the random state are restored.

    Raises ValueError for a type that is neither the parameters' nor a wider float. Raises UnsupportedModel for a
    parameter on the meta device, without a gradient, or used outside its module's forward; for units that run in
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
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
    for value in state:  # state of training so far: not activations
        with contextlib.suppress(ValueError):  # memory that no meter counts, such as a mapped file
            meter.retag(value, "optimizer")
    batch = BatchSizes(module for unit in units for module in unit.modules)
    try:
        recorder = _recorded(model, units, step, iterations, warmup, state, watch=True)
    finally:
        batch.remove()
    groups = parameter_groups(optimizer)
    updated = weight.dtype if master_dtype is None else master_dtype
    wider = {p.dtype for unit in units for _, p in unit.parameters if p.element_size() > updated.itemsize}
    widths = _Widths(
        weight.element_size(),
        (grad_dtype or weight.dtype).itemsize,
        0 if master_dtype in (None, weight.dtype) else master_dtype.itemsize,
    )
    return Profile(
        units=recorder.units(groups, widths),
        slots=recorder.slots(),
        world=world,
        link=link,
        optimizer=_optimizer_costs(optimizer, weight.new_empty(0, dtype=master_dtype), wider, meter),
        param_bytes=widths.param_bytes,
        grad_bytes=widths.grad_bytes,
        master_bytes=widths.master_bytes,
        collectives=collectives or Collectives(),
        copy_seconds_per_byte=copy_seconds_per_byte(weight),
        about=(about or {}) | ({} if batch.sizes is None else {INPUTS: in_words(batch.sizes)}),
        spread={f"slot {i}": spread(samples) for i, samples in enumerate(zip(*recorder.seconds, strict=True))},
    )


def refuse_meta(model: nn.Module) -> None:
    """Raise UnsupportedModel for a parameter or buffer without memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedModel(f"{name}: is on the meta device, where nothing can be measured: see mdcs.materialize")


class _Widths(NamedTuple):
    """Bytes per element of the narrowest parameters: in compute, of gradients, of masters (0: none)."""

    param_bytes: int
    grad_bytes: int
    master_bytes: int

    def sections(self, segments: Sequence[Segment]) -> tuple[Section, ...]:
        """Return a unit's sections; () if all of it has the narrowest width.

        Gradients are at least as wide as their parameters. There are masters only where they are wider.
        """
        sections = []
        for dtype, members in itertools.groupby(segments, key=lambda s: s.dtype):
            width = dtype.itemsize
            master = self.master_bytes if self.master_bytes > width else 0
            sections.append(Section(sum(s.numel for s in members), width, max(self.grad_bytes, width), master))
        return () if [s.param_bytes for s in sections] == [self.param_bytes] else tuple(sections)


def _optimizer_costs(
    optimizer: torch.optim.Optimizer, like: Tensor, others: Iterable[torch.dtype], meter: Meter
) -> Optimizer:
    """Return the costs of updates in the type of ``like``, and the fixed scratch of ``others``."""
    costs = optimizer_costs(optimizer, like, meter)
    fixed = [(dtype.itemsize, optimizer_costs(optimizer, like.to(dtype), meter).scratch_fixed) for dtype in others]
    return replace(costs, scratch_fixed_of=tuple(sorted(fixed)))


def slot_seconds(
    model: nn.Module, units: Sequence[ModelUnit], step: Callable[[], Tensor], iterations: int = 2, warmup: int = 1
) -> float:
    """Return the seconds of all slots of an iteration together, as :func:`measure_profile` would have them; raises as
    it does.
    """
    return sum(slot.seconds for slot in _recorded(model, units, step, iterations, warmup).slots())


def _recorded(
    model: nn.Module, units: Sequence[ModelUnit], step: Callable[[], Tensor], iterations: int, warmup: int,
    state: Sequence[Tensor] = (), watch: bool = False,
) -> _Recorder:
    device = units[0].parameters[0][1].device
    meter = current_meter(device)
    with untouched(model, meter):
        known = [*(p for unit in units for _, p in unit.parameters), *model.buffers(), *state]  # buffers: their copies
        guards = [Guard(unit.parameters, _used_outside) for unit in units]
        recorder = _Recorder(units, meter, device, guards, sum(t.numel() * t.element_size() for t in known))
        held = attributes_over_parameters(model)
        hooks, before = Hooks(units, recorder), _weights(units)
        loss: Tensor | None = None
        try:
            for kept in _passes(meter, iterations, warmup):
                recorder.begin(kept)
                try:
                    loss = step()  # alive until the next step returns, as in a loop
                    loss.backward()
                except RuntimeError as e:
                    if not recorder.marks or _CHANGED not in str(e):
                        raise
                    recorder.marks = False
                    recorder.begin(kept)
                    loss = step()
                    loss.backward()
                recorder.check(model)
            loss = None
            alias = still_held(model, held)  # tensors that forward makes anew in every step are gone
            if alias is not None:
                raise alias_refused(alias)
            if watch:
                _watch(recorder, model, step)
        finally:
            hooks.remove()
            for guard in recorder.guards:
                guard.open()
        changed = [name for name, weight in _weights(units).items() if weight != before[name]]
        if changed:
            raise UnsupportedModel(
                f"{changed[0]}: is changed by forward (max_norm, clamping, .data), which would be lost where it is sharded: "
                "change weights between steps, in full_parameters(writeback=True)"
            )
    return recorder


def _watch(recorder: _Recorder, model: nn.Module, step: Callable[[], Tensor]) -> None:
    """Run one more step, unmeasured, that records where the memory of parameters is used, through any tensor."""
    with Watch(recorder.model_units, recorder.used) as watch:
        recorder.begin(_Kept(False, False))
        step().backward()
        watch.check(model)
    recorder.check_order()


class _Kept(NamedTuple):
    """Which measurements of a pass are kept: seconds, bytes."""

    seconds: bool
    bytes: bool


def _passes(meter: Meter, iterations: int, warmup: int) -> list[_Kept]:
    """Return the passes: warm-up, then measured ones. Where reading bytes takes time, one pass reads only bytes."""
    first = [_Kept(False, False)] * warmup
    if meter.disturbs:
        return [*first, _Kept(False, True), *[_Kept(True, False)] * iterations]
    return [*first, *[_Kept(True, True)] * iterations]


_CHANGED = "has been modified by an inplace operation"
"""Autograd's error when backward needs an overwritten value."""


def _weights(units: Sequence[ModelUnit]) -> dict[str, tuple[int, str]]:
    """Return address and norm of every parameter."""
    return {n: (p.data_ptr(), str(torch.linalg.vector_norm(p.detach()).item())) for u in units for n, p in u.parameters}


def _used_outside(name: str, what: str) -> UnsupportedModel | None:
    if what == GRADIENT:
        return None
    return UnsupportedModel(
        f"{name}: is used without a call of its module's forward ({what}), when it may be in pieces; wrap the module that uses it"
    )


@contextlib.contextmanager
def untouched(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Run steps that are only measured: no garbage collection; buffers and the random state are restored."""
    with meter.tag("parameters"):  # not part of a step: must not count as activations
        buffers = BuffersBefore(model)
        device = next(model.parameters()).device
        numbers = random_state(device)
    collected = gc.isenabled()
    gc.disable()  # a collection inside a slot would be measured as compute
    try:
        yield
    finally:
        if collected:
            gc.enable()
    buffers.put_back()
    set_random_state(numbers, device)


@dataclass
class _Recorder:
    """Listens to one micro-step after the other and keeps times and bytes per slot."""

    model_units: Sequence[ModelUnit]
    meter: Meter
    device: torch.device
    guards: Sequence[Guard]  # by unit: parameters are open in their module's forward, and in backward
    known: int  # bytes held all the time that are not activations
    order: list[tuple[int, str]] = field(default_factory=list)
    spans: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    seconds: list[list[float]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    marks: bool = True  # bump weights' versions at their gradients; off if backward objects
    uses: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # slots in which the memory of parameters is used
    aliased: set[int] = field(default_factory=set)  # units whose memory forward uses outside of their modules
    late: set[int] = field(default_factory=set)  # units of which a parameter is used after its gradient has come
    came: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)  # gradient: (slot, seconds into it)

    def begin(self, kept: _Kept) -> None:
        self._kept = kept
        for unit in self.model_units:
            for _, p in unit.parameters:
                p.grad = None
        self._now: list[tuple[int, str]] = []
        self._times: list[Mark] = []
        self._lives: list[int] = []
        self._peaks: list[int] = []
        self._highest = 0  # most bytes of activations in this slot so far
        self._gradients: list[Tensor] = []
        self._arrived: dict[tuple[int, int], tuple[int, Mark]] = {}  # (unit, parameter) -> (slot, time)
        self._spans: dict[tuple[int, str], list[int]] = {}
        self._inside = [0] * len(self.guards)
        self._ended = False
        for guard in self.guards:
            guard.close()

    def _boundary(self) -> None:
        if self._kept.bytes:
            self._look()
            self._peaks.append(self._highest)
            self._highest = 0
            self._lives.append(self._untagged(self.meter.live()))
        self._times.append(Mark(self.device))

    def _look(self) -> None:
        """Note the most activation bytes since the last look: no gradient has been added to those held since then."""
        self._highest = max(self._highest, self._untagged(self.meter.window()))

    def _untagged(self, reading: Reading | None) -> int:
        """Return the activation bytes. Where only a total is measured: the total without known bytes and gradients."""
        reading = reading or {}
        untagged, total = reading.get(UNTAGGED), reading.get(TOTAL)
        if untagged is not None:
            return untagged
        if total is None:
            return 0
        return max(0, total - self.known - sum(g.numel() * g.element_size() for g in self._gradients))

    def _slot(self, unit: int, phase: str) -> None:
        self._boundary()
        index = sum(p == phase for _, p in self._now)
        self._now.append((unit, phase))
        self._spans.setdefault((unit, phase), [index, index])[1] = index

    def forward_begin(self, unit: int) -> None:
        self._inside[unit] += 1
        self.guards[unit].open()
        self._slot(unit, "F")

    def forward_end(self, unit: int) -> None:
        self._spans[unit, "F"][1] = sum(p == "F" for _, p in self._now) - 1
        self._inside[unit] -= 1
        if not self._inside[unit]:
            self.guards[unit].close()

    def backward_begin(self, unit: int) -> None:
        for guard in self.guards:
            guard.open()
        self._slot(unit, "B")

    def recomputed(self, unit: int) -> None:
        # Its parameters are needed now, before the gradient of its output is ready.
        self.guards[unit].open()
        index = sum(p == "B" for _, p in self._now) - 1
        if index < 0:
            raise UnsupportedModel(
                f"{self.model_units[unit].name}: is computed again before any unit's backward has begun (reentrant "
                f"checkpointing, or the loss inside of the checkpointed function): not supported"
            )
        self._spans.setdefault((unit, "B"), [index, index])[1] = index

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if self._kept.bytes:
            self._look()
        with self.meter.tag("gradients"):
            kept = torch.empty_like(parameter.grad)
        kept.copy_(parameter.grad)
        self._gradients.append(kept)
        parameter.grad = None
        self._arrived[unit, index] = len(self._now) - 1, Mark(self.device)
        if self.marks:
            torch.autograd.graph.increment_version(parameter)
        slot = sum(p == "B" for _, p in self._now) - 1
        if slot < 0:
            raise UnsupportedModel(
                f"{self.model_units[unit].name}: its gradients come before one reaches the output of any unit: return "
                f"tensors from its forward, in tuples, lists, dictionaries or dataclasses"
            )
        self._spans.setdefault((unit, "B"), [slot, slot])[1] = slot

    def used(self, unit: int, index: int) -> None:
        """Note that the memory of the unit's parameter ``index`` is used now."""
        if not self._now:
            return
        phase = self._now[-1][1]
        slot = sum(p == phase for _, p in self._now) - 1
        span = self.uses.setdefault((unit, phase), [slot, slot])
        span[:] = min(span[0], slot), max(span[1], slot)
        if phase == "F" and not self._inside[unit]:
            self.aliased.add(unit)
        if (unit, index) in self._arrived:
            self.late.add(unit)

    def backward_end(self) -> None:
        if self._ended:
            raise UnsupportedModel("a step runs backward, or torch.autograd.grad, twice: not supported")
        self._ended = True
        self._boundary()
        self._gradients.clear()
        if not any(self._kept):
            return
        if not self.order:
            self.order, self.spans = self._now, self._spans
            self.live, self.peak = [0] * len(self._now), [0] * len(self._now)
        self.check_order()
        if self._kept.seconds:
            self.seconds.append([a.until(b) for a, b in zip(self._times, self._times[1:], strict=False)])
            for key, (slot, mark) in self._arrived.items():
                self.came.setdefault(key, []).append((slot, self._times[slot].until(mark)))
        if self._kept.bytes:
            self.live = [max(a, b) for a, b in zip(self.live, self._lives, strict=False)]
            self.peak = [max(a, b) for a, b in zip(self.peak, self._peaks[1:], strict=False)]

    def check_order(self) -> None:
        if self._now != self.order:
            raise UnsupportedModel("the model's units run in another order from step to step: not supported")

    def check(self, model: nn.Module) -> None:
        for u, unit in enumerate(self.model_units):
            if (u, "F") not in self._spans:
                raise UnsupportedModel(
                    f"{unit.parameters[0][0]}: is used without a call of its module's forward, or not at all; "
                    f"wrap the module that uses it (unit {unit.name})"
                )
            for i, (name, _) in enumerate(unit.parameters):
                if unit.trainable and (u, i) not in self._arrived:
                    raise UnsupportedModel(f"{name}: gets no gradient in a step; freeze it (requires_grad_(False))")

    def units(self, groups: dict[nn.Parameter, int], widths: _Widths) -> tuple[Unit, ...]:
        inside = {id(m): u for u, unit in enumerate(self.model_units) for m in unit.modules}
        out = []
        for u, unit in enumerate(self.model_units):
            forward = self._span(u, "F")
            backward = self._span(u, "B")
            assert forward is not None
            if backward is not None and not unit.trainable:
                # A frozen unit has no gradient that marks its end: it may be in use until its inner units end.
                nested = {inside[id(m)] for root in unit.modules for m in root.modules() if id(m) in inside}
                ends = [self.spans[n, "B"][1] for n in nested if (n, "B") in self.spans]
                backward = backward[0], max([backward[1], *ends])
            ordered, segments = in_flat_order(unit, groups)
            lengths, sections = tuple(s.numel for s in segments), widths.sections(segments)
            gradients = self._gradients_of(u, [p for _, p in ordered]) if unit.trainable else ()
            aliased = u in self.aliased
            out.append(Unit(unit.name, lengths, unit.trainable, forward, backward, sections, gradients, aliased))
        return tuple(out)

    def _span(self, unit: int, phase: str) -> tuple[int, int] | None:
        """Return first and last slot in which the unit computes, or its memory is used."""
        slots = [*self.spans.get((unit, phase), ()), *self.uses.get((unit, phase), ())]
        return (min(slots), max(slots)) if slots else None

    def _gradients_of(self, unit: int, ordered: list[nn.Parameter]) -> tuple[tuple[int, float], ...]:
        """Return (elements, fraction of the last backward slot at which they are ready) in flat order.

        Empty where the weights are used after their gradients.
        """
        last = max(slot for i in range(len(ordered)) for slot, _ in self.came[unit, i])
        span = self._span(unit, "B")
        forward_slots = sum(phase == "F" for _, phase in self.order)
        if not self.marks or unit in self.late or span is None or forward_slots + span[1] > last:
            return ()
        took = statistics.median(seconds[last] for seconds in self.seconds)
        index = {p: i for i, (_, p) in enumerate(self.model_units[unit].parameters)}
        out = []
        for p in ordered:
            samples = [seconds if slot == last else 0.0 for slot, seconds in self.came[unit, index[p]]]
            out.append((p.numel(), round(min(1.0, statistics.median(samples) / took), 3) if took > 0 else 1.0))
        return tuple(out)

    def slots(self) -> tuple[Slot, ...]:
        medians = [statistics.median(s) for s in zip(*self.seconds, strict=True)]
        return tuple(
            Slot(unit, phase, medians[i], self.live[i], self.peak[i]) for i, (unit, phase) in enumerate(self.order)
        )
