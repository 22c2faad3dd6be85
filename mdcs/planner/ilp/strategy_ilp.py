"""The strategy mix of least communication and update time whose sequential schedule fits the budget: an exact ILP.

Binary z[u,k]: unit u uses strategy k, Σ_k z[u,k] = 1. With the schedule fixed to the sequential one nothing
overlaps, so a step is compute plus Σ seconds[u,k]·z[u,k], and units share nothing but bytes: at every stage of the
period (a message of the sequential schedule, or a slot) each unit holds bytes[stage,u,k] of its own::

    minimize    Σ seconds[u,k] z[u,k]
    subject to  Σ_k z[u,k] = 1                                  every unit has one strategy
                Σ_u,k bytes[stage,u,k] z[u,k] <= budget - rest  memory, for every stage

The solver's answer is judged like any other mix and compared with greedy's, which it starts from; the outcome says which
one is returned, and why.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mdcs.plan.ledger import Ledger, SlotLimits
from mdcs.plan.messages import Strategy
from mdcs.plan.mix import Mix
from mdcs.planner.ilp.solver import Problem, Solving, solve
from mdcs.planner.judge import Judge
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.strategies.greedy import Greedy, seconds
from mdcs.profile.contents import Profile, Unit

Stage = tuple[int, bool, bool, int]
"""Order of what happens: slot, whether it runs (or compute still waits), whether a gather, unit."""


@dataclass(frozen=True)
class Ilp(Solving):
    def choose(self, profile: Profile, judge: Judge) -> tuple[Strategy, ...]:
        """The better of the solver's mix and greedy's. Raises InfeasibleBudget."""
        return self.solve(profile, judge)[0]

    def solve(self, profile: Profile, judge: Judge) -> tuple[tuple[Strategy, ...], str]:
        """(mix, outcome): ``optimal``, ``feasible``, or ``greedy: <why the solver's was not taken>``."""
        greedy = Greedy().choose(profile, judge)
        made, z = problem(profile, judge)
        answer = solve(made, solver=self.solver, seconds=self.seconds, start=_start(made, z, greedy))
        if answer.values is None:
            return greedy, f"greedy: {answer.status}"
        values = answer.values
        mix = tuple(max(unit, key=lambda k: values[unit[k]]) for unit in z)
        if not judge.fits(mix):
            return greedy, "greedy: the solver's mix does not fit"
        if _time(judge, greedy) < _time(judge, mix):
            return greedy, f"greedy: faster than the solver's ({answer.status})"
        return mix, answer.status


def _time(judge: Judge, mix: tuple[Strategy, ...]) -> float:
    return sum(seconds(judge.profile, u, k, judge.micro_steps) for u, k in enumerate(mix))


# ---- the problem, in numbers


def problem(profile: Profile, judge: Judge) -> tuple[Problem, list[dict[Strategy, int]]]:
    """The integer program, and its column for every unit and strategy; costs and bytes relative to the largest."""
    made, units = Problem(), range(len(profile.units))
    costs = [{k: seconds(profile, u, k, judge.micro_steps) for k in Strategy} for u in units]
    scale = max(c for unit in costs for c in unit.values()) or 1.0
    z = [{k: made.column(cost / scale, integer=True) for k, cost in unit.items()} for unit in costs]
    for unit in z:
        made.equal([(x, 1.0) for x in unit.values()], 1.0)
    for held, left in memory_rows(profile, judge):
        size = max(1, left)
        made.at_most([(x, held[u][k] / size) for u, unit in enumerate(z) for k, x in unit.items()], left / size)
    return made, z


def _start(made: Problem, z: list[dict[Strategy, int]], mix: tuple[Strategy, ...]) -> list[float]:
    values = [0.0] * len(made.costs)
    for unit, strategy in zip(z, mix, strict=True):
        values[unit[strategy]] = 1.0
    return values


def memory_rows(profile: Profile, judge: Judge) -> list[tuple[list[dict[Strategy, int]], int]]:
    """For every stage of the period the bytes per unit and strategy, and the bytes that are left for all."""
    if judge.budget is None:
        return []
    cap, units = judge.budget - judge.reserve, range(len(profile.units))
    walks = [{k: _walk(profile, judge, u, k) for k in Strategy} for u in units]
    stages: set[Stage] = set().union(*(walk for unit in walks for walk in unit.values()))
    period = judge.mix((Strategy.dp,) * len(profile.units)).period
    rows = []
    for stage in sorted(stages):
        slot = profile.slots[period.slots[stage[0]].place]
        held = [{k: _at(walk, stage) for k, walk in unit.items()} for unit in walks]
        rows.append((held, cap - (slot.peak if stage[1] else slot.live)))
    return rows


Walk = dict[Stage, tuple[int, int]]
"""Per stage at which the unit does something: bytes while it does, bytes after."""


def _walk(profile: Profile, judge: Judge, unit: int, strategy: Strategy) -> Walk:
    """What one unit holds through the steady period of the sequential schedule, by the ledger of a plan for it alone.

    Exact, but for the barrier: there the last reduction of all units updates all, which is put at the turn.
    """
    alone: Unit = profile.units[unit]
    slots = tuple(dataclasses.replace(s, unit=0, live=0, peak=0) for s in profile.slots)
    sub = dataclasses.replace(profile, units=(alone,), slots=slots)
    plan = Sequential().schedule(Mix(sub, (strategy,), judge.micro_steps, judge.cross_iteration))
    ledger, issued = Ledger(plan), SlotLimits(plan).issued
    barrier = not judge.cross_iteration
    turn, held, waiting = plan.period.turn, ledger.rest_bytes, 0
    gradients: dict[int, int] = {}
    walk: Walk = {}
    for round_ in range(3):
        walk, sent = {}, 0
        for q in range(turn if round_ == 0 else 0, plan.period.length):
            for i in range(sent, issued[q]):
                message = plan.messages[i]
                if round_ == 0 and not plan.in_prologue(message):
                    continue
                if message.kind.is_gather and q == turn:
                    held, waiting = held - waiting, 0
                e = ledger.messages[i]
                during = held + sum(b for _, b in e.full) + e.transient + e.shards_held
                held += e.held - e.shards_of_others
                after_link = sum(gradients.pop(u, 0) for u, _ in e.gradients_after_link)
                after_update = sum(gradients.pop(u, 0) for u, _ in e.gradients_after_update)
                held -= after_link + after_update
                if barrier and not message.kind.is_gather:  # its update waits for the last reduction of all units
                    kept = after_update + (e.shards if message.kind.value == "RS" else 0)
                    held, waiting = held + kept, waiting + kept
                walk[q, False, message.kind.is_gather, unit] = during, held
            sent = issued[q]
            slot = ledger.slots[q]
            for u, b in slot.gradients:
                gradients[u] = b
                held += b
            if q == turn:
                held, waiting = held - waiting, 0
                if barrier:
                    walk[q, False, True, -1] = held, held
            walk[q, True, False, -1] = held, held - sum(b for _, b in slot.released)
            held = walk[q, True, False, -1][1]
    return walk


def _at(walk: Walk, stage: Stage) -> int:
    """Bytes that the unit holds at a stage, its own or another unit's."""
    if stage in walk:
        return walk[stage][0]
    before = [s for s in walk if s < stage]
    return walk[max(before)][1] if before else walk[max(walk)][1]
