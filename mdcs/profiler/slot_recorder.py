"""The one recorder of slots: listens to the hooks of a run, and keeps times, spans and activation bytes per slot."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from mdcs.profile.schema import Slot, Unit
from mdcs.profiler.step_tensors import UnitTensors, watch_forward
from mdcs.runtime.engine import Engine
from mdcs.runtime.executor import DeviceTimestamp
from mdcs.sizes import aligned
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Reading
from mdcs.torch_compat import backward_pass


class SlotRecorder:
    """Listens to one micro-step after the other and keeps times and bytes per slot. Time in which the run works is
    left out: it hears all hooks, too, has the parameters, and takes the gradients away.

    ``aside``: a context for what the run does itself. ``reads_bytes``: whether bytes are measured in the passes to
    come. Passes of another order than the first are left out.
    """

    def __init__(self, engine: Engine, aside: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.model_units, self.meter, self._device = engine.units, engine.meter, engine.device
        self._run, self._account, self._aside, self.reads_bytes = engine.sequencer, engine.account, aside, True
        self.order: list[tuple[int, str]] = []
        self.spans: dict[tuple[int, str], list[int]] = {}
        self.seconds: list[list[float]] = []
        self.live: list[int] = []
        self.peak: list[int] = []
        self.uses: dict[tuple[int, str], list[int]] = {}  # slots in which the memory of parameters is used
        self.aliased: set[int] = set()  # units whose memory forward uses outside of their modules
        self.whole: set[int] = set()  # units that no hook announces: needed from their first use to their last
        self.late: set[int] = set()  # units of which a parameter is used after its gradient has come
        self.came: dict[tuple[int, int], list[tuple[int, float]]] = {}  # gradient: (slot, seconds into it)
        self.rerun: set[nn.Module] = set()  # modules whose forward a checkpoint of the model's own runs again
        self.recomputations: dict[tuple[int, int, int], list[float]] = {}  # (unit, slot, slot again): seconds
        self.shared: dict[int, int] = {}  # by unit: bytes of inputs that only recomputation would keep
        self.outputs: dict[int, int] = {}  # by unit: bytes of the outputs of its modules
        self.tensors: UnitTensors | None = None  # listens to a forward pass for these two
        self.changing: set[int] = set()  # units whose forward changes a buffer, as far as it listens
        self.restart()

    def restart(self) -> None:
        """Forget the pass under way, and begin another."""
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
        self._changed: dict[int, Callable[[], bool]] = {}  # by unit in its forward: whether it has changed a buffer
        self._inside = [0] * len(self.model_units)
        self._side = 0  # forwards and backwards of side passes under way

    def _boundary(self) -> None:
        self._look()
        if self.reads_bytes:
            self._peaks.append(self._highest)
            self._highest = 0
            self._lives.append(self._activations(self.meter.live()))
        self._times.append(DeviceTimestamp(self._device))

    def _look(self) -> None:
        """Note the most activation bytes since the last look: no gradient has been added to those held since then."""
        if self.reads_bytes:
            self._highest = max(self._highest, self._activations(self.meter.window()))

    def _activations(self, reading: Reading | None) -> int:
        """Return the bytes of activations. Where only a total is measured: the total without what the run knows of."""
        reading = reading or {}
        untagged, total = reading.get(UNTAGGED), reading.get(TOTAL)
        if untagged is not None or total is None:
            return untagged or 0
        with self._account.lock:
            held = sum(size for category, size in self._account.live.items() if category != UNTAGGED)
        return max(0, total - held)

    def _slot(self, unit: int, phase: str) -> None:
        if phase == "B" and self.tensors is not None:
            self.shared, self.outputs = self.tensors.shared_inputs(), self.tensors.outputs()
            self.tensors = None
        self._boundary()
        self._now.append((unit, phase))
        self._extend_span(unit, phase)

    def _extend_span(self, unit: int, phase: str) -> None:
        """Extend the unit's span to the present slot."""
        slot = _count(self._now, phase) - 1
        self._spans.setdefault((unit, phase), [slot, slot])[1] = slot

    # -- what the run hears, too

    @property
    def accumulates(self) -> bool:
        """Return whether all passes are side passes now."""
        return self._run.accumulates

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Leave what the run does out of the slot's time, and out of the uses."""
        self._look()
        begin = DeviceTimestamp(self._device)
        with self._aside():
            yield
        if self._now:
            self._waits.append((len(self._now) - 1, begin, DeviceTimestamp(self._device)))

    @property
    def _leaves_out(self) -> bool:
        return self._run.exported_to is not None

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
            self._run.forward_begin(unit)
        if not self._leaves_out:
            self._inside[unit] += 1
            self._slot(unit, "F")
            if self.tensors is not None:
                self._changed[unit] = watch_forward(self.model_units[unit])

    def forward_end(self, unit: int) -> None:
        """Extend the unit's span to the present slot."""
        self._run.forward_end(unit)
        if not self._leaves_out:
            self._extend_span(unit, "F")
            self._inside[unit] -= 1
            if unit in self._changed and self._changed.pop(unit)():
                self.changing.add(unit)

    def backward_begin(self, unit: int) -> None:
        """Begin a slot."""
        with self._waiting():
            self._run.backward_begin(unit)
        self._slot(unit, "B")

    def used_outside(self, unit: int, is_side: bool) -> None:
        """Begin a slot if this is the unit's first use; the unit is whole from now on."""
        with self._waiting():
            self._run.used_outside(unit, is_side)
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
            self._run.recomputed(unit)
        if not self._leaves_out:
            self._extend_span(unit, "B")

    def side_begin(self, unit: int, in_backward: bool) -> None:
        """Let a side pass use a unit. The plan will wait meanwhile, unless it is inside of a forward pass."""
        with self._waiting():
            self._run.side_begin(unit, in_backward)
        if self._leaves_out:
            return
        if any(self._inside):
            self._extend_span(unit, "F")
        else:
            self._side = 1 if in_backward else self._side + 1

    def side_end(self, unit: int) -> None:
        """Note that a module has returned in a side pass."""
        self._run.side_end(unit)
        if not self._leaves_out:
            self._side = max(0, self._side - 1)

    def side_backward_end(self) -> None:
        """Note that the backward of a side pass is over."""
        self._run.side_backward_end()
        self._side = 0

    def recomputing(self, unit: int) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Time a forward that is computed again."""
        forward = len(self._now) - 1

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            use, begin = (unit, forward, len(self._now) - 1), DeviceTimestamp(self._device)
            try:
                yield
            finally:  # checkpointing leaves by an exception once all is computed that backward needs
                self._recomputed.append((use, begin, DeviceTimestamp(self._device)))

        return again

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        """Note when a gradient is ready; the run takes it away."""
        self._look()
        with self._aside():
            self._run.gradient(unit, index, parameter)
        self._arrived[unit, index] = len(self._now) - 1, DeviceTimestamp(self._device)
        self._extend_span(unit, "B")

    def used(self, unit: int, index: int) -> None:
        """Note that the memory of the unit's parameter ``index`` is used now."""
        if not self._now or self._side:
            return
        phase = self._now[-1][1]
        if phase == "F" and backward_pass() != -1:  # before the first slot of backward: no hook of its own gathers it
            phase = "B"
            self.whole.add(unit)
        slot = max(0, _count(self._now, phase) - 1)
        self._uses.setdefault((unit, phase), [slot, slot])[1] = slot
        if phase == "F" and not self._inside[unit]:
            self.aliased.add(unit)
        if (unit, index) in self._arrived:
            self.late.add(unit)

    def backward_end(self) -> None:
        """End the last slot, and keep the measurements of the pass."""
        self._boundary()
        with self._aside():
            self._run.backward_end()
        if not self.order or self._now == self.order:
            self._keep()
        self.restart()

    def _keep(self) -> None:
        for use, (first, last) in self._uses.items():
            span = self.uses.setdefault(use, [first, last])
            span[:] = min(span[0], first), max(span[1], last)
        if not self.order:
            self.order, self.spans = self._now, self._spans
            self.live, self.peak = [0] * len(self._now), [0] * len(self._now)
        seconds = [a.until(b) for a, b in itertools.pairwise(self._times)]
        for slot, begin, end in self._waits:
            seconds[slot] -= begin.until(end)
        self.seconds.append(seconds)
        for again, begin, end in self._recomputed:
            self.recomputations.setdefault(again, []).append(begin.until(end))
        for gradient, (slot, mark) in self._arrived.items():
            self.came.setdefault(gradient, []).append((slot, self._times[slot].until(mark)))
        if self.reads_bytes:
            self.live = [max(a, b) for a, b in zip(self.live, self._lives, strict=False)]
            self.peak = [max(a, b) for a, b in zip(self.peak, self._peaks[1:], strict=False)]

    def keep(self, size: int) -> None:
        """Count bytes that were taken after these passes and stay, such as a library's workspace on one more thread."""
        self.live, self.peak = [n + size for n in self.live], [n + size for n in self.peak]

    @property
    def _idle(self) -> tuple[list[int], list[int]]:
        """Units that the step did not come to: they get a slot of no time at the end of forward, and of backward."""
        forward = [u for u in range(len(self.model_units)) if (u, "F") not in self.spans]
        backward = [u for u, unit in enumerate(self.model_units) if unit.trainable and (u, "B") not in self.spans]
        return forward, backward[::-1]

    def units(self, before: Sequence[Unit]) -> tuple[Unit, ...]:
        """Return the units of a profile with the slots in which they are in use, and the times of their gradients."""
        inside = {id(m): u for u, unit in enumerate(self.model_units) for m in unit.modules}
        idle = {
            (u, phase): (slot, slot)
            for phase, own in zip("FB", self._idle, strict=True)
            for slot, u in enumerate(own, _count(self.order, phase))
        }
        out = []
        for u, unit in enumerate(self.model_units):
            forward, backward = self._span(u, "F") or idle[u, "F"], self._span(u, "B") or idle.get((u, "B"))
            if backward is not None and not unit.trainable:
                # A frozen unit has no gradient that marks its end: it may be in use until its inner units end.
                nested = {inside[id(m)] for root in unit.modules for m in root.modules() if id(m) in inside}
                ends = [self.spans[n, "B"][1] for n in nested if (n, "B") in self.spans]
                backward = backward[0], max([backward[1], *ends])
            gradients, aliased = self._gradients_of(u) if unit.trainable else (), u in self.aliased
            out.append(replace(before[u], forward=forward, backward=backward, gradients=gradients, aliased=aliased))
        return tuple(out)

    def _span(self, unit: int, phase: str) -> tuple[int, int] | None:
        """Return first and last slot in which the unit or another one around its modules computes or is used."""
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
        if phase == "B":
            return 0, max(slots)
        return min(slots), _count(self.order, "F") + len(self._idle[0]) - 1

    def _gradients_of(self, unit: int) -> tuple[tuple[int, float], ...]:
        """Return (elements, fraction of the last backward slot at which they are ready) in flat order, which is that of
        the engine's units. Empty where the weights are used after their gradients.
        """
        parameters = self.model_units[unit].parameters
        last = max((slot for i in range(len(parameters)) for slot, _ in self.came.get((unit, i), ())), default=0)
        span = self._span(unit, "B")
        if unit in self.late or span is None or _count(self.order, "F") + span[1] > last:
            return ()
        took = statistics.median(seconds[last] for seconds in self.seconds)
        out = []
        for i, (_, p) in enumerate(parameters):
            # A gradient that did not come is known to be missing when the slot is over.
            came = self.came.get((unit, i), [(last, took)])
            samples = [seconds if slot == last else 0.0 for slot, seconds in came]
            out.append((aligned(p.numel()), round(min(1.0, statistics.median(samples) / took), 3) if took > 0 else 1.0))
        return tuple(out)

    def slots(self) -> tuple[Slot, ...]:
        """Return the profile's slots: median seconds, most bytes."""
        medians = [statistics.median(s) for s in zip(*self.seconds, strict=True)]
        slots = [Slot(*use, medians[i], self.live[i], self.peak[i]) for i, use in enumerate(self.order)]
        turn, (forward, backward) = _count(self.order, "F"), self._idle
        # Bytes of activations between the passes, and outside of them.
        between, after = (self.live[turn], self.live[0]) if slots else (0, 0)
        idle_forward = [Slot(u, "F", 0.0, between, between) for u in forward]
        idle_backward = [Slot(u, "B", 0.0, after, after) for u in backward]
        return (*slots[:turn], *idle_forward, *slots[turn:], *idle_backward)


def _count(slots: Sequence[tuple[int, str]], phase: str) -> int:
    return sum(p == phase for _, p in slots)
