"""Profile of a model that trains under a plan: its own steps are measured, and nothing is whole but what the plan
gathers.

Time in which compute waits for messages is not counted. Operators are watched in the first step, so that a view of a
parameter that is used where its unit has been freed gathers the unit again, and is known to the next plan.

Recomputation is measured in two more runs: all units that can free their activations keep only their inputs, then also
the outputs of matrix products. The numbers of each unit are differences to the run in which all activations were kept.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mdcs.model.recompute import reasons_to_keep
from mdcs.model.units import ModelUnit
from mdcs.profile.recompute import FULL, NONE, SELECTIVE, RecomputeOption, RecomputeUse
from mdcs.profile.schema import INPUTS, Profile
from mdcs.profiler.slot_recorder import SlotRecorder
from mdcs.profiler.stages import Listener
from mdcs.profiler.step_tensors import AliasTracker, UnitTensors, refuse_kept
from mdcs.runtime.engine import Engine
from mdcs.runtime.slots import BatchSizes, in_words
from mdcs.torch_compat import ModuleHook, backward_pass


class RunningSteps(Listener):
    """Records the steps of a run from now on, until :meth:`stop`.

    The first step is watched operator by operator, and timed only if no other is. Slots are those of the first pass;
    passes of another order are left out. ``like``: slots to record instead, without watching.
    """

    def __init__(self, engine: Engine, *, like: SlotRecorder | None = None) -> None:
        self._engine, self._storages, sequencer = engine, engine.storages, engine.sequencer
        self._uses, self._watching = AliasTracker(engine.storages, self.used), contextlib.ExitStack()
        self.recorder = SlotRecorder(engine, self._uses.off)
        self._batch = BatchSizes(module for unit in engine.units for module in unit.modules)
        self._watched: list[list[float]] | None = None  # seconds of the first step
        self._closed = [False] * len(engine.storages)  # units that would be open, now or after their forward
        # the recorder reads the windows
        self._watches_memory, sequencer.watches_memory = sequencer.watches_memory, False
        self._watches = like is None
        if like is not None:
            self.recorder.order, self.recorder.spans = like.order, like.spans
            self.recorder.live, self.recorder.peak = [0] * len(like.order), [0] * len(like.order)
        engine.observe(self.recorder)
        if self._watches:
            self._watching.enter_context(self._watch())
            self._uses.start()

    def end_step(self) -> None:
        """End a step."""
        recorder = self.recorder
        if self._watches:
            self._watch_no_more()
            refuse_kept(self._storages)
            self._watched, recorder.seconds, recorder.came = recorder.seconds, [], {}
            self._engine.recorder.begin_timing()
        recorder.reads_bytes = not recorder.meter.disturbs
        recorder.restart()

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Let the recorder know what units are given and return, and the modules that a checkpoint of the model runs
        again. Close units in a forward pass of the model while none of their modules runs: so a use that no hook
        announces is known, also of a unit that is whole. Backward has all of them open.
        """
        model, recorder, storages, closed = self._engine.model, self.recorder, self._storages, self._closed
        found = weakref.ref(recorder)

        def note_rerun(module: nn.Module, args: Any) -> None:
            if (listening := found()) is not None and backward_pass() != -1:
                listening.rerun.add(module)

        def begins(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled() and not recorder.is_in_pass and backward_pass() == -1:
                closed[:] = [storage.guard.is_open for storage in storages]
                for storage in storages:
                    storage.guard.close()

        def leaves(u: int, module: nn.Module, args: Any, output: Any) -> None:
            if closed[u] and recorder.has_left(u):
                storages[u].guard.close()

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            for u, storage in enumerate(storages):
                if closed[u]:
                    storage.guard.open()
            closed[:] = [False] * len(storages)

        with UnitTensors(recorder.model_units) as recorder.tensors:
            handles = [register_module_forward_pre_hook(note_rerun)]
            handles.append(model.register_forward_pre_hook(ModuleHook(begins), prepend=True))
            for u, unit in enumerate(recorder.model_units):
                left = ModuleHook(functools.partial(leaves, u))
                handles += [module.register_forward_hook(left, always_call=True) for module in unit.modules]
            handles.append(model.register_forward_hook(ModuleHook(ends), always_call=True))
            try:
                yield
            finally:
                recorder.tensors = None
                for handle in handles:
                    handle.remove()

    def _watch_no_more(self) -> None:
        self._uses.stop()
        self._watching.close()
        self._watches = False

    def forget(self) -> None:
        """Forget the pass under way."""
        self.recorder.restart()

    def stop(self) -> None:
        """Listen no more."""
        self._watch_no_more()
        self._batch.remove()
        self._engine.sequencer.watches_memory = self._watches_memory
        self._engine.observe(None)

    def profile(self, before: Profile) -> Profile:
        """Return the profile ``before`` with what was recorded on this rank."""
        recorder = self.recorder
        recorder.seconds = recorder.seconds or self._watched or []
        sizes, spread = self._batch.sizes, dict[str, tuple[float, float]]()
        about = before.about | ({} if sizes is None else {INPUTS: in_words(sizes)})
        for i, samples in enumerate(zip(*recorder.seconds, strict=True)):
            low, high = np.percentile(samples, (10, 90)).tolist()
            spread[f"slot {i}"] = low, high
        units, slots = recorder.units(before.units), recorder.slots()
        return replace(before, units=units, slots=slots, about=about, spread=spread)

    def used(self, unit: int, offset: int) -> None:
        """Note that the unit's parameter at ``offset`` (elements) is used now; make the unit whole if it is not."""
        storage = self._storages[unit]
        if storage.is_full and not self.recorder.is_in_pass:
            return
        index = max((p.offset, i) for i, p in enumerate(storage.places) if p.offset <= offset)[1]
        if not storage.guard.is_open and not self._closed[unit]:
            problem = self._engine.access.refuse(unit, storage.names[index], "a view of it")
            if problem is not None:
                raise problem
        self.recorder.used(unit, index)


# ---- recomputation


def reasons_against(model: nn.Module, units: Sequence[ModelUnit], base: SlotRecorder) -> list[str]:
    """Return for each unit why it keeps its activations, as the passes of ``base`` show; "" if it need not."""
    reasons = reasons_to_keep(model, units)
    for u, unit in enumerate(units):
        if reasons[u]:
            continue
        if (u, "F") not in base.spans or (u, "B") not in base.spans:
            reasons[u] = "no gradient flows through it"
        elif u in base.aliased:
            reasons[u] = "its parameters are used outside of it"
        elif u in base.changing:
            reasons[u] = "its forward changes a buffer, so it cannot be computed again with the same result"
        elif any(m in base.rerun for m in unit.modules[0].modules()):
            reasons[u] = "the model checkpoints it already"
    return reasons


def recompute_options(
    base: SlotRecorder, found: SlotRecorder, able: Sequence[int], choice: str
) -> list[RecomputeOption]:
    """Return the options of all units that free something, from passes in which the ``able`` ones recompute."""
    if not able:
        return []
    base.keep(max(0, found.live[0] - base.live[0]))
    forward_slots = sum(phase == "F" for _, phase in base.order)
    less = [before - now for before, now in zip(base.live, found.live, strict=True)]
    after = [*less[1:], 0]
    uses = defaultdict[int, list[RecomputeUse]](list)
    early = {use: after[use[1]] - less[use[1]] for use in found.recomputations if use[0] in able}
    freed: dict[tuple[int, int, int], int] = {}  # negative: units that keep more, as the random state does
    # the last backward first: few units are still to come
    for use in sorted(early, key=lambda use: use[2], reverse=True):
        unit, forward, backward = use
        others = [other for other in freed if other[1] < backward <= other[2]]
        at_start = less[backward] - sum(freed[other] for other in others)
        late = less[backward] - after[backward]  # none: what came free in its forward is another unit's output
        freed[use] = min(early[use] - base.shared.get(unit, 0), at_start if late > 0 else late)
        # Its output, which the next unit keeps until its own backward is over, and nobody after that.
        output = less[backward] - early[use] - sum(early[other] for other in others)
        output = min(max(0, output), base.outputs.get(unit, 0))
        uses[unit].append(
            RecomputeUse(
                forward, backward - forward_slots, max(0, freed[use]), statistics.median(found.recomputations[use]),
                peak=max(0, found.peak[backward] - found.live[backward] - output),
                # Others free bytes in this slot, too.
                forward_peak=found.peak[forward] - base.peak[forward] + less[forward],
            )
        )  # fmt: skip
    return [
        RecomputeOption(u, choice, tuple(sorted(uses[u], key=lambda use: use.forward)))
        for u in able
        if any(use.freed for use in uses[u])
    ]


def with_recomputation(profile: Profile, choice: dict[int, bool]) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile in which these units may recompute, as far as anybody knows for nothing; the choice of each.
    ``choice``: unit -> whether it is selective.
    """
    chosen = {u: SELECTIVE if selective else FULL for u, selective in choice.items()}
    uses = {u: tuple(RecomputeUse(f, b, 0, 0.0, 0) for f, b in _slots_of(profile, u)) for u in chosen}
    options = tuple(RecomputeOption(u, each, uses[u]) for u, each in chosen.items())
    return replace(profile, recompute=options), tuple(chosen.get(u, NONE) for u in range(len(profile.units)))


def estimated(profile: Profile, able: Sequence[int], outputs: dict[int, int]) -> tuple[RecomputeOption, ...]:
    """Return full recomputation as the slots of ``profile`` tell it, for a model that takes another path in each step.

    A unit frees what its forward has added, but for its ``outputs`` (bytes), which the next unit keeps; it computes as
    long as its forward, and then holds again what it has freed.
    """
    options = []
    for u in able:
        uses = []
        for f, b in _slots_of(profile, u):
            forward, backward = profile.slots[f], profile.slots[profile.forward_slots + b]
            freed = max(0, profile.slots[f + 1].live - forward.live - outputs.get(u, 0))
            uses.append(RecomputeUse(f, b, freed, forward.seconds, max(0, backward.peak - backward.live) + freed))
        if any(use.freed for use in uses):
            options.append(RecomputeOption(u, FULL, tuple(uses)))
    return tuple(options)


def _slots_of(profile: Profile, unit: int) -> list[tuple[int, int]]:
    """Return the forward and the backward slot of each use of a unit."""
    forward, backward = profile.slots[: profile.forward_slots], profile.slots[profile.forward_slots :]
    ends = [b for b, slot in enumerate(backward) if slot.unit == unit]
    return [*zip((f for f, slot in enumerate(forward) if slot.unit == unit), ends[::-1], strict=False)]
