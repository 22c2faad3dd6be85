"""Profile of a model that trains under a plan: its own steps are measured, and nothing is whole but what the plan
gathers.

Time in which compute waits for messages is not counted. Operators are
watched in the first step, so that a view of a parameter that is used where its unit has been freed gathers the unit
again, and is known to the next plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from mdcs.model.optimizers import Updates
from mdcs.model.units import ModelUnit
from mdcs.profile.schema import INPUTS, Profile
from mdcs.profiler.alias_tracker import AliasTracker, refuse_kept
from mdcs.profiler.regression import p10_p90
from mdcs.profiler.slot_recorder import Measures, SlotRecorder
from mdcs.profiler.unit_tensors import UnitTensors
from mdcs.runtime.engine import Engine
from mdcs.runtime.slots import BatchSizes, in_words
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Meter, Reading
from mdcs.torch_compat import ModuleHook, backward_pass


def without_passes(units: list[ModelUnit], meter: Meter, device: torch.device) -> SlotRecorder:
    """Return a recorder without passes."""
    return SlotRecorder(units, meter, device, None, activations=lambda _: 0)


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
        self._uses, self._watching = AliasTracker(engine.storages, self), contextlib.ExitStack()
        self.recorder = SlotRecorder(
            engine.units, engine.meter, engine.device, engine.sequencer, self._activations, self._uses.off
        )
        self._batch = BatchSizes(module for unit in engine.units for module in unit.modules)
        self._watched: list[list[float]] | None = None  # seconds of the first step
        self._closed = [False] * len(engine.storages)  # units that would be open, now or after their forward
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
            self._watching.enter_context(self._closed_outside())

    def end_step(self) -> None:
        """End a step."""
        recorder = self.recorder
        if self._watches:
            self._watch_no_more()
            refuse_kept(self.storages)
            self._watched, recorder.seconds, recorder.came = recorder.seconds, [], {}
            self._engine.recorder.begin_timing()
        recorder.restart(Measures(True, not recorder.meter.disturbs))

    @contextlib.contextmanager
    def _closed_outside(self) -> Iterator[None]:
        """Close units in a forward pass of the model while none of their modules runs.

        So a use that no hook announces is known, also of a unit that is whole. Backward has all of them open.
        """
        engine, recorder, storages = self._engine, self.recorder, self.storages
        closed = self._closed

        def begins(module: torch.nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and not recorder.is_in_pass and backward_pass() == -1:
                closed[:] = [storage.guard.is_open for storage in storages]
                for storage in storages:
                    storage.guard.close()

        def leaves(u: int, module: torch.nn.Module, args: Any, output: Any) -> None:
            if closed[u] and recorder.has_left(u):
                storages[u].guard.close()

        def ends(module: torch.nn.Module, args: Any, output: Any) -> None:
            for u, storage in enumerate(storages):
                if closed[u]:
                    storage.guard.open()
            closed[:] = [False] * len(storages)

        model = engine.model
        handles = [model.register_forward_pre_hook(ModuleHook(begins), prepend=True)]
        for u, unit in enumerate(engine.units):
            left = ModuleHook(functools.partial(leaves, u))
            handles += [module.register_forward_hook(left, always_call=True) for module in unit.modules]
        handles.append(model.register_forward_hook(ModuleHook(ends), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

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
        if not storage.guard.is_open and not self._closed[unit]:
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
