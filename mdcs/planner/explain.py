"""Explanation of a plan: cost and gain of each unit's strategy, effect of the schedule, contents of the memory.

The strategy of a unit is compared with the same mix in which only this unit has another strategy. The other strategy is
fsdp, which holds least. For an fsdp unit it is sdp, and for a unit to which fsdp gives nothing it is zero2. The cost is
the difference of the peaks under the sequential schedule, which also decides whether strategies fit a budget. The gain
is the difference of the steps when both mixes are scheduled alike and replayed without a budget.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.registry import Scheduler
from mdcs.planner.schedulers.sequential import sequential
from mdcs.planner.strategies.greedy import Greedy
from mdcs.profile.recompute import NONE
from mdcs.simulator.simulate import replay


@dataclass(frozen=True)
class UnitChoice:
    """The strategy of one unit, compared with another.

    - ``unit``: name of the unit.
    - ``bytes``: bytes of its parameters.
    - ``strategy``: its strategy.
    - ``recompute``: what it recomputes: none, full or selective.
    - ``messages``: number of its messages by kind. A fused message counts for each of its units.
    - ``instead``: the strategy that it is compared with.
    - ``costs_bytes``: increase of the peak over ``instead``. May be negative.
    - ``buys_s``: decrease of the step (seconds) from ``instead``. May be negative.

    The last three are None when there is no other strategy to compare with.
    """

    unit: str
    bytes: int
    strategy: str
    recompute: str
    messages: dict[str, int]
    instead: str | None
    costs_bytes: int | None
    buys_s: float | None


@dataclass(frozen=True)
class ScheduleChoice:
    """Increase of the peak (bytes) and decrease of the step (seconds) from the sequential schedule of the same mix."""

    costs_bytes: int
    buys_s: float


@dataclass(frozen=True)
class BindingSlot:
    """The slot with the highest peak (bytes per rank). ``memory``: peak of each category within the slot."""

    slot: str
    bytes: int
    memory: dict[str, int]


@dataclass(frozen=True)
class KeptActivations:
    """Units that could recompute their activations, but keep them: what recomputation of all of them would change.

    - ``units``: how many.
    - ``frees_bytes``: decrease of the peak under the sequential schedule.
    - ``costs_s``: seconds of compute per iteration.
    - ``buys_s``: decrease of communication and updates (seconds) if so many bytes more were for strategies (greedy).
    """

    units: int
    frees_bytes: int
    costs_s: float
    buys_s: float


def kept_activations(plan: Plan) -> KeptActivations | None:
    """Return what recomputation would change where the plan does not recompute. None if it does wherever it can."""
    profile, now = plan.job.profile, plan.recompute or (NONE,) * len(plan.strategies)
    options = {o.unit: o for o in sorted(profile.recompute, key=lambda o: o.freed) if now[o.unit] == NONE}
    if not options:
        return None
    more = tuple(options[u].choice if u in options else choice for u, choice in enumerate(now))
    problem = PlanningProblem(plan.job, None)
    recomputing = PlanningProblem(dataclasses.replace(plan.job, recompute=more), None)
    peak = problem.peak(plan.strategies)
    frees = peak - recomputing.peak(plan.strategies)
    larger = dataclasses.replace(problem, budget=max(peak + max(0, frees), problem.floor))
    buys_s = problem.seconds(plan.strategies) - problem.seconds(Greedy().choose(larger).strategies)
    costs_s = plan.micro_steps * sum(o.seconds for o in options.values())
    return KeptActivations(len(options), frees, costs_s, max(0.0, buys_s))


def choices(plan: Plan, scheduler: Scheduler) -> list[UnitChoice]:
    """Return the comparison of each unit.

    ``scheduler`` makes the compared schedules: the plan's own scheduler if it is fast.
    """
    mix, problem = StrategyAssignment(plan.job, plan.strategies), PlanningProblem(plan.job, None)
    peak, step_s = problem.peak(plan.strategies), replay(scheduler.schedule(mix)).period_s
    kinds = [Counter[str]() for _ in plan.strategies]
    for message in plan.messages:
        for u in {u for u, _ in message.parts}:
            kinds[u][str(message.kind)] += 1
    out = []
    for u, (unit, strategy) in enumerate(zip(plan.profile.units, plan.strategies, strict=True)):
        other = _other(mix, u)
        out.append(
            UnitChoice(
                unit=unit.name,
                bytes=unit.numel * plan.profile.param_bytes,
                strategy=str(strategy),
                recompute=plan.recompute[u] if plan.recompute else NONE,
                messages=dict(kinds[u]),
                instead=None if other is None else str(other.strategies[u]),
                costs_bytes=None if other is None else peak - problem.peak(other.strategies),
                buys_s=None if other is None else replay(scheduler.schedule(other)).period_s - step_s,
            )
        )
    return out


def _other(mix: StrategyAssignment, unit: int) -> StrategyAssignment | None:
    """Return the mix to compare with, in which only this unit differs."""
    own = mix.strategies[unit]
    for strategy in (Strategy.fsdp, Strategy.sdp, Strategy.zero2):
        strategies = (*mix.strategies[:unit], strategy, *mix.strategies[unit + 1 :])
        other = dataclasses.replace(mix, strategies=strategies)
        if other.strategies[unit] is not own:  # Mix turns fsdp into sdp where fsdp gains nothing
            return other
    return None


def schedule_choice(plan: Plan) -> ScheduleChoice:
    """Return the effect of the plan's schedule, for the plan's strategies."""
    own, alone = replay(plan), replay(sequential(StrategyAssignment(plan.job, plan.strategies)))
    return ScheduleChoice(own.peak["total"] - alone.peak["total"], alone.period_s - own.period_s)


def binding_slot(plan: Plan) -> BindingSlot:
    """Return the slot in which the replay of the plan holds most bytes."""
    curve = replay(plan).curve
    q = max(range(len(curve)), key=lambda q: curve[q]["total"])
    memory = {category: size for category, size in curve[q].items() if category != "total"}
    return BindingSlot(plan.period.name(q), curve[q]["total"], memory)
