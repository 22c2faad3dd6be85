"""From a profile and a byte budget to a plan: choose a strategy mix, schedule it, make it fit, replay it."""

from __future__ import annotations

import dataclasses

from mdcs.ledger import check
from mdcs.link import Kind, wire_bytes
from mdcs.plan import Plan, pad
from mdcs.profile import Profile
from mdcs.schedulers import Scheduler
from mdcs.schedulers.admission import fit
from mdcs.simulator import replay
from mdcs.strategies import InfeasibleBudget, Judge, StrategyPlanner


def floor_bytes(profile: Profile, *, micro_steps: int = 1, cross_iteration: bool = True, reserve: int = 0) -> int:
    """Smallest feasible peak: all fsdp, sequential schedule, plus the reserve."""
    return Judge(profile, None, micro_steps, cross_iteration, reserve).floor


def make_plan(
    profile: Profile,
    strategy: StrategyPlanner,
    scheduler: Scheduler,
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

    Raises InfeasibleBudget, which names the smallest feasible budget in bytes.
    """
    if schedule_share is not None and not 0 <= schedule_share <= 1:
        raise ValueError(f"schedule_share must be in [0, 1], got {schedule_share}")
    if schedule_share is not None and budget is None:
        raise ValueError("schedule_share divides a budget: set one")
    judge = Judge(profile, budget, micro_steps, cross_iteration, reserve)
    cap = budget
    if budget is not None:
        floor = judge.floor
        if budget < floor:
            raise InfeasibleBudget(budget, floor, "even all fsdp with the sequential schedule")
        if schedule_share is not None:
            slack = budget - floor
            for_schedule = int(schedule_share * slack)
            judge = dataclasses.replace(judge, budget=budget - for_schedule)
            mix = strategy.choose(profile, judge)
            cap = judge.peak(mix) + for_schedule
        else:
            mix = strategy.choose(profile, judge)
    else:
        mix = strategy.choose(profile, judge)
    plan = dataclasses.replace(
        scheduler.schedule(judge.mix(mix)), reserve=reserve, strategy=name or type(strategy).__name__.lower()
    )
    if cap is not None:
        plan = fit(plan, cap)
        check(plan)
    return with_prediction(plan)


def extra_communication_s(profile: Profile, sent: dict[str, int]) -> float:
    """(bytes sent - bytes of all-dp) · β of one iteration; ``sent`` is wire bytes by kind."""
    all_dp = sum(
        wire_bytes(Kind.AR, pad(u.numel, profile.world) * profile.grad_bytes, profile.world)
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
