"""From a profile and a byte budget to a plan: choose a strategy mix, schedule it, make it fit, replay it."""

from __future__ import annotations

import bisect
import dataclasses

from mdcs.plan.ledger import check
from mdcs.plan.messages import Plan, Strategy, pad
from mdcs.planner.fit import fit
from mdcs.planner.schedulers import Scheduler
from mdcs.planner.strategies import Ilp, InfeasibleBudget, JointPlanner, Judge, StrategyPlanner
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind
from mdcs.simulator.simulate import replay


def floor_bytes(profile: Profile, *, micro_steps: int = 1, cross_iteration: bool = True, reserve: int = 0) -> int:
    """Smallest feasible peak: all fsdp, sequential schedule, plus the reserve."""
    return Judge(profile, None, micro_steps, cross_iteration, reserve).floor


def make_plan(
    profile: Profile,
    strategy: StrategyPlanner | JointPlanner,
    scheduler: Scheduler | None = None,
    *,
    budget: int | None = None,
    schedule_share: float | None = None,
    reserve: int = 0,
    micro_steps: int = 1,
    cross_iteration: bool = True,
    name: str | None = None,
) -> Plan:
    """A plan within ``budget`` bytes per rank (None: unlimited), with the prediction of its replay.

    ``schedule_share`` s in [0, 1] divides the slack above the floor: the strategy may use floor + (1 - s)·slack,
    judged with the sequential schedule; the schedule's own memory, its peak minus the sequential peak of the same
    mix, is capped at s·slack. None lets the strategy plan with the whole budget and the schedule with what is left.
    A joint planner decides both: it takes no scheduler and no share.

    Raises InfeasibleBudget, which names the smallest feasible budget in bytes.
    """
    if schedule_share is not None and not 0 <= schedule_share <= 1:
        raise ValueError(f"schedule_share must be in [0, 1], got {schedule_share}")
    if schedule_share is not None and budget is None:
        raise ValueError("schedule_share divides a budget: set one")
    judge = Judge(profile, budget, micro_steps, cross_iteration, reserve)
    name = name or type(strategy).__name__.lower()
    if isinstance(strategy, JointPlanner):
        if scheduler is not None or schedule_share is not None:
            raise ValueError(f"strategy {name} decides the schedule and divides the budget itself")
        plan = dataclasses.replace(strategy.plan(judge), strategy=name)
        check(plan)
        return with_prediction(plan)
    if scheduler is None:
        raise ValueError(f"strategy {name} needs a scheduler")
    if budget is None or schedule_share is None:
        (mix, outcome), cap = _choose(strategy, profile, judge), budget
    else:
        mix, outcome, cap = _shared(profile, strategy, judge, budget, schedule_share)
    planned_for = None if cap is None else cap - reserve
    plan = scheduler.schedule(dataclasses.replace(judge.mix(mix), budget=planned_for))
    said = [f"strategies {outcome}"] if outcome else []
    said += [f"schedule {plan.outcome}"] if plan.outcome else []
    plan = dataclasses.replace(
        plan, budget=None, reserve=reserve, strategy=name, outcome="; ".join(said), bound_s=None
    )  # a bound for one mix under one share says nothing of others
    if cap is not None:
        plan = fit(plan, cap)
        check(plan)
    return with_prediction(plan)


def _shared(
    profile: Profile, strategy: StrategyPlanner, judge: Judge, budget: int, share: float
) -> tuple[tuple[Strategy, ...], str, int]:
    """The strategy mix with its outcome, and the cap of the schedule, each with its share of the slack."""
    floor = judge.floor

    def for_strategy(budget: int) -> int:
        return budget - int(share * max(0, budget - floor))

    try:
        mix, outcome = _choose(strategy, profile, dataclasses.replace(judge, budget=for_strategy(budget)))
    except InfeasibleBudget as e:
        if e.smallest is None or (share == 1 and e.smallest > floor):
            raise InfeasibleBudget(budget, None, f"{e.what} beside schedule_share {share:g}") from e
        high = max(floor, e.smallest)
        while for_strategy(high) < e.smallest:
            high = floor + 2 * (high - floor)
        smallest = bisect.bisect_left(range(high), e.smallest, lo=floor, key=for_strategy)
        raise InfeasibleBudget(budget, smallest, e.what) from e
    if budget < floor:
        raise InfeasibleBudget(budget, floor, "all fsdp with the sequential schedule")
    return mix, outcome, judge.peak(mix) + budget - for_strategy(budget)


def _choose(strategy: StrategyPlanner, profile: Profile, judge: Judge) -> tuple[tuple[Strategy, ...], str]:
    """The mix, and what became of a solver's work."""
    return strategy.solve(profile, judge) if isinstance(strategy, Ilp) else (strategy.choose(profile, judge), "")


def extra_communication_s(profile: Profile, sent: dict[str, int]) -> float:
    """(bytes sent - bytes of all-dp) · β of one iteration; ``sent`` is wire bytes by kind."""
    all_dp = sum(
        profile.wire(Kind.AR, pad(u.numel, profile.world) * profile.grad_bytes)
        for u in profile.units
        if u.trainable
    )
    time = sum(profile.link.beta_of(Kind(kind)) * size for kind, size in sent.items())
    return time - profile.link.beta_of(Kind.AR) * all_dp


def sent_bytes(plan: Plan) -> dict[str, int]:
    """Wire bytes by kind of one iteration."""
    out: dict[str, int] = {}
    for m in plan.messages:
        out[str(m.kind)] = out.get(str(m.kind), 0) + plan.wire(m)
    return out


def with_prediction(plan: Plan) -> Plan:
    """The plan with what its replay gives: a planner's own arithmetic is never reported."""
    return dataclasses.replace(plan, prediction=replay(plan).prediction())
