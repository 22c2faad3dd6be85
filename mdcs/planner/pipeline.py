"""Steps from a job and a byte budget to a plan: choose a mix, schedule it, fit it to the budget, replay it."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from functools import partial
from typing import TypeVar, cast

from mdcs.plan.job import Job
from mdcs.plan.ledger import check
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.budget_repair import fastest_repair
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem
from mdcs.planner.ilp.solver import Solving
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
from mdcs.planner.registry import JointPlanner, Scheduler, StrategyDecision, StrategyPlanner, decides_schedule
from mdcs.planner.strategies import Greedy
from mdcs.profile.schema import Profile
from mdcs.simulator.kernel import MAX_PERIODS
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB, Budget

_T = TypeVar("_T")


def floor_bytes(job: Job | Profile, recompute: str | RecomputeRule | None = None) -> int:
    """Return the smallest feasible peak in bytes, reserve included, with the recomputation of :func:`make_plan`.

    It is the sequential peak of the :func:`mdcs.planner.feasibility.min_peak_strategies` mix. A profile counts as a
    job with default settings.
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
    job: Job | Profile,
    strategy: StrategyPlanner | JointPlanner,
    scheduler: Scheduler | None = None,
    *,
    budget: int | None = None,
    schedule_share: float | None = None,
    activation_share: float | None = None,
    recompute: str | RecomputeRule | None = None,
) -> Plan:
    """Return a plan within ``budget`` bytes per rank (None: unlimited), with the prediction of its replay.

    - ``job``: a job, or a profile, which counts as a job with default settings.
    - ``strategy``: a strategy planner, or a joint planner. A joint planner takes no scheduler and no share.
    - ``schedule_share``: part s in [0, 1] of the slack above the floor that is for the schedule. The strategies may use
      floor + (1 - s)·slack, judged with the sequential schedule. The schedule's own memory (its peak minus the
      sequential peak of its mix) is capped at s·slack. None: strategies may use the whole budget, and the schedule the
      rest.
    - ``activation_share``: part a in [0, 1] of what ``schedule_share`` leaves, (1 - s)·slack, that is for activations.
      As little is recomputed as fits floor + a·(1 - s)·slack beside the leanest strategies. The strategies may use the
      rest. None: what is recomputed is what makes the plan fastest.
    - ``recompute``: the rule that says which units recompute their activations, or its name
      (:mod:`mdcs.planner.recompute`). None: as the job says. With ``planned`` the floor is that with recomputation, and
      without a budget nothing is recomputed. ``auto`` is ``planned`` where there is no plan with ``none``.

    Raises InfeasibleBudget, with the smallest feasible budget in bytes, and ValueError for arguments that contradict
    each other.
    """
    if schedule_share is not None and not 0 <= schedule_share <= 1:
        raise ValueError(f"schedule_share must be in [0, 1], got {schedule_share}")
    if schedule_share is not None and budget is None:
        raise ValueError("schedule_share divides a budget: set one")
    rule = recompute_named(recompute) if isinstance(recompute, str) else recompute
    if rule == AUTO and activation_share is None and budget is not None and Job.of(job).profile.recompute:
        try:
            return make_plan(job, strategy, scheduler, budget=budget, schedule_share=schedule_share, recompute=KEEP)
        except InfeasibleBudget as e:
            with contextlib.suppress(InfeasibleBudget):
                return make_plan(
                    job, strategy, scheduler, budget=budget, schedule_share=schedule_share, recompute=Planned()
                )
            raise e
    problem = _problem(Job.of(job), budget, rule)
    if activation_share is not None:
        _require_divisible(problem, schedule_share, activation_share)
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
    problem: PlanningProblem,
    strategy: StrategyPlanner | JointPlanner,
    scheduler: Scheduler | None,
    schedule_share: float | None,
    activation_share: float | None,
) -> Plan:
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
    quick = (
        Greedy() if isinstance(strategy, Solving) else strategy,
        Priority() if isinstance(scheduler, Solving) else scheduler,
    )
    if activation_share is None:
        problem = _with_fastest_recompute(problem, *quick, schedule_share)
    else:
        problem = _with_least_recompute(problem, cast(float, schedule_share), activation_share)
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


def _require_divisible(problem: PlanningProblem, schedule_share: float | None, activation_share: float) -> None:
    """Raise ValueError unless a plan can divide its memory between strategies and activations."""
    if not 0 <= activation_share <= 1:
        raise ValueError(f"activation_share must be in [0, 1], got {activation_share}")
    if schedule_share is None:
        raise ValueError("activation_share divides what schedule_share leaves: set both")
    if not problem.recomputes:
        raise ValueError("activation_share needs recompute=planned, and a profile that says what recomputation frees")


def _with_least_recompute(problem: PlanningProblem, schedule_share: float, activation_share: float) -> PlanningProblem:
    """Return the problem with the least recomputation within the activations' share of the slack."""
    assert problem.budget is not None
    slack = max(0, problem.budget - problem.floor)
    limit = problem.floor + int(activation_share * (1 - schedule_share) * slack)
    return PlanningProblem(least_within(problem.job, limit), problem.budget)


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
    """Return a plan that may exceed the budget, and the bytes that it must be fitted to (None: any).

    - ``floor``: bytes above which a share divides the budget.
    """
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
    """Return the plan with its strategy's name and the prediction of its replay.

    Planners' own estimates are never reported.
    """
    found = replay(plan)
    outcome = plan.outcome
    if not found.settled:
        outcome = "; ".join([outcome] * bool(outcome) + [f"periods differ after {MAX_PERIODS}: predicted is the last"])
    return dataclasses.replace(plan, strategy=strategy, prediction=found.prediction(), outcome=outcome)
