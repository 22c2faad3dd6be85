"""Predicted time and memory of a step of FSDP2, and how far ahead FSDP2 should prefetch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from experiments.fsdp2.memory import GroupBytes, MemoryWalk
from mdcs.export.document import Group, PrefetchLists, in_order, prefetch_lists
from mdcs.plan.job import Job
from mdcs.plan.lifetimes import extra_bytes_vs_fsdp
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.times import Prediction
from mdcs.profile.link import Collectives, Kind
from mdcs.profile.schema import Profile
from mdcs.simulator.simulate import replay

_FARTHEST = 4  # groups of prefetch


@dataclass(frozen=True)
class Steps:
    """The prefetch lists of all groups, and the predicted step with them."""

    forward: PrefetchLists
    backward: PrefetchLists
    prediction: Prediction

    def fit(self, plan: Plan) -> bool:
        """Whether the predicted peak is within the plan's budget."""
        return plan.budget is None or self.prediction.peak_bytes + plan.job.reserve <= plan.budget


def best_steps(plan: Plan, groups: tuple[Group, ...]) -> Steps:
    """Return the fastest step within the plan's budget among the prefetch limits; if none fits, the smallest peak.

    No group is prefetched further ahead than in the plan (in backward at least by one group, FSDP2's default).
    """
    made = [
        predict_step(
            plan, groups, prefetch_lists(plan, groups, Kind.AG_F, limit), prefetch_lists(plan, groups, Kind.AG_B, limit)
        )
        for limit in range(_FARTHEST + 1)
    ]
    fit = [s for s in made if s.fit(plan)]
    if not fit:
        return min(made, key=lambda s: s.prediction.peak_bytes)
    return min(fit, key=lambda s: (round(s.prediction.step_s, 6), s.prediction.peak_bytes))


def fit_to_budget(plan: Plan, groups: tuple[Group, ...]) -> tuple[list[str], Steps]:
    """Return names of units that must become fsdp (hsdp within nodes) for the plan's budget, and the step with them.

    None if the calls keep the budget, all if nothing does. The groups that hold most bytes beyond fsdp change first,
    one after the other, until the budget is kept.
    """

    def beyond(group: Group) -> int:
        return sum(extra_bytes_vs_fsdp(plan.period, u, group.strategy) for u in group.units)

    changed: list[str] = []
    made = best_steps(plan, groups)
    for each in sorted((g for g in groups if g.units and not g.strategy.regathers), key=beyond, reverse=True):
        if made.fit(plan):
            break
        resharded = Strategy.hsdp if each.strategy.in_node else Strategy.fsdp
        groups = tuple(dataclasses.replace(g, strategy=resharded) if g.name == each.name else g for g in groups)
        changed += [plan.profile.units[u].name for u in each.units]
        made = best_steps(plan, groups)
    return changed, made


def predict_step(plan: Plan, groups: tuple[Group, ...], forward: PrefetchLists, backward: PrefetchLists) -> Steps:
    """Predict a step: its time by a replay of :func:`fsdp2_plan`, its memory by a :class:`MemoryWalk`."""
    run = fsdp2_plan(plan, groups, forward, backward)
    times = replay(run).times
    peak = MemoryWalk(plan.job, groups, forward, backward, run.profile.collectives).peak
    return Steps(
        forward, backward,
        Prediction(
            times.step_s, times.compute_s, times.communication_s, times.overlap_s, peak_bytes=peak["total"], memory=peak
        ),
    )  # fmt: skip


def fsdp2_plan(plan: Plan, groups: tuple[Group, ...], forward: PrefetchLists, backward: PrefetchLists) -> Plan:
    """Return the plan that FSDP2 follows.

    A group's units are one message: gathered where the prefetch lists say, reduced when the group's backward has ended.
    All updates come after a barrier. With gloo compute waits for a reduction at once.
    """
    backend = plan.profile.collectives.backend
    native = Collectives("native", backend)
    profile = dataclasses.replace(_with_copies(plan, groups), collectives=native)
    job = dataclasses.replace(plan.job, profile=profile, cross_iteration=False, recompute=())
    chosen = {u: g.strategy for g in groups for u in g.units}
    mix = StrategyAssignment(job, tuple(chosen[u] for u in range(len(profile.units))))
    gatherers = {Kind.AG_F: _gatherers(groups, Kind.AG_F, forward), Kind.AG_B: _gatherers(groups, Kind.AG_B, backward)}
    messages = []
    for g in groups:
        own: dict[tuple[Kind, int], list[Op]] = {}
        for op in mix.ops:
            if op.unit in g.units:
                own.setdefault((op.kind, op.micro), []).append(op)
        for (kind, micro), ops in own.items():
            if kind.is_gather:
                slot = _gathered_at(mix, gatherers[kind.plain].get(g.name, g), kind, micro)
            else:
                slot = mix.period.turn if g.backward is None else g.backward[1] + 1
            first, last = max(mix.period.window(op)[0] for op in ops), min(mix.period.window(op)[1] for op in ops)
            parts = tuple((op.unit, 0) for op in ops)
            waited = backend == "gloo" and not kind.is_gather
            messages.append(Message(kind, parts, max(first, min(slot, last)), waited, micro))
    messages.sort(key=lambda m: m.kind.is_gather)  # at one boundary the reduction comes first
    return mix.plan("fsdp2", mix.unpartitioned_blocks(), messages)


def _gatherers(groups: tuple[Group, ...], kind: Kind, lists: PrefetchLists) -> dict[str, Group]:
    """Return name of a group -> the group that prefetches it, where there is one."""
    named = {g.name: g for g in in_order(groups, kind)}
    return {target: named[by] for by, targets in lists.items() for target in targets}


def _gathered_at(mix: StrategyAssignment, by: Group, kind: Kind, micro: int) -> int:
    start = mix.period.forward_start(micro)
    if kind.plain is Kind.AG_F:
        return start + by.forward[0]
    assert by.backward is not None
    return start + mix.profile.forward_slots + by.backward[0]


def _with_copies(plan: Plan, groups: tuple[Group, ...]) -> Profile:
    """Return the profile with FSDP2's copies added to its slots: out of gathers, and into reductions."""
    profile, per_byte = plan.profile, plan.profile.copy_seconds_per_byte
    slots = list(profile.slots)

    def longer(slot: int, size: int) -> None:
        slots[slot] = dataclasses.replace(slots[slot], seconds=slots[slot].seconds + size * per_byte)

    for g in groups:
        size = GroupBytes.of(g, Job(profile))
        longer(g.forward[0], size.full)
        if g.backward is not None:
            if g.reshard_after_forward:
                longer(profile.forward_slots + g.backward[0], size.full)
            longer(profile.forward_slots + g.backward[1], size.reduced)
    return dataclasses.replace(profile, slots=tuple(slots))
