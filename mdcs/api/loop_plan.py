"""The plans that a training loop runs until one is chosen: its own steps are what is measured."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.api.autoplan import SECONDS, autoplan
from mdcs.model.optimizers import Optimizers, Updates, by_optimizer
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import floor_bytes, lacks_recomputation, limit_of, make_plan
from mdcs.planner.recompute import AUTO, KEEP, RecomputeRule
from mdcs.planner.schedulers import Sequential, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.planner.trials import SuccessiveHalving, proposals
from mdcs.profile import cache
from mdcs.profile.link import Collectives, Link
from mdcs.profile.schema import Profile
from mdcs.profiler.autoprofile import needs_rings, used_outside
from mdcs.profiler.calibration import calibration_plans
from mdcs.profiler.consensus import all_gather_object, merge_profiles, on_all_ranks, on_rank_zero, phase
from mdcs.profiler.cost_fit import Run, fit_costs
from mdcs.profiler.first_passes import FirstPasses
from mdcs.profiler.job_identity import key_of_job
from mdcs.profiler.memory_bounds import require_model_fits, warn_padding, whole_bytes
from mdcs.profiler.model_profile import assembled
from mdcs.profiler.progress import tell
from mdcs.profiler.recompute_profile import estimated, recomputation, with_recomputation
from mdcs.profiler.running_steps import RunningSteps, StepClock, TimedSteps, without_passes
from mdcs.runtime.communicator import backend_of
from mdcs.runtime.context import StepRecord
from mdcs.runtime.engine import Engine
from mdcs.runtime.errors import RunError
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.memory_meter import current_meter

logger = logging.getLogger(__name__)

STEPS = 2
"""Steps whose slots are measured: the first is watched operator by operator, the other is timed."""
TRIED = 2
"""Steps under a calibration plan: of a period, from backward to backward, and of the forward before."""
TRIALS = 3
"""Plans that take turns, by default."""
WATCHED = 50
"""Steps whose median tells a lasting change."""
_DIFFERENT = 0.1  # of the step's time
_MOST_TRIED = 12  # steps of all of them: with those before, the chosen plan runs by step 25
_SOLVING = 15  # of the time for planning, the part of a solver that proposes another plan


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


class Listener(Protocol):
    """Measures steps of a run."""

    def end_step(self) -> None:
        """End a step."""

    def forget(self) -> None:
        """Forget the step under way, which the loop gives up."""

    def stop(self) -> None:
        """Listen no more."""


@dataclass(frozen=True)
class Stage:
    """So many ``steps`` of the loop under one plan, with what ``listen`` makes."""

    plan: Plan
    steps: int
    listen: Callable[[Engine], Listener]
    chooses: bool = True  # whether the plan may be another one after it


@dataclass(frozen=True)
class Ran:
    """A stage that is over: its run, between two steps, what has listened, and the records of its steps."""

    engine: Engine
    heard: Listener
    records: list[StepRecord]


class Choice:
    """The plans of a loop, one after the other, until one is chosen.

    ``stage``: the stage under way; None once the plan is chosen. ``plan``: the plan to run now. ``trials``: a line for
    each plan that was tried.
    """

    def __init__(self, making: LoopPlan, model: nn.Module, optimizers: Optimizers, device: torch.device) -> None:
        self.trials = making.trial_table
        self._stages, self._tells = making.stages(model, optimizers, device), making.progress
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
                self.plan = self.stage.plan
            except StopIteration as end:
                self.stage, self.plan = None, end.value


Stages = Generator[Stage, Ran, Plan]


@dataclass(frozen=True)
class LoopPlan:
    """How the plan of a loop is made. :func:`mdcs.parallelize` describes the options.

    - ``sharded``: whether the first steps are, because the model does not fit whole.
    - ``cross_iteration``: whether updates may run in the next iteration.
    - ``micro_steps``: backward passes of a step; None: as many as the first step has, or one if it is sharded.
    - ``folder``: the folder of kept profiles; None: none is kept or used.
    - ``replans``: whether lasting changes of the step's time start another choice.
    - ``trials``: plans that take turns. ``trial_table``: a line for each of them, once there is a choice.
    """

    units: list[ModelUnit]
    budget: Budget
    recompute: RecomputeRule
    sharded: bool
    cross_iteration: bool
    seconds: float = SECONDS
    progress: bool = True
    micro_steps: int | None = None
    folder: Path | None = None
    trials: int = TRIALS
    replans: bool = False
    trial_table: list[str] = field(default_factory=list)

    def stages(self, model: nn.Module, optimizers: Optimizers, device: torch.device) -> Stages:
        """Yield what the loop is to run; return the plan that goes on. Collective.

        1. Under a provisional plan the passes of the first step are counted, unless it is sharded; a profile that an
           earlier start has kept may follow from it.
        2. The slots are measured in the next steps; where the budget needs it, with recomputation, too.
        3. Plans that tell the costs of messages apart run for a few steps each.
        4. The plan that is made with all this and a few others that differ take turns; the fastest one goes on.
        """
        plan = self._provisional(self._unmeasured(optimizers, device), self.micro_steps or 1)
        path, micro_steps = None, self.micro_steps or 1
        if not self.sharded:
            modules = [module for unit in self.units for module in unit.modules]
            ran = yield Stage(plan, 1, functools.partial(FirstPasses, modules=modules, given=self.micro_steps))
            first = ran.heard
            assert isinstance(first, FirstPasses)
            micro_steps = self._agreed(first.micro_steps, ran.engine.rank)
            if self.folder is not None:
                others = "" if self.recompute in (KEEP, AUTO) else "; recomputation"
                key = key_of_job(model, self.units, optimizers, first.in_words() + others)
                path = self.folder / f"{key}.json"
                known = on_rank_zero(lambda: self._sufficient(cache.read(path), micro_steps))
                if known is not None:
                    if ran.engine.rank == 0 and self.progress:
                        tell(f"profile of an earlier start: {path}", logger)
                    return (yield from self._goes_on(ran.engine, known, micro_steps))
            if micro_steps != plan.micro_steps:
                plan = self._provisional(plan.job.profile, micro_steps)
        ran, profile = yield from self._profiled(plan, micro_steps)
        torch.compiler.reset()  # what was compiled while operators were watched
        profile = yield from self._calibrated(profile, micro_steps)
        if path is not None and ran.engine.rank == 0:
            cache.keep(profile, path)
        return (yield from self._goes_on(ran.engine, profile, micro_steps))

    # -- the provisional plan

    def _unmeasured(self, optimizers: Optimizers, device: torch.device) -> Profile:
        """Return a profile of a model that has not run: slots in the order of the units, all of no time. Collective."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.budget.size is not None:
            require_model_fits(self.units, optimizers.members, self.budget.size, world, None)
        backend = backend_of(None, device) if world > 1 else ""
        updates = Updates(optimizers)
        units = by_optimizer(self.units, updates)
        return merge_profiles(
            assembled(
                units, updates, without_passes(units, current_meter(device), device), device,
                world=world, link=Link.uniform(1.0, 50.0),
                collectives=Collectives.default(backend) if backend else Collectives(),
            )  # fmt: skip
        )

    def _provisional(self, profile: Profile, micro_steps: int, recompute: tuple[str, ...] = ()) -> Plan:
        """Return a plan of the fewest bytes, or of no shards. Collective.

        Whatever the steps do otherwise is a departure. Raises InfeasibleBudget for a model that has not run.
        """
        strategy, job = Uniform("fsdp" if self.sharded else "dp"), Job(profile, micro_steps, self.cross_iteration)
        limit = self.budget.size if self.sharded and not recompute else None
        job = dataclasses.replace(job, recompute=recompute)
        # What messages cost compute beside them is told apart later. They are kept apart from it where activations are
        # all that the run does not know of (CUDA), and where slots are compared with each other (recomputation).
        is_cpu, keeps = self.units[0].parameters[0][1].device.type == "cpu", self.recompute == KEEP
        overlaps = is_cpu and not self.sharded and (keeps or not self.budget.is_limit)
        return on_rank_zero(lambda: make_plan(job, strategy, Wfbp() if overlaps else Sequential(), budget=limit))

    def _agreed(self, micro_steps: int, rank: int) -> int:
        """Return the number of backward passes. Raises RunError unless it is that of all ranks."""
        counts = all_gather_object(micro_steps)
        if len(set(counts)) > 1:
            raise RunError(f"rank {rank}: ranks had different numbers of backward passes in the first step: {counts}")
        return micro_steps

    # -- what is measured

    def _profiled(self, plan: Plan, micro_steps: int) -> Generator[Stage, Ran, tuple[Ran, Profile]]:
        """Return the last run and the profile of slots and bytes: messages have no measured costs yet."""
        phase(f"measuring the model in {STEPS} steps of training")
        ran = yield Stage(plan, STEPS, RunningSteps)
        steps = ran.heard
        assert isinstance(steps, RunningSteps)
        updates = ran.engine.updates.updates
        own = steps.profile(plan.job.profile, updates)
        profile = merge_profiles(own)
        job = Job(profile, micro_steps, self.cross_iteration)
        if on_rank_zero(lambda: needs_rings(job, self.budget, steps.device)):
            own, profile = (dataclasses.replace(each, collectives=Collectives("ring")) for each in (own, profile))
            job = dataclasses.replace(job, profile=profile)
        needed = self.recompute == AUTO and on_rank_zero(lambda: lacks_recomputation(job, self.budget))
        if needed or self.recompute not in (AUTO, KEEP):
            phase("measuring the model in steps that recompute activations")
            ran, profile = yield from self._recomputing(ran, own, job)
        if ran.engine.rank == 0:
            warn_padding(profile)
        if line := used_outside(profile):
            phase(line)
        return ran, profile

    def _recomputing(self, ran: Ran, own: Profile, job: Job) -> Generator[Stage, Ran, tuple[Ran, Profile]]:
        """Return the last run, and the job's profile with what recomputation frees and costs.

        ``own``: this rank's profile.
        """
        steps = ran.heard
        assert isinstance(steps, RunningSteps)
        base = steps.recorder
        asked = recomputation(ran.engine.model, ran.engine.units, base)
        choice = next(asked)
        while True:
            # the same on all ranks: those that took another branch may know of more units
            of_ranks = all_gather_object(choice)
            agreed = {u: selective for u, selective in of_ranks[0].items() if all(u in other for other in of_ranks)}
            profile, recompute = with_recomputation(job.profile, agreed)
            plan = self._provisional(profile, job.micro_steps, recompute)
            ran = yield Stage(plan, STEPS, functools.partial(RunningSteps, like=base))
            steps = ran.heard
            assert isinstance(steps, RunningSteps)
            if not all(all_gather_object(bool(steps.recorder.seconds))):
                # some rank has run other slots than before: it would have to be compared with itself
                outputs = {u: max(of.get(u, 0) for of in all_gather_object(base.outputs)) for u in agreed}
                return ran, dataclasses.replace(job.profile, recompute=estimated(job.profile, [*agreed], outputs))
            try:
                choice = asked.send(steps.recorder)
            except StopIteration as end:
                options, kept = end.value
                measured = dataclasses.replace(own, recompute=options, about=own.about | kept)
                return ran, merge_profiles(measured)

    def _calibrated(self, profile: Profile, micro_steps: int) -> Generator[Stage, Ran, Profile]:
        """Return the profile with the costs of messages and of compute beside them, from steps under other plans."""
        if profile.world == 1:
            return profile
        job, runs = Job(profile, micro_steps, self.cross_iteration), []
        for plan in on_rank_zero(lambda: self._calibration_plans(job)):
            phase(f"measuring messages in {TRIED} steps under {_name(plan)}")
            ran = yield Stage(plan, TRIED, TimedSteps)
            of_ranks = all_gather_object([*ran.engine.recorder.traces().values()])
            runs.append(Run(plan, [trace for of_rank in of_ranks for trace in of_rank]))
        found = fit_costs(profile, runs)
        if found.reliability_warning and ran.engine.rank == 0:
            warnings.warn(found.reliability_warning, stacklevel=2)
        return found

    def _calibration_plans(self, job: Job) -> list[Plan]:
        """Return the calibration plans, with the recomputation that the budget needs."""
        limit = limit_of(self.budget, job, self.recompute)
        if limit is not None and limit < floor_bytes(job):
            job = make_plan(job, Greedy(), Sequential(), budget=limit, recompute=self.recompute).job
        # one after the other those that a change between moves little: of alike strategies, then of alike blocks
        return sorted(calibration_plans(job, limit), key=lambda plan: (plan.strategies, sum(map(len, plan.blocks))))

    # -- the plan

    def _chosen(self, engine: Engine, profile: Profile, micro_steps: int) -> Generator[Stage, Ran, Plan]:
        """Return the plan of this profile, or the one of a few others that is measured to be faster."""
        plan = autoplan(
            engine.model, engine.optimizers.members, self.units, _no_step, budget=self.budget,
            recompute=self.recompute, micro_steps=micro_steps, cross_iteration=self.cross_iteration, profile=profile,
            seconds=self.seconds, progress=self.progress,
        )  # fmt: skip
        if self.trials == 1 or profile.world == 1:
            return plan
        phase("planning others that differ")
        plans = on_rank_zero(
            lambda: proposals(plan, self.trials, recompute=self.recompute, seconds=self.seconds / _SOLVING)
        )
        plans.sort(key=lambda each: _apart(plan, each))  # in turns to and fro, so neighbours should be alike
        halving = SuccessiveHalving(len(plans), steps=_MOST_TRIED)
        while (turn := halving.turn) > 0:
            phase(f"training under {_name(plans[halving.current])}")
            ran = yield Stage(plans[halving.current], turn, TimedSteps)
            for seconds in map(max, zip(*all_gather_object([r.times.step_s for r in ran.records]), strict=True)):
                halving.add(seconds)
        self.trial_table[:] = _in_words(plans, halving)
        return plans[halving.current]

    def _goes_on(self, engine: Engine, profile: Profile, micro_steps: int) -> Generator[Stage, Ran, Plan]:
        """Return the chosen plan; with ``replans`` choose anew, for ever, when its steps take another time than usual.

        Link and contention are measured anew then, slots and bytes are not.
        """
        plan = yield from self._chosen(engine, profile, micro_steps)
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
            profile = yield from self._calibrated(profile, micro_steps)
            plan = yield from self._chosen(engine, profile, micro_steps)
        return plan

    def _sufficient(self, known: Profile | None, micro_steps: int) -> Profile | None:
        """Return the profile unless the budget needs rings, or recomputation, of which it knows nothing."""
        if known is None:
            return None
        job, device = Job(known, micro_steps, self.cross_iteration), self.units[0].parameters[0][1].device
        if needs_rings(job, self.budget, device) or self.recompute == AUTO and lacks_recomputation(job, self.budget):
            return None
        return known


