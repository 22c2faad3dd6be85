"""Profile of a model that trains under a plan: its own steps are measured, and nothing is whole but what the plan
gathers.

Time in which compute waits for messages is not counted. Operators are
watched in the first step, so that a view of a parameter that is used where its unit has been freed gathers the unit
again, and is known to the next plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import statistics
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from mdcs.model.optimizers import Updates
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.profile.schema import INPUTS, Profile
from mdcs.profiler.alias_tracker import UseTracker, storage_of
from mdcs.profiler.model_alone import ModelAlone
from mdcs.profiler.regression import p10_p90
from mdcs.profiler.slot_recorder import Measures, SlotRecorder
from mdcs.profiler.unit_tensors import UnitTensors
from mdcs.runtime.engine import Engine
from mdcs.runtime.slots import BatchSizes, in_words
from mdcs.runtime.storage import UnitStorage
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Meter, Reading
from mdcs.torch_compat import backward_pass, base_of, innermost_dispatch_mode, without_torch_function


def without_passes(units: list[ModelUnit], meter: Meter, device: torch.device) -> SlotRecorder:
    """Return a recorder without passes."""
    return SlotRecorder(units, meter, device, ModelAlone((), (), meter, 0), activations=lambda _: 0)


@contextlib.contextmanager
def watching(recorder: SlotRecorder) -> Iterator[None]:
    """Let ``recorder`` know what units are given and return, and the modules that a checkpoint of the model runs again.
    """
    found = weakref.ref(recorder)

    def note_rerun(module: torch.nn.Module, args: Any) -> None:
        listening = found()
        if listening is not None and backward_pass() != -1:
            listening.rerun.add(module)

    handle = register_module_forward_pre_hook(note_rerun)
    try:
        with UnitTensors(recorder.model_units) as recorder.tensors:
            yield
    finally:
        recorder.tensors = None
        handle.remove()


class RunningSteps:
    """Records the steps of a run from now on, until :meth:`stop`.

    The first step is watched operator by operator, and timed only if no other is. Slots are those of the first pass;
    passes of another order are left out. ``like``: slots to record instead, without watching.
    """

    def __init__(self, engine: Engine, *, like: SlotRecorder | None = None) -> None:
        self._engine, self.storages, self.device = engine, engine.storages, engine.device
        self._uses, self._watching = _Uses(engine.storages, self), contextlib.ExitStack()
        self.recorder = SlotRecorder(
            engine.units,
            engine.meter,
            engine.device,
            engine.sequencer,
            self._activations,
            self._uses.off,
            is_strict=False,
        )
        self._batch = BatchSizes(module for unit in engine.units for module in unit.modules)
        self._watched: list[list[float]] | None = None  # seconds of the first step
        sequencer = engine.sequencer
        # the recorder reads the windows
        self._watches_memory, sequencer.watches_memory = sequencer.watches_memory, False
        self._watches = like is None
        if like is not None:
            empty = [0] * len(like.order)
            self.recorder.order, self.recorder.spans, self.recorder.live = like.order, like.spans, empty
            self.recorder.peak = [*empty]
        self.recorder.restart(Measures(True, True))
        engine.observe(self.recorder)
        if self._watches:
            self._watching.enter_context(watching(self.recorder))
            self._uses.start()

    def end_step(self) -> None:
        """End a step."""
        recorder = self.recorder
        if self._watches:
            self._watch_no_more()
            _refuse_kept(self.storages)
            self._watched, recorder.seconds, recorder.came = recorder.seconds, [], {}
        recorder.restart(Measures(True, not recorder.meter.disturbs))

    def _watch_no_more(self) -> None:
        self._uses.stop()
        self._watching.close()
        self._watches = False

    def forget(self) -> None:
        """Forget the pass under way."""
        self.recorder.give_up()

    def stop(self) -> None:
        """Listen no more."""
        self._watch_no_more()
        self._batch.remove()
        self._engine.sequencer.watches_memory = self._watches_memory
        self._engine.observe(None)

    def profile(self, before: Profile, updates: Updates) -> Profile:
        """Return the profile ``before`` with what was recorded on this rank."""
        recorder = self.recorder
        recorder.seconds = recorder.seconds or self._watched or []
        units = tuple(
            dataclasses.replace(
                u, forward=now.forward, backward=now.backward, gradients=now.gradients, aliased=now.aliased
            )
            for u, now in zip(before.units, recorder.units(updates), strict=True)
        )
        sizes = self._batch.sizes
        about = before.about | ({} if sizes is None else {INPUTS: in_words(sizes)})
        spread = {f"slot {i}": p10_p90(samples) for i, samples in enumerate(zip(*recorder.seconds, strict=True))}
        return dataclasses.replace(before, units=units, slots=recorder.slots(), about=about, spread=spread)

    def used(self, unit: int, index: int) -> None:
        """Note that the memory of the unit's parameter ``index`` is used now; make the unit whole if it is not."""
        storage = self.storages[unit]
        if not storage.guard.is_open:
            problem = self._engine.access.refuse(unit, storage.names[index], "a view of it")
            if problem is not None:
                raise problem
        self.recorder.used(unit, index)

    def _activations(self, reading: Reading | None) -> int:
        """Return the bytes of activations. Where only a total is measured: the total without what the run knows of."""
        reading = reading or {}
        untagged, total = reading.get(UNTAGGED), reading.get(TOTAL)
        if untagged is not None or total is None:
            return untagged or 0
        account = self._engine.account
        with account.lock:
            held = sum(size for category, size in account.live.items() if category != UNTAGGED)
        return max(0, total - held)


