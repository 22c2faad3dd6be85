"""The one recorder of slots: listens to the hooks of a run, and keeps times, spans and activation bytes per slot."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from mdcs.model.hooks import Listener
from mdcs.model.optimizers import Updates, in_flat_order
from mdcs.model.units import ModelUnit
from mdcs.profile.schema import Slot, Unit
from mdcs.profiler.timing import DeviceTimestamp
from mdcs.profiler.unit_tensors import ForwardChanges, UnitTensors
from mdcs.sizes import aligned
from mdcs.telemetry.memory_meter import Meter, Reading
from mdcs.torch_compat import backward_pass


class Measures(NamedTuple):
    """Measurements of a pass that are kept: seconds, bytes."""

    seconds: bool
    bytes: bool


class Run(Listener, Protocol):
    """The run that a recorder listens to: it hears all hooks, has the parameters and takes the gradients away.

    ``exported_to``: what the loop has the parameters for instead of training; None: nothing.
    """

    exported_to: str | None


@dataclass
class SlotRecorder:
    """Listens to one micro-step after the other and keeps times and bytes per slot. Time in which ``run`` works is left
    out.

    - ``activations``: returns the bytes of activations in a reading of the meter.
    - ``aside``: a context for what ``run`` does itself.

    Passes of another order than the first are left out.
    """

    model_units: Sequence[ModelUnit]
    meter: Meter
    device: torch.device
    run: Any  # :class:`Run`; None for a recorder without passes
    activations: Callable[[Reading | None], int]
    aside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    order: list[tuple[int, str]] = field(default_factory=list)
    spans: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    seconds: list[list[float]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    # slots in which the memory of parameters is used
    uses: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    aliased: set[int] = field(default_factory=set)  # units whose memory forward uses outside of their modules
    # units that no hook announces: needed from their first use to their last
    whole: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)  # units of which a parameter is used after its gradient has come
    # gradient: (slot, seconds into it)
    came: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    # modules whose forward a checkpoint of the model's own runs again
    rerun: set[nn.Module] = field(default_factory=set)
    # (unit, slot, slot again): seconds
    recomputations: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)  # by unit: bytes of inputs that only recomputation would keep
    outputs: dict[int, int] = field(default_factory=dict)  # by unit: bytes of the outputs of its modules
    tensors: UnitTensors | None = None  # listens to a forward pass for these two
    changing: set[int] = field(default_factory=set)  # units whose forward changes a buffer, as far as it listens

    def restart(self, kept: Measures) -> None:
        """Forget the pass under way, and begin another."""
        self._kept = kept
        self._now: list[tuple[int, str]] = []
        self._times: list[DeviceTimestamp] = []
        # (slot, begin, end) of what is not the model's time
        self._waits: list[tuple[int, DeviceTimestamp, DeviceTimestamp]] = []
        self._lives: list[int] = []
        self._peaks: list[int] = []
        self._highest = 0  # most bytes of activations in this slot so far
        self._arrived: dict[tuple[int, int], tuple[int, DeviceTimestamp]] = {}  # (unit, parameter) -> (slot, time)
        self._recomputed: list[tuple[tuple[int, int, int], DeviceTimestamp, DeviceTimestamp]] = []
        self._spans: dict[tuple[int, str], list[int]] = {}
        self._uses: dict[tuple[int, str], list[int]] = {}
        self._before: dict[int, ForwardChanges] = {}  # of units in their forward
        self._inside = [0] * len(self.model_units)
        self._side = 0  # forwards and backwards of side passes under way

    def give_up(self) -> None:
        """Forget the pass under way."""
        self.restart(self._kept)

    def _boundary(self) -> None:
        if self._kept.bytes:
            self._look()
            self._peaks.append(self._highest)
            self._highest = 0
            self._lives.append(self.activations(self.meter.live()))
        self._times.append(DeviceTimestamp(self.device))

    def _look(self) -> None:
        """Note the most activation bytes since the last look: no gradient has been added to those held since then."""
        self._highest = max(self._highest, self.activations(self.meter.window()))

    def _slot(self, unit: int, phase: str) -> None:
        if phase == "B" and self.tensors is not None:
            self.shared, self.outputs = self.tensors.shared_inputs(), self.tensors.outputs()
            self.tensors = None
        self._boundary()
        index = sum(p == phase for _, p in self._now)
        self._now.append((unit, phase))
        self._spans.setdefault((unit, phase), [index, index])[1] = index

    # -- what the run hears, too

    @property
    def accumulates(self) -> bool:
        """Return whether all passes are side passes now."""
        return self.run.accumulates

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Leave what the run does out of the slot's time, and out of the uses."""
        if self._kept.bytes:
            self._look()
        begin = DeviceTimestamp(self.device)
        with self.aside():
            yield
        if self._now:
            self._waits.append((len(self._now) - 1, begin, DeviceTimestamp(self.device)))

    @property
    def _leaves_out(self) -> bool:
        return self.run.exported_to is not None

    @property
    def is_in_pass(self) -> bool:
        """Return whether a pass of a step is under way."""
        return bool(self._now) and not self._leaves_out

    def has_left(self, unit: int) -> bool:
        """Return whether a pass of a step is under way, with no module of the unit and no later use in its forward."""
        return self.is_in_pass and backward_pass() == -1 and not self._inside[unit] and unit not in self.whole

    def forward_begin(self, unit: int) -> None:
        """Begin a slot."""
        with self._waiting():
            self.run.forward_begin(unit)
        if not self._leaves_out:
            self._inside[unit] += 1
            self._slot(unit, "F")
            if self.tensors is not None:
                self._before[unit] = ForwardChanges(self.model_units[unit])

    def forward_end(self, unit: int) -> None:
        """Extend the unit's span to the present slot."""
        self.run.forward_end(unit)
        if not self._leaves_out:
            self._spans[unit, "F"][1] = sum(p == "F" for _, p in self._now) - 1
            self._inside[unit] -= 1
            if unit in self._before and self._before.pop(unit).changed_buffer():
                self.changing.add(unit)

    def backward_begin(self, unit: int) -> None:
        """Begin a slot."""
        with self._waiting():
            self.run.backward_begin(unit)
        self._slot(unit, "B")

    def used_outside(self, unit: int, is_side: bool) -> None:
        """Begin a slot if this is the unit's first use; the unit is whole from now on."""
        with self._waiting():
            self.run.used_outside(unit, is_side)
        if self._leaves_out:
            return
        self.aliased.add(unit)
        if not is_side:
            self.whole.add(unit)
            if (unit, "F") not in self._spans:
                self._slot(unit, "F")

    def recomputed(self, unit: int) -> None:
        """Extend the unit's backward span: checkpointing runs its forward again."""
        with self._waiting():
            self.run.recomputed(unit)
        if not self._leaves_out:
            self._extend_backward(unit)

    def side_begin(self, unit: int, in_backward: bool) -> None:
        """Let a side pass use a unit. The plan will wait meanwhile, unless it is inside of a forward pass."""
        with self._waiting():
            self.run.side_begin(unit, in_backward)
        if self._leaves_out:
            return
        if any(self._inside):
            slot = sum(phase == "F" for _, phase in self._now) - 1
            self._spans.setdefault((unit, "F"), [slot, slot])[1] = slot
        else:
            self._side = 1 if in_backward else self._side + 1

    def side_end(self, unit: int) -> None:
        """Note that a module has returned in a side pass."""
        self.run.side_end(unit)
        if not self._leaves_out:
            self._side = max(0, self._side - 1)

    def side_backward_end(self) -> None:
        """Note that the backward of a side pass is over."""
        self.run.side_backward_end()
        self._side = 0

    def recomputing(self, unit: int) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Time a forward that is computed again."""
        forward = len(self._now) - 1

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            use, begin = (unit, forward, len(self._now) - 1), DeviceTimestamp(self.device)
            try:
                yield
            finally:  # checkpointing leaves by an exception once all is computed that backward needs
                self._recomputed.append((use, begin, DeviceTimestamp(self.device)))

        return again

    def _extend_backward(self, unit: int) -> None:
        """Extend the unit's backward span to the present slot."""
        slot = sum(p == "B" for _, p in self._now) - 1
        self._spans.setdefault((unit, "B"), [slot, slot])[1] = slot

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        """Note when a gradient is ready; the run takes it away."""
        if self._kept.bytes:
            self._look()
        with self.aside():
            self.run.gradient(unit, index, parameter)
        self._arrived[unit, index] = len(self._now) - 1, DeviceTimestamp(self.device)
        self._extend_backward(unit)

    def used(self, unit: int, index: int) -> None:
        """Note that the memory of the unit's parameter ``index`` is used now."""
        if not self._now or self._side:
            return
        phase = self._now[-1][1]
        if phase == "F" and backward_pass() != -1:  # before the first slot of backward: no hook of its own gathers it
            phase = "B"
            self.whole.add(unit)
        slot = max(0, sum(p == phase for _, p in self._now) - 1)
        _extend(self._uses, (unit, phase), slot, slot)
        if phase == "F" and not self._inside[unit]:
            self.aliased.add(unit)
        if (unit, index) in self._arrived:
            self.late.add(unit)

    def backward_end(self) -> None:
        """End the last slot, and keep the measurements of the pass."""
        self._boundary()
        with self.aside():
            self.run.backward_end()
        if not self.order or self._now == self.order:
            for use, span in self._uses.items():
                _extend(self.uses, use, *span)
            self._keep()
        self.restart(self._kept)

    def _keep(self) -> None:
        if not any(self._kept):
            return
        if not self.order:
            self.order, self.spans = self._now, self._spans
            self.live, self.peak = [0] * len(self._now), [0] * len(self._now)
        if self._kept.seconds:
            seconds = [a.until(b) for a, b in zip(self._times, self._times[1:], strict=False)]
            for slot, begin, end in self._waits:
                seconds[slot] -= begin.until(end)
            self.seconds.append(seconds)
            for use, begin, end in self._recomputed:
                self.recomputations.setdefault(use, []).append(begin.until(end))
            for key, (slot, mark) in self._arrived.items():
                self.came.setdefault(key, []).append((slot, self._times[slot].until(mark)))
        if self._kept.bytes:
            self.live = [max(a, b) for a, b in zip(self.live, self._lives, strict=False)]
            self.peak = [max(a, b) for a, b in zip(self.peak, self._peaks[1:], strict=False)]

    def keep(self, size: int) -> None:
        """Count bytes that were taken after these passes and stay, such as a library's workspace on one more thread."""
        self.live, self.peak = [n + size for n in self.live], [n + size for n in self.peak]

    @property
    def idle(self) -> tuple[list[int], list[int]]:
        """Units that the step did not come to, in forward and in backward: they get a slot of no time at the end of
        each."""
        forward = [u for u in range(len(self.model_units)) if (u, "F") not in self.spans]
        backward = [u for u, unit in enumerate(self.model_units) if unit.trainable and (u, "B") not in self.spans]
        return forward, backward[::-1]

    def units(self, updates: Updates) -> tuple[Unit, ...]:
        """Return the profile's units, without types and optimizers."""
        inside = {id(m): u for u, unit in enumerate(self.model_units) for m in unit.modules}
        idle = {
            (u, phase): (slot, slot)
            for phase, own in zip("FB", self.idle, strict=True)
            for slot, u in enumerate(own, sum(p == phase for _, p in self.order))
        }
        out = []
        for u, unit in enumerate(self.model_units):
            forward, backward = self._span(u, "F") or idle[u, "F"], self._span(u, "B") or idle.get((u, "B"))
            if backward is not None and not unit.trainable:
                # A frozen unit has no gradient that marks its end: it may be in use until its inner units end.
                nested = {inside[id(m)] for root in unit.modules for m in root.modules() if id(m) in inside}
                ends = [self.spans[n, "B"][1] for n in nested if (n, "B") in self.spans]
                backward = backward[0], max([backward[1], *ends])
            named, segments = in_flat_order(unit, updates)
            lengths = tuple(s.numel for s in segments)
            gradients = self._gradients_of(u, [p for _, p in named]) if unit.trainable else ()
            aliased = u in self.aliased
            out.append(
                Unit(unit.name, lengths, unit.trainable, forward, backward, gradients=gradients, aliased=aliased)
            )
        return tuple(out)

    def _span(self, unit: int, phase: str) -> tuple[int, int] | None:
        """Return first and last slot in which the unit or another one around its modules computes, or their memory is
        used.
        """
        modules = self.model_units[unit].modules
        slots = [
            slot
            for u, other in enumerate(self.model_units) if other.modules == modules
            for slot in (*self.spans.get((u, phase), ()), *self.uses.get((u, phase), ()))
        ]
        if not slots:
            return None
        if unit not in self.whole:
            return min(slots), max(slots)
        # Through the turn, so that it is not freed between its forward and its backward.
        return (min(slots), self._forward_slots - 1) if phase == "F" else (0, max(slots))

    @property
    def _forward_slots(self) -> int:
        """Number of forward slots of the profile, those of no time included."""
        return sum(phase == "F" for _, phase in self.order) + len(self.idle[0])

    def _gradients_of(self, unit: int, ordered: list[nn.Parameter]) -> tuple[tuple[int, float], ...]:
        """Return (elements, fraction of the last backward slot at which they are ready) in flat order.

        Empty where the weights are used after their gradients.
        """
        last = max((slot for i in range(len(ordered)) for slot, _ in self.came.get((unit, i), ())), default=0)
        span = self._span(unit, "B")
        forward_slots = sum(phase == "F" for _, phase in self.order)
        if unit in self.late or span is None or forward_slots + span[1] > last:
            return ()
        took = statistics.median(seconds[last] for seconds in self.seconds)
        index = {p: i for i, (_, p) in enumerate(self.model_units[unit].parameters)}
        out = []
        for p in ordered:
            # A gradient that did not come is known to be missing when the slot is over.
            samples = [
                seconds if slot == last else 0.0 for slot, seconds in self.came.get((unit, index[p]), [(last, took)])
            ]
            out.append((aligned(p.numel()), round(min(1.0, statistics.median(samples) / took), 3) if took > 0 else 1.0))
        return tuple(out)

    def slots(self) -> tuple[Slot, ...]:
        """Return the profile's slots: median seconds, most bytes."""
        medians = [statistics.median(s) for s in zip(*self.seconds, strict=True)]
        slots = [
            Slot(unit, phase, medians[i], self.live[i], self.peak[i]) for i, (unit, phase) in enumerate(self.order)
        ]
        turn = sum(phase == "F" for _, phase in self.order)
        forward, backward = self.idle
        # Bytes of activations between the passes, and outside of them.
        between, after = (self.live[turn], self.live[0]) if slots else (0, 0)
        idle_forward = [Slot(u, "F", 0.0, between, between) for u in forward]
        idle_backward = [Slot(u, "B", 0.0, after, after) for u in backward]
        return (*slots[:turn], *idle_forward, *slots[turn:], *idle_backward)


def _extend(spans: dict[tuple[int, str], list[int]], use: tuple[int, str], first: int, last: int) -> None:
    """Extend the span of a unit's phase to these slots."""
    span = spans.setdefault(use, [first, last])
    span[:] = min(span[0], first), max(span[1], last)
