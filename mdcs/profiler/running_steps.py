"""Profile of a model that trains under a plan: its own steps are measured, and nothing is whole but what the plan gathers.

The recorder hears what the run's sequencer hears. Time in which compute waits for messages is not counted. Operators are
watched in the first step, so that a view of a parameter that is used where its unit has been freed gathers the unit again,
and is known to the next plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.model.inputs import INPUTS, BatchSizes, in_words
from mdcs.model.optimizers import Updates
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.profile.schema import Profile
from mdcs.profiler.alias_tracker import UseTracker, storage_of
from mdcs.profiler.regression import p10_p90
from mdcs.profiler.slot_recorder import Measures, SlotRecorder
from mdcs.profiler.timing import DeviceTimestamp
from mdcs.runtime.engine import Engine
from mdcs.runtime.storage import UnitStorage
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Meter, Reading
from mdcs.torch_compat import base_of, innermost_dispatch_mode, without_torch_function


class _Open:
    """Stand-in for a guard: the run's own guards say what may be used."""

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


def recorder_of(units: list[ModelUnit], meter: Meter, device: torch.device) -> SlotRecorder:
    """Return a recorder without passes."""
    guards: list[Any] = [_Open() for _ in units]
    return SlotRecorder(units, meter, device, guards, 0)


