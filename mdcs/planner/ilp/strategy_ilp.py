"""Exact ILP for the mix with the least communication and update time whose sequential schedule fits the budget.

Binary z[u,k]: unit u uses strategy k. Nothing overlaps in the sequential schedule, so a step takes compute plus Σ
seconds[u,k]·z[u,k]. Units share only bytes: at every stage of the period (a message of the sequential schedule, or a
slot) each unit holds its own bytes[stage,u,k]::

    minimize    Σ seconds[u,k] z[u,k]
    subject to  Σ_k z[u,k] = 1                                  every unit has one strategy
                Σ_u,k bytes[stage,u,k] z[u,k] <= budget - rest  memory, for every stage

Columns of recomputation (:class:`~mdcs.planner.ilp.slot_schedule.RecomputeColumns`) add their seconds to the cost, and
change the rest. The solver starts from the mix of greedy, with which its answer is compared.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.ledger import Ledger
from mdcs.plan.period import Strategy, choices
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision
from mdcs.planner.ilp.slot_schedule import Need, RecomputeColumns
from mdcs.planner.ilp.solver import IntegerProgram, solve
from mdcs.planner.schedulers import Solving, StrategyAssignment, sequential
from mdcs.planner.strategies import Greedy

Stage = tuple[int, bool, bool, int]
"""(slot, whether compute runs instead of waiting, whether it is a gather, unit). Stages sort in the order of events."""


@dataclass(frozen=True)
class Ilp(Solving):
    """The better of the solver's mix and greedy's."""

    name: ClassVar[str] = "ilp"

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return the better mix, as ``optimal``, ``feasible``, or ``greedy: <reason>``. Raises InfeasibleBudget."""
        greedy = Greedy().choose(problem).strategies
        made, z, recompute = integer_program(problem)
        start = [0.0] * len(made.costs)
        for unit, strategy in zip(z, greedy, strict=True):
            start[unit[strategy]] = 1.0
        recompute.set(start, problem.job.recompute)
        answer = solve(made, seconds=self.seconds, start=start)
        if answer.values is None:
            return StrategyDecision(greedy, f"greedy: {answer.status}")
        values = answer.values
        mix = tuple(max(unit, key=lambda k: values[unit[k]]) for unit in z)
        decided = problem.decided(recompute.choices(values)) if recompute.columns else problem
        if not decided.fits(mix):
            return StrategyDecision(greedy, "greedy: the solver's mix does not fit")
        if _step_s(problem, greedy) < _step_s(decided, mix):
            return StrategyDecision(greedy, f"greedy: faster than the solver's ({answer.status})")
        return StrategyDecision(mix, answer.status, decided.job.recompute)


def integer_program(problem: PlanningProblem) -> tuple[IntegerProgram, list[dict[Strategy, int]], RecomputeColumns]:
    """Return the integer program, scaled, its column for every unit and strategy, and those of recomputation."""
    made, job = IntegerProgram(), problem.job
    costs = [
        {k: job.cost.unit_s(u, k, job.micro_steps) for k in choices(job.profile)} for u in range(len(job.profile.units))
    ]
    scale = max(c for unit in costs for c in unit.values()) or 1.0
    z = [{k: made.column(cost / scale, integer=True) for k, cost in unit.items()} for unit in costs]
    for unit in z:
        made.equal([(x, 1.0) for x in unit.values()], 1.0)
    recompute = RecomputeColumns(made, problem, 1 / scale)
    for held, cap, (terms, needed) in memory_rows(problem, recompute):
        left = cap - needed
        size = max(1.0, left - sum(min(0.0, c) for _, c in terms))
        own = [(x, held[u][k] / size) for u, unit in enumerate(z) for k, x in unit.items()]
        made.at_most([*own, *((x, c / size) for x, c in terms)], left / size)
    return made, z, recompute


def _step_s(problem: PlanningProblem, mix: tuple[Strategy, ...]) -> float:
    """Return the seconds of a step without overlap."""
    return problem.seconds(mix) + sum(problem.job.period.seconds)


def memory_rows(
    problem: PlanningProblem, recompute: RecomputeColumns
) -> list[tuple[list[dict[Strategy, int]], int, Need]]:
    """Return for every stage of the period the bytes per unit and strategy, the bytes of all, and those of activations.
    A stage in which the peak is the largest of several terms has several rows.
    """
    cap, profile = problem.admissible, problem.profile
    if cap is None:
        return []
    walks = [{k: _walk(problem, u, k) for k in choices(profile)} for u in range(len(profile.units))]
    stages: set[Stage] = set().union(*(walk for unit in walks for walk in unit.values()))
    rows = []
    for stage in sorted(stages):
        place = problem.job.period.slots[stage[0]].place
        held = [{k: _at(walk, stage) for k, walk in unit.items()} for unit in walks]
        rows += [(held, cap, need) for need in (recompute.peaks(place) if stage[1] else [recompute.live(place)])]
    return rows


Walk = dict[Stage, tuple[int, int]]
"""Stage at which the unit acts -> (bytes during the stage, bytes after it)."""


def _walk(problem: PlanningProblem, unit: int, strategy: Strategy) -> Walk:
    """Return the bytes of one unit in the steady period of the sequential schedule, from a plan for it alone. Exact,
    except with a barrier: the last reduction of all units updates all of them; the update is placed at the turn.
    """
    slots = tuple(dataclasses.replace(s, unit=0, live=0, peak=0) for s in problem.profile.slots)
    profile = dataclasses.replace(problem.profile, units=(problem.profile.units[unit],), slots=slots, recompute=())
    plan = sequential(StrategyAssignment(dataclasses.replace(problem.job, profile=profile, recompute=()), (strategy,)))
    ledger, turn, update_slot = Ledger(plan), plan.period.turn, plan.period.update_slot
    held, waiting = ledger.rest_bytes, 0
    sent: list[list[int]] = [[] for _ in ledger.slots]
    for i, m in enumerate(plan.messages):
        sent[m.slot].append(i)
    own: Walk = {}  # of the period walked last: the prologue only gathers, and the first period is not yet steady
    for period, q in [(0, q) for q in range(turn, len(sent))] + [(p, q) for p in (1, 2) for q in range(len(sent))]:
        for i in (i for i in sent[q] if period or plan.schedule.in_prologue[i]):
            is_gather, e = plan.messages[i].kind.is_gather, ledger.messages[i]
            if is_gather and q == turn:
                held, waiting = held - waiting, 0
            during = held + e.held + e.transient
            kept = e.freed_by_update if q <= update_slot else 0  # the update waits for the last reduction of all units
            held, waiting = held + e.held - e.freed + kept, waiting + kept
            own[q, False, is_gather, unit] = during, held
        slot = ledger.slots[q]
        held += slot.allocated
        if q == turn:
            held, waiting = held - waiting, 0
            if q == update_slot:
                own[q, False, True, -1] = held, held
        own[q, True, False, -1] = held, held - slot.freed
        held -= slot.freed
    return own


def _at(walk: Walk, stage: Stage) -> int:
    """Return the bytes that the unit holds at a stage of its own or of another unit."""
    if stage in walk:
        return walk[stage][0]
    before = [s for s in walk if s < stage]
    return walk[max(before)][1] if before else walk[max(walk)][1]
