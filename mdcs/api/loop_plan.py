"""Plans from a profile, made on rank 0; and the plans that a training loop runs until one is chosen: its own steps are
what is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mdcs.model.optimizers import Optimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import (
    JointPlanner,
    Scheduler,
    StrategyPlanner,
    decides_schedule,
    lacks_recomputation,
    limit_of,
    scheduler_named,
    strategy_named,
    unsharded_bytes,
)
from mdcs.planner.priority import Priority
from mdcs.planner.recompute import AUTO, KEEP, RecomputeRule, in_words
from mdcs.planner.schedulers import Solving
from mdcs.planner.trials import call_apart, make_plans
from mdcs.profile import cache
from mdcs.profile.schema import Profile
from mdcs.profiler.consensus import Begun, all_gather_object, on_all_ranks, on_rank_zero, phase
from mdcs.profiler.first_passes import FirstPasses, key_of_job
from mdcs.profiler.measurement import Measurement, whole_bytes
from mdcs.profiler.stages import Ran, Stage, StepClock, Trial, chosen, take_turns
from mdcs.runtime.errors import RunError
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.memory_meter import unmeasured

_OTHERS, _WITHIN = 15, 6  # of the time limit, the part of a solver that proposes another plan; within a budget
TRIALS = 3
"""Plans that may take turns, by default."""
WATCHED = 50
"""Steps whose median tells a lasting change."""
_DIFFERENT = 0.1  # of the step's time
_TRIED = 8  # steps of two plans in turns, and of the others if they are tried
T = TypeVar("T")


@dataclass(frozen=True)
class Planning:
    """Options by which a plan is made from a profile. :func:`mdcs.autoplan` describes the options. Planners that are
    named have ``seconds``; planners that are given have their own. Raises ValueError for an unknown name, and for
    ``trials`` below 1.
    """

    budget: Budget = Budget.of(None)
    recompute: RecomputeRule = AUTO
    strategy: str | StrategyPlanner | JointPlanner = "greedy"
    scheduler: str | Scheduler | None = None
    schedule_share: float | None = None
    trials: int = 1
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be > 0, got {self.seconds!r}")
        if self.trials < 1:
            raise ValueError(f"trials must be >= 1, got {self.trials}")
        self.planners()

    def planners(self) -> tuple[StrategyPlanner | JointPlanner, Scheduler | None]:
        """Return the planner of strategies, and of the schedule unless the first decides it, with their time limits."""
        strategy = strategy_named(self.strategy) if isinstance(self.strategy, str) else self.strategy
        schedule = scheduler_named(self.scheduler) if isinstance(self.scheduler, str) else self.scheduler
        if schedule is None and not decides_schedule(strategy):
            schedule = Priority()
        seconds = self.seconds / (1 + (isinstance(strategy, Solving) and isinstance(schedule, Solving)))
        return (
            _within(seconds, strategy) if isinstance(self.strategy, str) else strategy,
            _within(seconds, schedule) if isinstance(self.scheduler, str) else schedule,
        )

    def begin(self, job: Job, device: torch.device, *, beside: bool = False) -> Begun[list[Plan]]:
        """Begin to make the plan of the job, and up to ``trials`` - 1 others that differ, in a thread of rank 0.
        Collective. ``beside``: training goes on meanwhile, so what takes long is done in a process of its own.

        Warns of a budget that counts no activations, where ``device`` does not tell them. The result raises on every
        rank what planning raises on rank 0: InfeasibleBudget, where no plan fits.
        """
        if self.budget.is_limit and not any(slot.peak for slot in job.profile.slots):
            why = unmeasured(device) or "the profile does not have them"
            warnings.warn(f"activations count as 0 bytes of the budget: {why}", stacklevel=2)
        strategy, schedule = self.planners()
        limit = limit_of(self.budget, job, self.recompute)
        solves = isinstance(strategy, Solving) or isinstance(schedule, Solving)
        words = "" if limit is None else f" within {limit / MIB:.1f} MiB"
        if limit is not None and self.budget.size is None:
            words += f" ({self.budget})"
        phase(f"planning{words}", self.seconds if solves else None)
        made = functools.partial(
            make_plans, budget=limit, schedule_share=self.schedule_share, recompute=self.recompute, trials=self.trials,
            seconds=self.seconds / (_OTHERS if limit is None else _WITHIN),
        )  # fmt: skip
        is_long = (solves or self.trials > 1) and all(
            each is None or type(each).__module__.startswith("mdcs.") for each in (strategy, schedule, self.recompute)
        )  # a planner of the program's own may be known in this process alone

        def planned() -> list[Plan]:
            try:
                if beside and is_long:
                    return call_apart(made, job, strategy, schedule)
                return made(job, strategy, schedule)
            except InfeasibleBudget as error:
                raise error.in_words_of(self.budget, lambda: unsharded_bytes(job)) from None

        def say(plans: list[Plan]) -> None:
            if self.recompute == AUTO and (line := in_words(plans[0])):
                phase(line)

        return Begun(planned, say)


def require_measured(budget: Budget, device: torch.device) -> None:
    """Raise ValueError for a budget that depends on activations where memory cannot be measured."""
    if budget.is_limit and budget.size is None and (why := unmeasured(device)):
        raise ValueError(
            f"a budget of {budget} depends on the bytes of activations: {why}, or give the budget in bytes"
        )


def say_refusals_once() -> None:
    """Let an uncaught InfeasibleBudget, which all ranks raise, be one line of rank 0 instead of a traceback of each."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, InfeasibleBudget):
            before(kind, error, trace)
        elif not dist.is_initialized() or dist.get_rank() == 0:
            print(f"mdcs: {error}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _within(seconds: float, planner: T) -> T:
    """Return the planner with this time limit, if it uses a solver."""
    return dataclasses.replace(planner, seconds=seconds) if isinstance(planner, Solving) else planner


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
        self.go_on(None)

    def go_on(self, ran: Ran | None) -> None:
        """End a stage (None: begin), and go on to the next one, or to the chosen plan. Collective. Raises what planning
        raises.
        """
        with torch.enable_grad(), on_all_ranks(tells=self._tells):
            try:
                self.stage = next(self._stages) if ran is None else self._stages.send(ran)
                self.plan = self.stage.plan or self.plan
            except StopIteration as end:
                self.stage, self.result = None, end.value
                if isinstance(end.value, Plan):
                    self.plan = end.value


@dataclass(frozen=True)
class LoopPlan:
    """Options by which a loop makes its plan.

    - ``cross_iteration``: whether updates may run in the next iteration.
    - ``micro_steps``: backward passes of a step; None: as many as the first step has, or one if it is sharded.
    - ``folder``: of kept profiles; None: none is kept or used.
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
            micro_steps, counts = first.micro_steps, all_gather_object(first.micro_steps)
            if len(set(counts)) > 1:
                error = f"ranks had different numbers of backward passes in the first step: {counts}"
                raise RunError(f"rank {ran.engine.rank}: {error}")
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
