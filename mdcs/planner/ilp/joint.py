"""Plans from the slot model: heuristics and solver find plans to start from, and a search by replays goes on from them.

1. Heuristics give the first plans, with the recomputation that the problem starts from. 2. The solver decides
strategies, recomputation and, under a budget, the slots in which buffers live. Within these windows blocks are sent
nearest deadline first (:mod:`mdcs.planner.ilp.decode`). Beside it, searches race from the first plans. 3. The search
continues from the best plan for the rest of the time (:mod:`mdcs.planner.search`).

The result is never predicted slower than the best heuristic tried, except where merging messages saves more than it
costs. Among equally fast schedules the leanest one is returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import ClassVar

from mdcs.options import option
from mdcs.plan.ledger import check
from mdcs.plan.period import Strategy, block_ready_fractions
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.budget_repair import fastest_repair
from mdcs.planner.candidates import Candidates
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.decode import (
    DECODING,
    SOLVING,
    SearchRequest,
    SolverResult,
    solve_bound,
    solve_relaxed,
    solve_whole,
    while_time_remains,
)  # fmt: skip
from mdcs.planner.priority import COARSER, Priority
from mdcs.planner.schedulers import Dear, Solving, StrategyAssignment, Wfbp
from mdcs.planner.search import EvaluatedPlan, evaluate, race
from mdcs.planner.strategies import Greedy
from mdcs.profile.link import Kind
from mdcs.simulator.simulate import compiled_loops, replay
from mdcs.sizes import MIB

# HiGHS solves up to 60 slots often (not if recomputation is open). Beyond, the relaxation gives the better plans.
_WHOLE = 60
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the slack above the floor, left to the schedule
_HEURISTICS, _SEARCH = 0.3, 0.95  # fractions of the time at which these end
_WORTH = 1e-3  # relative gain that makes another search worth its time
_cost_s = attrgetter("cost_s")


@dataclass(frozen=True)
class SlotPlanner(Solving):
    """Base of the planners that use the slot model."""

    block_mib: float | None = option(None, "size of a block, MiB; null: the smallest that saturates the link", above=0)

    def solved(
        self, problem: PlanningProblem, name: str, fixed: Sequence[Strategy] | None = None, start: Plan | None = None
    ) -> Plan:
        """Return the best plan found within ``seconds`` for ``problem.budget``, with its outcome and the proven bound.

        - ``fixed``: strategies of the units; only the schedule is then open. ``start``: the result is not slower.

        The outcome ends with the gap, (step - bound) / step. ``optimal`` refers to the slot model, and the replay may
        be slower. Raises PlanError if no plan was found.
        """
        compiled_loops()  # before the clock starts: compiling, once on a machine, takes seconds, and so does loading
        replay(Wfbp().schedule(problem.decided().mix([Strategy.dp] * len(problem.profile.units))))
        block_bytes = problem.profile.block if self.block_mib is None else max(1, int(self.block_mib * MIB))
        strategies, coarser = None if fixed is None else tuple(fixed), self.block_mib is None
        request = SearchRequest(problem, name, strategies, self.seconds, block_bytes, coarser, time.monotonic())
        with ThreadPoolExecutor() as pool:
            bounding = None if request.is_small and request.is_priceless else pool.submit(solve_bound, request)
            known = [*while_time_remains(request.at(_HEURISTICS), heuristics(problem.decided(), fixed))]
            known += [] if start is None else [evaluate(start)]
            found, raced = _solve_beside_race(request, known, pool, bounding)
        candidates = [*found.plans, *raced, *known]
        if not candidates:
            raise PlanError(f"{name}: no plan was found: {found.status}")
        before, best = math.inf, min(candidates, key=_cost_s)
        while (found.bound or 0.0) * (1 + _WORTH) < best.cost_s < before * (1 - _WORTH):  # the last search paid off
            before = best.cost_s
            again = race(
                [best], request.at(_SEARCH), strategies=fixed is None, recompute=problem.recomputes, bound=found.bound
            )
            best = min([best, *again], key=_cost_s)
        best = merge_blocks(best, request.at(1.0))
        if problem.budget is None:
            best = issued_early(best)
        outcome, begun = found.status, best.plan.scheduler  # a search keeps the name of the plan that it started from
        if begun != name:
            why = "faster than the solver's plan" if found.plans else "the solver gave nothing"
            outcome = f"best heuristic ({begun}): {why} ({found.status})"
        if found.bound is not None:
            outcome += f", gap {max(0.0, 1 - found.bound / best.step_s):.1%}"
        return dataclasses.replace(best.plan, scheduler=name, outcome=outcome, bound_s=found.bound)


def _solve_beside_race(
    request: SearchRequest, known: list[EvaluatedPlan], pool: ThreadPoolExecutor, bounding: Future[SolverResult] | None
) -> tuple[SolverResult, list[EvaluatedPlan]]:
    """Run the solver, and beside it races from the plans ``known``. Return what both found.

    Plans come from the integer program of a small problem, from relaxations of a large one, and from both of those
    between. The bound comes from the problem as it is: from its integer program if this is small and messages have no
    price, otherwise from its relaxations, which ``bounding`` solves already.
    """
    slots, fixed = request.problem.job.period.length, request.fixed is not None
    best, realistic = min(known, key=_cost_s, default=None), request.realistic()
    is_solved = threading.Event()  # many plans follow: a race would take their processor
    solves: list[Callable[[], SolverResult]] = []
    if not request.is_small:
        solves.append(partial(solve_relaxed, request, realistic, is_solved.set))
    if request.is_small or (not request.problem.recomputes and slots <= (2 * _WHOLE if fixed else _WHOLE)):
        solves.append(partial(solve_whole, request, realistic, best))
    if bounding is None:
        solves.append(partial(solve_whole, request, request.problem, best))
    solving = [*map(pool.submit, solves), *([bounding] if bounding else [])]
    raced: list[EvaluatedPlan] = []
    if known:
        search = partial(race, strategies=not fixed, recompute=request.problem.recomputes)
        raced = search(known, request.at(SOLVING), stop=lambda: solving[0].done() or is_solved.is_set())
        starts, is_over = [*raced, *solving[0].result().plans], lambda: all(each.done() for each in solving)
        raced += search(starts, request.at(SOLVING + DECODING), stop=is_over, most=1)
    found = [each.result() for each in solving]
    said = [each.status for each in found if each.plans] or [found[0].status]
    bound = max((each.bound for each in found if each.bound is not None), default=None)
    status = "optimal" if "optimal" in said else said[0]
    return SolverResult(status, bound, [plan for each in found for plan in each.plans]), raced


def heuristics(problem: PlanningProblem, fixed: Sequence[Strategy] | None) -> Iterator[Plan]:
    """Yield the best heuristics' plans, fitted to the budget, of greedy mixes for shares of it, or of the fixed mix."""
    coarse = Priority(COARSER * problem.profile.block / MIB)
    mixes: dict[StrategyAssignment, None] = {}
    for scheduler in (coarse, Dear(), Wfbp(), Priority()):
        for mix in list(mixes) or _mixes(problem, fixed):
            if scheduler is coarse and mix in mixes:
                continue
            mixes[mix] = None
            with contextlib.suppress(PlanError):
                plan = scheduler.schedule(mix)
                yield plan if problem.budget is None else fastest_repair(plan, problem.budget)