class TimedSteps:
    """Times the steps of a run from now on."""

    def __init__(self, engine: Engine) -> None:
        engine.recorder.begin_timing()

    def end_step(self) -> None:
        """End a step."""

    def forget(self) -> None:
        """Go on with the step that begins anew."""

    def stop(self) -> None:
        """Time no more."""


class StepClock:
    """The host's time from step to step."""

    def __init__(self, engine: Engine) -> None:
        self._ends = [time.monotonic()]

    def end_step(self) -> None:
        """End a step."""
        self._ends.append(time.monotonic())

    def forget(self) -> None:
        """Go on with the step that begins anew."""

    def stop(self) -> None:
        """Stop."""

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(b - a for a, b in itertools.pairwise(self._ends))


class _Uses(UseTracker):
    """Tells ``recorder`` of every operator on the memory of a unit: in a pass, or where it is freed."""

    def __init__(self, storages: list[UnitStorage], recorder: RunningSteps) -> None:
        super().__init__()
        self._recorder = weakref.ref(recorder)  # weak: a run that the loop drops leaves this behind
        self._owners = {storage_of(unit.flat_param): u for u, unit in enumerate(storages)}
        self._is_off = self._is_on = False

    def start(self) -> None:
        """Watch the operators of this thread from now on; not in processes that it forks."""
        self._is_on = True
        self.__enter__()
        _watching.add(self)

    def stop(self) -> None:
        """Watch no more. Inside of a context that the loop has entered since :meth:`start` the mode stays, and does
        nothing."""
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
        storage, offset = recorder.storages[owner], tensor.storage_offset()
        if recorder.recorder.is_in_pass or not storage.is_full:
            before = [(p.offset, i) for i, p in enumerate(storage.places) if p.offset <= offset]
            with self.off():
                recorder.used(owner, max(before)[1])


def _refuse_kept(storages: list[UnitStorage]) -> None:
    """Raise UnsupportedModel for a tensor over memory that is freed between steps and that is kept after one.

    Messages in flight have such tensors, too: slices of the flat buffers, not of parameters.
    """
    freed = {storage_of(unit.flat_param): unit for unit in storages if unit.strategy.sharded}
    flats = {id(unit.flat_param) for unit in storages}
    own = flats | {id(p) for unit in storages for p in unit.parameters}
    with without_torch_function():
        gc.collect()
        for each in gc.get_objects():
            if not issubclass(type(each), Tensor) or id(each) in own or storage_of(each) not in freed:
                continue
            if id(base_of(each)) not in flats:
                raise UnsupportedModel(
                    f"{freed[storage_of(each)].name}: a tensor that shares the memory of its parameters is kept after "
                    "the step, when they are in pieces: keep a copy (.clone())"
                )


_watching: weakref.WeakSet[_Uses] = weakref.WeakSet()


def _stop_in_child() -> None:
    for uses in list(_watching):
        uses.stop()


os.register_at_fork(after_in_child=_stop_in_child)
