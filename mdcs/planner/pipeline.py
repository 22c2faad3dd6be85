"""Planners: what each is, those of mdcs by name, and their steps from a job and a byte budget to a plan: choose a mix,
schedule it, fit it to the budget, replay it.

A planner is any object with the methods below. One that a config can choose is a frozen dataclass whose fields are
options (:mod:`mdcs.options`).
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeGuard, TypeVar, cast

from mdcs.plan.job import Job
from mdcs.plan.ledger import check
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner import schedulers
from mdcs.planner.budget_repair import fastest_repair
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem, StrategyDecision
from mdcs.planner.ilp.joint import Joint, MemoryAware
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.priority import COARSER, Priority
from mdcs.planner.recompute import (
    AUTO,
    KEEP,
    Planned,
    RecomputeRule,
    fastest,
    is_measured,
    least_within,
    recompute_named,
    refined,
)
from mdcs.planner.schedulers import Solving, StrategyAssignment
from mdcs.planner.strategies import Greedy, RandomMix, Uniform
from mdcs.profile.schema import Profile
from mdcs.simulator.kernel import MAX_PERIODS
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB, Budget

_T = TypeVar("_T")


class _Named(Protocol):
    @property
    def name(self) -> str:
        """Name in tables."""


class StrategyPlanner(_Named, Protocol):
    """Chooses strategies, judged with the sequential schedule."""

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return a mix that fits the problem's budget. Raises InfeasibleBudget, with the smallest feasible budget."""


class JointPlanner(_Named, Protocol):
    """Chooses strategies and schedule together. It takes no scheduler, and divides the budget itself."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Return a plan within the problem's budget. Raises InfeasibleBudget."""


