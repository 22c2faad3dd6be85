"""The plans that a training loop runs until one is chosen: its own steps are what is measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mdcs.api.planning import Planning
from mdcs.model.optimizers import Optimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import lacks_recomputation
from mdcs.planner.recompute import AUTO, KEEP
from mdcs.profile import cache
from mdcs.profile.schema import Profile
from mdcs.profiler.autotune import Trial, chosen, take_turns
from mdcs.profiler.consensus import all_gather_object, on_all_ranks, on_rank_zero, phase
from mdcs.profiler.first_passes import FirstPasses
from mdcs.profiler.job_identity import key_of_job
from mdcs.profiler.measurement import Measurement, Ran, Stage
from mdcs.profiler.memory_bounds import whole_bytes
from mdcs.profiler.running_steps import StepClock
from mdcs.runtime.errors import RunError
from mdcs.sizes import MIB

TRIALS = 3
"""Plans that may take turns, by default."""
WATCHED = 50
"""Steps whose median tells a lasting change."""
_DIFFERENT = 0.1  # of the step's time
_TRIED = 8  # steps of two plans in turns, and of the others if they are tried


def must_shard(units: Sequence[ModelUnit], optimizers: Optimizers, limit: int | None) -> tuple[bool, str]:
    """Return whether the first step must be sharded, and why, in words ("" where there is nothing to decide).

    True for a model on the meta device, or if parameters, gradients and optimizer state take more than ``limit`` bytes
    and there are ranks to share them. Activations are not counted: they are unknown before the first step.
    """
    if any(p.is_meta for unit in units for _, p in unit.parameters):
        return True, "the model is on the meta device: it is sharded from the start"
    if limit is None:
        return False, ""
    size, world = whole_bytes(units, optimizers), dist.get_world_size() if dist.is_initialized() else 1
    said = f"parameters, gradients and optimizer state take {size / MIB:.1f} MiB of a budget of {limit / MIB:.1f} MiB"
    sharded = size > limit and world > 1
    return sharded, f"{said}: {'sharded from the start' if sharded else 'whole in the first steps'}"


class Choice:
    """The plans of a run, one after the other, until one is chosen.

    ``stages``: yields what the run is to run. ``stage``: the stage under way; None once the plan is chosen. ``plan``:
    the plan to run now, in the end the last one or the one that ``stages`` returns. ``result``: what it returns.
    ``trials``: the plans that were tried.
    """

    result: Any = None

    def __init__(
        self, stages: Generator[Stage, Ran, Any], trials: Sequence[Trial] = (), *, tells: bool = False
    ) -> None:
        self._stages, self.trials, self._tells = stages, trials, tells
        self.stage: Stage | None = None
        self.plan: Plan
        self._go_on(lambda: next(self._stages))

    def end_stage(self, ran: Ran) -> None:
        """Go on to the next stage, or to the chosen plan. Collective. Raises what planning raises."""
        self._go_on(lambda: self._stages.send(ran))

    def _go_on(self, stage: Callable[[], Stage]) -> None:
        with torch.enable_grad(), on_all_ranks(tells=self._tells):
            try:
                self.stage = stage()
                self.plan = self.stage.plan or self.plan
            except StopIteration as end:
                self.stage, self.result = None, end.value
                if isinstance(end.value, Plan):
                    self.plan = end.value


@dataclass(frozen=True)
class LoopPlan:
    """Options by which a loop makes its plan.

    - ``measurement``, ``planning``: of the profile, and of plans.
    - ``cross_iteration``: whether updates may run in the next iteration.
    - ``micro_steps``: backward passes of a step; None: as many as the first step has, or one if it is sharded.
    - ``folder``: the folder of kept profiles; None: none is kept or used.
    - ``replans``: whether lasting changes of the step's time start another choice.
    - ``trials``: the plans that were tried, once there is a choice.
    """

    measurement: Measurement
    planning: Planning
    cross_iteration: bool
    micro_steps: int | None = None
    folder: Path | None = None
    replans: bool = False
    trials: list[Trial] = field(default_factory=list)

    def stages(self) -> Generator[Stage, Ran, Plan]:
        """Yield what the loop is to run; return the plan that is kept. Collective.

        1. Under a provisional plan the passes of the first step are counted, unless it is sharded; a profile that an
           earlier start has kept may follow from it.
        2. The slots are measured in the next steps; where the budget needs it, with recomputation, too.
        3. Plans that tell the costs of messages apart run for a few steps each.
        4. The plan that is made with all this, while training goes on, and a few others that differ take turns; the
           fastest one is kept.
        """
        measuring = self._with_passes(self.micro_steps or 1)
        plan = measuring.provisional(measuring.unmeasured())
        path = None
        if not measuring.sharded:
            modules = [module for unit in measuring.units for module in unit.modules]
            ran = yield Stage(plan, 1, functools.partial(FirstPasses, modules=modules, given=self.micro_steps))
            first = ran.heard
            assert isinstance(first, FirstPasses)
            micro_steps = self._agreed(first.micro_steps, ran.engine.rank)
            measuring = self._with_passes(micro_steps)
            if self.folder is not None:
                others = "" if measuring.recompute in (KEEP, AUTO) else "; recomputation"
                key = key_of_job(ran.engine.model, measuring.units, measuring.optimizers, first.in_words() + others)
                path = self.folder / f"{key}.json"
                known = on_rank_zero(lambda: self._sufficient(cache.read(path), measuring))
                if known is not None:
                    phase(f"profile of an earlier start: {path}")
                    return (yield from self._goes_on(measuring, known))
            if micro_steps != plan.micro_steps:
                plan = measuring.provisional(plan.job.profile)
        profile = yield from measuring.profile(plan)
        if path is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            cache.keep(profile, path)
        return (yield from self._goes_on(measuring, profile))

    def _with_passes(self, micro_steps: int) -> Measurement:
        """Return the measurement of a job with so many backward passes in a step."""
        job = functools.partial(Job, micro_steps=micro_steps, cross_iteration=self.cross_iteration)
        return dataclasses.replace(self.measurement, job=job)

    def _agreed(self, micro_steps: int, rank: int) -> int:
        """Return the number of backward passes. Raises RunError unless it is that of all ranks."""
        counts = all_gather_object(micro_steps)
        if len(set(counts)) > 1:
            raise RunError(f"rank {rank}: ranks had different numbers of backward passes in the first step: {counts}")
        return micro_steps

    def _chosen(self, measuring: Measurement, profile: Profile) -> Generator[Stage, Ran, Plan]:
        """Return the plan of this profile, or the one of a few others that is measured to be faster."""
        making = self.planning.begin(measuring.job(profile), measuring.device, beside=True)
        yield Stage(None, 1, StepClock, waits_for=making.is_done)
        plans = making.result()
        if len(plans) == 1:
            return plans[0]
        self.trials[:] = yield from take_turns(plans, _TRIED * min(2, len(plans) - 1))
        return chosen(self.trials)

    def _goes_on(self, measuring: Measurement, profile: Profile) -> Generator[Stage, Ran, Plan]:
        """Return the chosen plan; with ``replans`` choose anew, for ever, when its steps take another time than usual.

        Link and contention are measured anew then, slots and bytes are not.
        """
        plan = yield from self._chosen(measuring, profile)
        while self.replans:
            usual: float | None = None
            while True:
                ran = yield Stage(plan, WATCHED, StepClock, chooses=False)
                assert isinstance(ran.heard, StepClock)
                now = max(all_gather_object(ran.heard.median_s))
                usual = usual or now
                if abs(now - usual) > _DIFFERENT * usual:
                    break
            phase(f"steps take {now * 1e3:.0f} ms, and took {usual * 1e3:.0f}: choosing a plan anew")
            profile = yield from measuring.costs(profile)
            plan = yield from self._chosen(measuring, profile)
        return plan

    @staticmethod
    def _sufficient(known: Profile | None, measuring: Measurement) -> Profile | None:
        """Return the profile unless the budget needs recomputation, of which it knows nothing."""
        if known is None or measuring.recompute != AUTO:
            return known
        return None if lacks_recomputation(measuring.job(known), measuring.budget) else known