def _name(plan: Plan) -> str:
    return " ".join(dict.fromkeys((plan.strategy, plan.scheduler)))


def _apart(plan: Plan, other: Plan) -> int:
    """Return how many bytes of units the plans cut differently, counted twice where one of them does not cut."""
    pairs = zip(plan.profile.layouts, plan.strategies, plan.blocks, other.strategies, other.blocks, strict=True)
    differ = [(layout.param_bytes, k, to) for layout, k, b, to, its in pairs if (k, b) != (to, its)]
    return sum(size * (1 + (k.sharded_update != to.sharded_update)) for size, k, to in differ)


def _in_words(plans: Sequence[Plan], halving: SuccessiveHalving) -> Iterator[str]:
    """Yield a line for each candidate: what was predicted and measured."""
    for plan, own in zip(plans, halving.table(), strict=True):
        assert plan.prediction is not None
        words = f"{_name(plan)}, {len(plan.messages)} messages: {own.median_s * 1e3:.1f} ms"
        if own.candidate == halving.current:
            words += ", chosen"
        else:
            words += f", {own.slower_s * 1e3:+.1f} ± {own.interval_s * 1e3:.1f} ms"
            words += f", dropped in round {own.dropped}" if own.dropped is not None else ""
        yield f"{words} ({own.rounds} rounds, {own.steps} steps; {plan.prediction.step_s * 1e3:.1f} ms predicted)"


def _no_step() -> Tensor:
    raise AssertionError("the profile is known")