class Scheduler(_Named, Protocol):
    """Turns a mix into messages."""

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return a plan for the mix, within ``mix.budget`` or not (:mod:`mdcs.planner.budget_repair` fits it)."""


STRATEGIES: dict[str, Callable[[], StrategyPlanner | JointPlanner]] = {
    **{str(strategy): partial(Uniform, str(strategy)) for strategy in Strategy},
    "random": RandomMix, "greedy": Greedy, "ilp": Ilp, "joint": Joint,
}  # fmt: skip

SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "sequential": schedulers.Sequential, "wfbp": schedulers.Wfbp, "fusion": schedulers.Fusion,
    "mg_wfbp": schedulers.MgWfbp, "partitioning": schedulers.Partitioning, "priority": Priority,
    "dear": schedulers.Dear, "random": schedulers.RandomOrder, "memory_aware": MemoryAware,
}  # fmt: skip


def decides_schedule(strategy: StrategyPlanner | JointPlanner) -> TypeGuard[JointPlanner]:
    """Return whether the planner needs no scheduler."""
    return hasattr(strategy, "plan")


def strategy_named(name: str) -> StrategyPlanner | JointPlanner:
    """Return the strategy planner of this name. Raises ValueError, which lists the names, for an unknown name."""
    return _named("strategy", STRATEGIES, name)


def scheduler_named(name: str) -> Scheduler:
    """Return the scheduler of this name. Raises ValueError, which lists the names, for an unknown name."""
    return _named("scheduler", SCHEDULERS, name)


def _named(what: str, table: Mapping[str, Callable[[], _T]], name: str) -> _T:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: {', '.join(table)}")
    return table[name]()


# ---- the steps


def floor_bytes(job: Job | Profile, recompute: str | RecomputeRule | None = None) -> int:
    """Return the smallest feasible peak in bytes, reserve included, with the recomputation of :func:`make_plan`: the
    sequential peak of :func:`mdcs.planner.feasibility.min_peak_strategies`. A profile is a job with default settings.
    """
    return _problem(Job.of(job), None, recompute).floor


def unsharded_bytes(job: Job | Profile) -> int:
    """Return the peak of data parallelism in bytes, reserve included: every unit dp, and nothing is recomputed."""
    job = dataclasses.replace(Job.of(job), recompute=())
    return PlanningProblem(job, None).peak((Strategy.dp,) * len(job.profile.units))


def limit_of(budget: Budget, job: Job | Profile, recompute: str | RecomputeRule | None = None) -> int | None:
    """Return the budget of a job in bytes, reserve included, with the floor of :func:`floor_bytes`. None: no limit."""
    return budget.bytes(lambda: unsharded_bytes(job), lambda: floor_bytes(job, recompute))


def lacks_recomputation(job: Job, budget: Budget) -> bool:
    """Return whether no plan keeps the budget without recomputation, of which the profile knows nothing."""
    limit = None if is_measured(job.profile) else limit_of(budget, job)
    return limit is not None and limit < floor_bytes(job)


def make_plan(
    job: Job | Profile, strategy: StrategyPlanner | JointPlanner, scheduler: Scheduler | None = None, *,
    budget: int | None = None, schedule_share: float | None = None, activation_share: float | None = None,
    recompute: str | RecomputeRule | None = None,
) -> Plan:  # fmt: skip
    """Return a plan within ``budget`` bytes per rank (None: unlimited), with the prediction of its replay.

    - ``job``: a job, or a profile, which counts as a job with default settings.
    - ``strategy``: a strategy planner, or a joint planner. A joint planner takes no scheduler and no share.
    - ``schedule_share``: part s in [0, 1] of the slack above the floor that is for the schedule. The strategies may use
      floor + (1 - s)·slack, judged with the sequential schedule. The schedule's own memory (its peak minus the
      sequential peak of its mix) is capped at s·slack. None: strategies may use all, and the schedule the rest.
    - ``activation_share``: part a in [0, 1] of what ``schedule_share`` leaves, (1 - s)·slack, that is for activations.
      As little is recomputed as fits floor + a·(1 - s)·slack beside the leanest strategies. The strategies may use the
      rest. None: what is recomputed is what makes the plan fastest.
    - ``recompute``: the rule that says which units recompute their activations, or its name
      (:mod:`mdcs.planner.recompute`). None: as the job says. With ``planned`` the floor is that with recomputation, and
      without a budget nothing is recomputed. ``auto`` is ``planned`` where there is no plan with ``none``.

    Raises InfeasibleBudget, with the smallest feasible budget in bytes, and ValueError for contradicting arguments.
    """
    if schedule_share is not None and not 0 <= schedule_share <= 1:
        raise ValueError(f"schedule_share must be in [0, 1], got {schedule_share}")
    if schedule_share is not None and budget is None:
        raise ValueError("schedule_share divides a budget: set one")
    rule = recompute_named(recompute) if isinstance(recompute, str) else recompute
    if rule == AUTO and activation_share is None and budget is not None and Job.of(job).profile.recompute:
        made = partial(make_plan, job, strategy, scheduler, budget=budget, schedule_share=schedule_share)
        try:
            return made(recompute=KEEP)
        except InfeasibleBudget as e:
            with contextlib.suppress(InfeasibleBudget):
                return made(recompute=Planned())
            raise e
    problem = _problem(Job.of(job), budget, rule)
    if activation_share is not None:
        if not 0 <= activation_share <= 1:
            raise ValueError(f"activation_share must be in [0, 1], got {activation_share}")
        if schedule_share is None:
            raise ValueError("activation_share divides what schedule_share leaves: set both")
        if not problem.recomputes:
            more = "a profile that says what recomputation frees"
            raise ValueError(f"activation_share needs recompute=planned, and {more}")
    try:
        return _made(problem, strategy, scheduler, schedule_share, activation_share)
    except InfeasibleBudget as e:
        if problem.recomputes or problem.job.recompute or not problem.job.profile.recompute or e.smallest is None:
            raise
        lower = floor_bytes(problem.job, Planned())
        if lower >= e.smallest:
            raise
        raise InfeasibleBudget(e.budget, e.smallest, e.what, e.is_bound, lower) from e


def _made(
    problem: PlanningProblem, strategy: StrategyPlanner | JointPlanner, scheduler: Scheduler | None,
    schedule_share: float | None, activation_share: float | None,
) -> Plan:  # fmt: skip
    if decides_schedule(strategy):
        if scheduler is not None or schedule_share is not None:
            raise ValueError(f"strategy {strategy.name} decides the schedule and divides the budget itself")
        few_messages = Priority(COARSER * problem.job.profile.block / MIB)
        plan = strategy.plan(_with_fastest_recompute(problem, Greedy(), few_messages, None))
        check(plan)
        return _predicted(plan, strategy.name)
    strategy = cast(StrategyPlanner, strategy)
    if scheduler is None:
        raise ValueError(f"strategy {strategy.name} needs a scheduler")
    floor = problem.floor if schedule_share is not None else None
    if activation_share is None or schedule_share is None or problem.budget is None:
        quick = Greedy() if isinstance(strategy, Solving) else strategy
        quick_scheduler = Priority() if isinstance(scheduler, Solving) else scheduler
        problem = _with_fastest_recompute(problem, quick, quick_scheduler, schedule_share)
    else:  # as little as fits the activations' share of the slack
        slack = max(0, problem.budget - problem.floor)
        limit = problem.floor + int(activation_share * (1 - schedule_share) * slack)
        problem = PlanningProblem(least_within(problem.job, limit), problem.budget)
    is_open = problem.recomputes
    # what a solver decides without the schedule may be slower with it
    is_twice = is_open and isinstance(strategy, Solving)
    if is_twice:
        strategy, scheduler = _in_half_the_time(strategy), _in_half_the_time(scheduler)

    def planned(problem: PlanningProblem) -> Plan:
        plan, cap = _proposed(problem, strategy, scheduler, schedule_share, floor)
        if cap is not None:
            plan = fastest_repair(plan, cap)
            if is_open and schedule_share is None:  # a share limits activations, too
                plan = refined(plan)
            check(plan)
            plan = dataclasses.replace(plan, budget=problem.budget, limit=None if cap == problem.budget else cap)
        return _predicted(plan, strategy.name)

    found = [planned(problem.decided())]
    if is_twice:
        with contextlib.suppress(PlanError):
            found.append(planned(problem))
    return min(found, key=lambda plan: plan.prediction.step_s if plan.prediction else math.inf)


def _in_half_the_time(planner: _T) -> _T:
    """Return the planner with half of its seconds, if it uses a solver."""
    return dataclasses.replace(planner, seconds=planner.seconds / 2) if isinstance(planner, Solving) else planner


def _with_fastest_recompute(
    problem: PlanningProblem, strategy: StrategyPlanner, scheduler: Scheduler, share: float | None
) -> PlanningProblem:
    """Return the problem with the recomputation that is fastest with these quick planners, if it is to be decided."""
    if not problem.recomputes or problem.budget is None:  # without a budget recomputation only costs time
        return dataclasses.replace(problem, recomputes=False)
    floor = problem.floor if share is not None else None

    def step_s(job: Job, fits: bool) -> float:
        try:
            plan, cap = _proposed(PlanningProblem(job, problem.budget), strategy, scheduler, share, floor)
            return replay(fastest_repair(plan, cap) if fits and cap is not None else plan).period_s
        except (InfeasibleBudget, PlanError):
            return math.inf

    job = fastest(problem.job, partial(step_s, fits=False), partial(step_s, fits=True))
    return dataclasses.replace(problem, job=job)


def _problem(job: Job, budget: int | None, rule: str | RecomputeRule | None) -> PlanningProblem:
    """Return the problem, with the recomputation of the rule, or with the job's own."""
    rule = recompute_named(rule) if isinstance(rule, str) else rule
    choices = job.recompute if rule is None else rule.choices(job.profile)
    is_open = choices is None and bool(job.profile.recompute)
    return PlanningProblem(job.with_recompute(choices or ()), budget, recomputes=is_open)