def _mixes(problem: PlanningProblem, fixed: Sequence[Strategy] | None) -> Iterator[StrategyAssignment]:
    if fixed is not None or problem.budget is None:
        yield problem.mix(fixed or Greedy().choose(problem).strategies)
        if fixed is None and problem.profile.has_gradient_times:  # dp: an early all-reduce needs no gather after it
            yield problem.mix([Strategy.dp] * len(problem.profile.units))
        return
    slack = problem.budget - problem.floor
    for share in _SHARES:
        part = dataclasses.replace(problem, budget=problem.budget - int(share * slack))
        yield problem.mix(Greedy().choose(part).strategies)


def merge_blocks(best: EvaluatedPlan, until: float) -> EvaluatedPlan:
    """Return the plan with neighbouring blocks merged, as long as this costs less than the messages that it saves."""
    for apart in (False, True):
        for u in range(len(best.plan.blocks)):
            while time.monotonic() < until and (larger := merge_adjacent_blocks(best.plan, u, apart=apart)) is not None:
                try:
                    check(larger)
                    merged = evaluate(larger)
                except PlanError:
                    break
                if merged.cost_s > best.cost_s:
                    break
                best = merged
    return best


def merge_adjacent_blocks(plan: Plan, unit: int, *, apart: bool) -> Plan | None:
    """Return the plan with pairs of a unit's blocks merged, or None without any pair.

    Two blocks are merged if they follow each other in every kind of message. Unless ``apart``, their gradients must
    also become ready together. A merged block is reduced where its last block was, and gathered where its first was.
    """
    sent: dict[int, dict[tuple[Kind, int], int]] = {b: {} for b in range(len(plan.blocks[unit]))}
    for i, m in enumerate(plan.messages):
        for u, b in m.parts:
            if u == unit:
                stays = len(m.parts) > 1 or m.blocking
                sent[b][m.kind, m.micro] = -2 * i - 2 if stays else i  # negative and even: never next to another number
    parts = block_ready_fractions(plan.profile, unit, plan.blocks[unit])
    first, b = set[int](), 0  # first block of each pair
    while b + 1 < len(parts):
        neighbours = bool(sent[b]) and all(abs(i - sent[b + 1][op]) == 1 for op, i in sent[b].items())
        if neighbours and (apart or parts[b] == parts[b + 1]):
            first.add(b)
            b += 1
        b += 1
    if not first:
        return None
    number = list(itertools.accumulate([b - 1 not in first for b in range(len(parts))]))  # block -> new block, from 1
    messages = []
    for i, m in enumerate(plan.messages):
        (u, b), *more = m.parts
        if u == unit and not more and (b in first or b - 1 in first):
            other = sent[b + 1 if b in first else b - 1][m.kind, m.micro]
            if (i < other) is not m.kind.is_gather:
                continue
        messages.append(
            dataclasses.replace(m, parts=tuple([(v, number[c] - 1 if v == unit else c) for v, c in m.parts]))
        )
    sizes = [0] * number[-1]
    for b, size in zip(number, plan.blocks[unit], strict=True):
        sizes[b - 1] += size
    blocks = (*plan.blocks[:unit], tuple(sizes), *plan.blocks[unit + 1 :])
    return dataclasses.replace(plan, blocks=blocks, messages=tuple(messages))