class RunningSteps(SlotRecorder):
    """Records the steps of a run from now on, until :meth:`stop`. The first is watched, and timed only if no other is.

    Slots are those of the first pass; passes of another order are left out.
    """

    def __init__(self, engine: Engine) -> None:
        guards: list[Any] = [_Open() for _ in engine.units]
        super().__init__(engine.units, engine.meter, engine.storages[0].device, guards, 0)
        self._engine, self._run, self._account, self.storages = engine, engine.sequencer, engine.account, engine.storages
        self._batch = BatchSizes(module for unit in engine.units for module in unit.modules)
        self._watched: list[list[float]] | None = None  # seconds of the first step
        self._watches_memory, self._run.watches_memory = self._run.watches_memory, False  # this reads the windows
        self.steps = 0
        self.restart(Measures(True, True))
        engine.observe(self)
        self._uses = _Uses(engine.storages, self)
        self._uses.start()

    def end_step(self) -> None:
        """End a step."""
        self.steps += 1
        if self._watched is None:
            self._uses.stop()
            _refuse_kept(self.storages)
            self._watched, self.seconds, self.came = self.seconds, [], {}
        self.restart(Measures(True, not self.meter.disturbs))

    def give_up(self) -> None:
        """Forget the pass under way."""
        self.restart(self._kept)

    def stop(self) -> None:
        """Listen no more."""
        self._uses.stop()
        self._batch.remove()
        self._run.watches_memory = self._watches_memory
        self._engine.observe(None)

    def profile(self, before: Profile, updates: Updates) -> Profile:
        """Return the profile ``before`` with what was recorded on this rank."""
        self.seconds = self.seconds or self._watched or []
        known = iter(before.units)
        units = self.units(updates, lambda *_: next(known).sections)
        sizes = self._batch.sizes
        about = before.about | ({} if sizes is None else {INPUTS: in_words(sizes)})
        spread = {f"slot {i}": p10_p90(samples) for i, samples in enumerate(zip(*self.seconds, strict=True))}
        return dataclasses.replace(before, units=units, slots=self.slots(), about=about, spread=spread)

    # -- what the run's sequencer hears

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Leave what the run does out of the slot's time, and out of the uses."""
        if self._kept.bytes:
            self._look()
        begin = DeviceTimestamp(self.device)
        with self._uses.off():
            yield
        if self._now:
            self._waits.append((len(self._now) - 1, begin, DeviceTimestamp(self.device)))

    @property
    def _exported(self) -> bool:
        return self._run.exported_to is not None

    @property
    def accumulates(self) -> bool:
        """Whether all passes are side passes now."""
        return self._run.accumulates

    def forward_begin(self, unit: int) -> None:
        """Begin a slot."""
        with self._waiting():
            self._run.forward_begin(unit)
        if not self._exported:
            super().forward_begin(unit)

    def forward_end(self, unit: int) -> None:
        """Extend the unit's span to the present slot."""
        self._run.forward_end(unit)
        if not self._exported:
            super().forward_end(unit)

    def backward_begin(self, unit: int) -> None:
        """Begin a slot."""
        with self._waiting():
            self._run.backward_begin(unit)
        super().backward_begin(unit)

    def used_outside(self, unit: int, is_side: bool) -> None:
        """Begin a slot if this is the unit's first use."""
        with self._waiting():
            self._run.used_outside(unit, is_side)
        if not self._exported:
            super().used_outside(unit, is_side)

    def recomputed(self, unit: int) -> None:
        """Extend the unit's backward span."""
        with self._waiting():
            self._run.recomputed(unit)
        if not self._exported:
            super().recomputed(unit)

    def side_begin(self, unit: int, in_backward: bool) -> None:
        """Let a side pass use a unit."""
        with self._waiting():
            self._run.side_begin(unit, in_backward)
        if not self._exported:
            super().side_begin(unit, in_backward)

    def side_end(self, unit: int) -> None:
        """Note that a module has returned in a side pass."""
        self._run.side_end(unit)
        if not self._exported:
            super().side_end(unit)

    def side_backward_end(self) -> None:
        """Note that the backward of a side pass is over."""
        self._run.side_backward_end()
        super().side_backward_end()

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        """Note when a gradient is ready; the run takes it away."""
        if self._kept.bytes:
            self._look()
        with self._uses.off():
            self._run.gradient(unit, index, parameter)
        self._arrived[unit, index] = len(self._now) - 1, DeviceTimestamp(self.device)
        self._extend_backward(unit)

    def backward_end(self) -> None:
        """End the last slot, keep the measurements of the pass, and begin another."""
        kept = self._kept
        if self.order and self._now != self.order:
            self._kept = Measures(False, False)
        super().backward_end()
        with self._uses.off():
            self._run.backward_end()
        self.restart(kept)

    def used(self, unit: int, index: int) -> None:
        """Note that the memory of the unit's parameter ``index`` is used now; make the unit whole if it is not."""
        storage = self.storages[unit]
        if not storage.guard.is_open:
            problem = self._engine.access.refuse(unit, storage.names[index], "a view of it")
            if problem is not None:
                raise problem
        super().used(unit, index)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass of the step is under way."""
        return bool(self._now) and not self._exported

    def _untagged(self, reading: Reading | None) -> int:
        reading = reading or {}
        untagged, total = reading.get(UNTAGGED), reading.get(TOTAL)
        if untagged is not None or total is None:
            return untagged or 0
        with self._account.lock:
            held = sum(size for category, size in self._account.live.items() if category != UNTAGGED)
        return max(0, total - held)


class _Uses(UseTracker):
    """Tells ``recorder`` of every operator on the memory of a unit: in a pass, or where it is freed."""

    def __init__(self, storages: list[UnitStorage], recorder: RunningSteps) -> None:
        super().__init__()
        self._recorder = weakref.ref(recorder)  # weak: a run that the loop drops leaves this behind
        self._owners = {storage_of(flat): (u, s) for u, unit in enumerate(storages) for s, flat in enumerate(unit.flat_params)}
        self._is_off = self._is_on = False

    def start(self) -> None:
        """Watch the operators of this thread from now on; not in processes that it forks."""
        self._is_on = True
        self.__enter__()
        _watching.add(self)

    def stop(self) -> None:
        """Watch no more. Inside of a context that the loop has entered since :meth:`start` the mode stays, and does nothing."""
        self._is_off = True
        if self._is_on and innermost_dispatch_mode() is self:
            self._is_on = False
            self.__exit__(None, None, None)
        _watching.discard(self)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Leave out what the run does itself."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def see(self, tensor: Tensor, func: Any) -> None:
        """Tell of a unit's memory."""
        owner, recorder = self._owners.get(storage_of(tensor)), self._recorder()
        if self._is_off or owner is None or recorder is None or not tensor.numel():
            return
        storage, offset = recorder.storages[owner[0]], tensor.storage_offset()
        if recorder.is_in_pass or not storage.is_full:
            before = [(p.offset, i) for i, p in enumerate(storage.places) if p.section == owner[1] and p.offset <= offset]
            with self.off():
                recorder.used(owner[0], max(before)[1])


def _refuse_kept(storages: list[UnitStorage]) -> None:
    """Raise UnsupportedModel for a tensor over memory that is freed between steps and that is kept after one.

    Messages in flight have such tensors, too: slices of the flat buffers, not of parameters.
    """
    freed = {storage_of(flat): unit for unit in storages if unit.strategy.sharded for flat in unit.flat_params}
    flats = {id(flat) for unit in storages for flat in unit.flat_params}
    own = flats | {id(p) for unit in storages for p in unit.parameters}
    with without_torch_function():
        gc.collect()
        for each in gc.get_objects():
            if not issubclass(type(each), Tensor) or id(each) in own or storage_of(each) not in freed:
                continue
            if id(base_of(each)) not in flats:
                raise UnsupportedModel(
                    f"{freed[storage_of(each)].name}: a tensor that shares the memory of its parameters is kept after the step, "
                    "when they are in pieces: keep a copy (.clone())"
                )


_watching: weakref.WeakSet[_Uses] = weakref.WeakSet()


def _stop_in_child() -> None:
    for uses in list(_watching):
        uses.stop()


os.register_at_fork(after_in_child=_stop_in_child)