def _proposed(
    problem: PlanningProblem, strategy: StrategyPlanner, scheduler: Scheduler, share: float | None, floor: int | None
) -> tuple[Plan, int | None]:
    """Return a plan, and the bytes that it must be fitted to (None: any). A share divides bytes above ``floor``."""
    if problem.budget is None or share is None or floor is None:
        choice, cap = strategy.choose(problem), problem.budget
    else:
        choice, cap = _shared(strategy, problem, problem.budget, share, floor)
    problem = problem.decided(choice.recompute)
    plan = scheduler.schedule(dataclasses.replace(problem.mix(choice.strategies), budget=cap))
    said = [f"strategies {choice.outcome}"] if choice.outcome else []
    said += [f"schedule {plan.outcome}"] if plan.outcome else []
    # The scheduler's bound holds for one mix and one share only, so it is dropped.
    return dataclasses.replace(plan, budget=None, outcome="; ".join(said), bound_s=None), cap


def _shared(
    strategy: StrategyPlanner, problem: PlanningProblem, budget: int, share: float, floor: int
) -> tuple[StrategyDecision, int]:
    """Return the mix, and the cap of the schedule in bytes, each with its share of the slack above ``floor``."""

    def for_strategy(budget: int) -> int:
        return budget - int(share * max(0, budget - floor))

    try:
        choice = strategy.choose(dataclasses.replace(problem, budget=for_strategy(budget)))
    except InfeasibleBudget as e:
        if e.smallest is None or (share == 1 and e.smallest > floor):
            raise InfeasibleBudget(budget, None, f"{e.what} beside schedule_share {share:g}") from e
        high = max(floor, e.smallest)
        while for_strategy(high) < e.smallest:
            high = floor + 2 * (high - floor)
        smallest = bisect.bisect_left(range(high), e.smallest, lo=floor, key=for_strategy)
        raise InfeasibleBudget(budget, smallest, e.what) from e
    if budget < floor:
        problem.starts()
    return choice, problem.decided(choice.recompute).peak(choice.strategies) + budget - for_strategy(budget)


def _predicted(plan: Plan, strategy: str) -> Plan:
    """Return the plan with its strategy's name and the prediction of its replay: never a planner's own estimate."""
    found = replay(plan)
    outcome = plan.outcome
    if not found.settled:
        outcome = "; ".join([outcome] * bool(outcome) + [f"periods differ after {MAX_PERIODS}: predicted is the last"])
    return dataclasses.replace(plan, strategy=strategy, prediction=found.prediction(), outcome=outcome)