def issued_early(best: EvaluatedPlan) -> EvaluatedPlan:
    """Return the plan with each message issued in the first slot that its window and the order of messages allow, or
    ``best`` if that is slower. Predicted steps hardly differ, but ranks that are never alike wait less for each other.
    """
    among = Candidates(best.plan.job, None)
    now = among.of(best.plan)
    slots, low = list(now.slots), 0
    for i, number in enumerate(now.messages):
        first, last = among.window(number)
        if not best.plan.messages[i].blocking:
            earlier = range(low, slots[i])
            slots[i] = next((q for q in earlier if first <= q <= last or first <= q + among.length <= last), slots[i])
        low = slots[i]
    early = evaluate(among.plan(now._replace(slots=slots), best.plan))
    return early if early.step_s <= best.step_s * (1 + _WORTH) else best


@dataclass(frozen=True)
class Joint(SlotPlanner):
    """Strategies and schedule in one program, under the whole budget.

    ``trials`` is read by code that has ranks to run plans (:mod:`mdcs.profiler.stages`). It does not change the plan.
    """

    name: ClassVar[str] = "joint"
    trials: int | None = option(
        None, "plans that take turns in the first steps, heuristics' too; the fastest is kept. null: 3 in a long run",
        at_least=1,
    )  # fmt: skip

    def plan(self, problem: PlanningProblem) -> Plan:
        """Return a plan within ``problem.budget``. Raises InfeasibleBudget. Where recomputation is open but not needed,
        the plan without it comes first, and the rest goes on from it in half as many seconds, so is never slower.
        """
        problem.starts()
        kept = dataclasses.replace(problem, job=dataclasses.replace(problem.job, recompute=()), recomputes=False)
        if not problem.recomputes or problem.budget is None or kept.floor > problem.budget:
            return self.solved(problem, self.name)
        first = self.solved(kept, self.name)
        return dataclasses.replace(self, seconds=self.seconds / 2).solved(problem, self.name, start=first)


@dataclass(frozen=True)
class MemoryAware(SlotPlanner):
    """Plans with the budget of the mix."""

    name: ClassVar[str] = "memory_aware"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the best schedule found, the heuristics' included. Raises PlanError if none fits the mix's budget."""
        return self.solved(PlanningProblem(mix.job, mix.budget), self.name, mix.strategies)
