"""Why a plan is as it is: what each unit's strategy costs and buys, what the schedule does, what fills the memory.

What a strategy costs and buys is told by comparing with the same mix in which this unit alone has another strategy:
fsdp, which holds least; for an fsdp unit sdp; for a unit to which fsdp gives nothing zero1. It costs the difference of
the peaks with the sequential schedule, by which budgets judge strategies too, and buys the difference of the steps
when both are scheduled alike and replayed without a budget.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential
from mdcs.plan.strategy import Strategy
from mdcs.planner.interfaces import Scheduler
from mdcs.planner.judge import Judge
from mdcs.simulator.simulate import replay


@dataclass(frozen=True)
class UnitChoice:
    """One unit's strategy and messages (by kind; one that fuses units counts for each), and what the strategy does.

    ``costs_bytes`` is by how much the peak is higher than with ``instead``, ``buys_s`` by how much the step is shorter
    (both may be negative). All three are None when there is nothing to compare with.
    """

    unit: str
    bytes: int
    strategy: str
    messages: dict[str, int]
    instead: str | None
    costs_bytes: int | None
    buys_s: float | None


@dataclass(frozen=True)
class ScheduleChoice:
    """By how much the peak is higher, and the step shorter, than with the sequential schedule of the same mix."""

    costs_bytes: int
    buys_s: float


@dataclass(frozen=True)
class BindingSlot:
    """The slot with the highest peak (bytes per rank), and what is held in it: each category at its highest there."""

    slot: str
    bytes: int
    memory: dict[str, int]


def choices(plan: Plan, scheduler: Scheduler) -> list[UnitChoice]:
    """A unit after the other. ``scheduler`` makes the schedules that are compared: the plan's own, if it is quick."""
    mix, judge = Mix(plan.job, plan.strategies), Judge(plan.job, None)
    peak, step_s = judge.peak(plan.strategies), replay(scheduler.schedule(mix)).period_s
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
                messages=dict(kinds[u]),
                instead=None if other is None else str(other.strategies[u]),
                costs_bytes=None if other is None else peak - judge.peak(other.strategies),
                buys_s=None if other is None else replay(scheduler.schedule(other)).period_s - step_s,
            )
        )
    return out


def _other(mix: Mix, unit: int) -> Mix | None:
    """The mix to compare with, in which only this unit differs."""
    own = mix.strategies[unit]
    for strategy in (Strategy.fsdp, Strategy.sdp, Strategy.zero1):
        strategies = (*mix.strategies[:unit], strategy, *mix.strategies[unit + 1 :])
        other = dataclasses.replace(mix, strategies=strategies)
        if other.strategies[unit] is not own:  # fsdp becomes sdp where it gives nothing
            return other
    return None


def schedule_choice(plan: Plan) -> ScheduleChoice:
    """What the plan's messages do, the strategies given."""
    own, alone = replay(plan), replay(sequential(Mix(plan.job, plan.strategies)))
    return ScheduleChoice(own.peak["total"] - alone.peak["total"], alone.period_s - own.period_s)


def binding_slot(plan: Plan) -> BindingSlot:
    """Where the replay of the plan holds most."""
    curve = replay(plan).curve
    q = max(range(len(curve)), key=lambda q: curve[q]["total"])
    memory = {category: size for category, size in curve[q].items() if category != "total"}
    return BindingSlot(plan.period.name(q), curve[q]["total"], memory)
