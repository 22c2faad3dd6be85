"""Plans that a search starts from: heuristics, fitted to the budget. And better ones: races, merges, lower peaks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mdcs.plan.ledger import check, min_feasible_budget
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.budget_repair import repair
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Dear, Partitioning, Wfbp, fuse_neighbours
from mdcs.planner.search import anneal, merge_adjacent_blocks
from mdcs.planner.strategies import Greedy
from mdcs.profile.link import Contention
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB

COARSER = 8  # saturation blocks in a coarse block: plans with few messages leave time for more replays
_FUSED = 4  # saturation blocks in a fused message at most: a larger one waits for its last unit
_SHARES = (0.25, 0.0, 0.5, 0.75, 1.0)  # of the slack above the floor, left to the schedule
_BEYOND_REPLAY = 5e-5  # s per message beyond the replay; measured 30 to 130 µs on plans with hundreds of messages


class EvaluatedPlan(NamedTuple):
    """A plan and its step time by replay, in seconds."""

    step_s: float
    plan: Plan

    @property
    def cost_s(self) -> float:
        """The step, plus the cost of messages beyond the replay, which is 0 for a profile without contention."""
        alone = self.plan.profile.contention == Contention()
        return self.step_s + (0.0 if alone else _BEYOND_REPLAY * len(self.plan.messages))


def evaluate(plan: Plan) -> EvaluatedPlan:
    """Replay a plan."""
    return EvaluatedPlan(replay(plan).period_s, plan)


def while_time_remains(deadline: float, plans: Iterator[Plan]) -> Iterator[EvaluatedPlan]:
    """Evaluate plans until the next, if it takes as long as the last, would miss the deadline. Always yield the first.
    """
    began = time.monotonic()
    for plan in plans:
        yield evaluate(plan)
        took, began = time.monotonic() - began, time.monotonic()
        if began + took > deadline:
            return


def fitted(problem: PlanningProblem, plan: Plan, *, fuse: bool = True) -> Iterator[Plan]:
    """Yield the plan fitted to the budget, and if ``fuse`` also with small neighbours fused. Skip what does not fit."""
    fused = fuse_neighbours(plan, _FUSED * plan.profile.block) if fuse else plan
    for each in (plan, fused) if len(fused.messages) < len(plan.messages) else (plan,):
        with contextlib.suppress(PlanError):
            yield each if problem.budget is None else repair(each, problem.budget)


def heuristics(problem: PlanningProblem, fixed: Sequence[Strategy] | None) -> Iterator[Plan]:
    """Yield the plans of the best heuristics: greedy mixes for several shares of the budget, or the fixed mix.

    Schedules with few messages come first, those that are made fastest before the others.
    """
    mixes = list(dict.fromkeys(_mixes(problem, fixed)))
    coarse = Priority(COARSER * problem.profile.block / MIB)
    for scheduler in (Dear(), Wfbp(), coarse, Priority(), Partitioning()):
        for mix in mixes:
            yield from fitted(problem, scheduler.schedule(mix))


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


RACING = 6  # plans that a race starts from


def race(
    plans: Sequence[EvaluatedPlan],
    until: float,
    *,
    strategies: bool,
    recompute: bool = False,
    bound: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    most: int = RACING,
) -> list[EvaluatedPlan]:
    """Return the plans of searches that end at the time ``until``, by successive halving.

    Each of the ``most`` best plans is searched from in turn. The better half of the results is searched from again, and
    so on (Karnin, Koren, Somekh, ICML 2013). ``strategies``, ``recompute``, ``bound``, ``stop``: see :func:`anneal`.
    """
    found: list[EvaluatedPlan] = []
    racing = most_promising(plans, most)
    rounds = len(racing).bit_length()
    for r in range(rounds):
        ends = time.monotonic() + (until - time.monotonic()) / (rounds - r)
        better = []
        for i, (_, plan) in enumerate(racing):
            left = (ends - time.monotonic()) / (len(racing) - i)
            found_here = anneal(
                plan, left, bound=bound or 0.0, strategies=strategies, recompute=recompute, stop=stop, seed=r
            )
            better.append(evaluate(found_here))
        found += better
        racing = most_promising(better, len(racing) // 2)
    return found


def most_promising(plans: Sequence[EvaluatedPlan], most: int) -> list[EvaluatedPlan]:
    """Return the ``most`` best plans, at most one per mix, recomputation and scheduler."""
    first: dict[tuple[tuple[Strategy, ...], tuple[str, ...], str], EvaluatedPlan] = {}
    for each in sorted(plans, key=lambda each: each.cost_s):
        first.setdefault((each.plan.strategies, each.plan.recompute, each.plan.scheduler), each)
    return list(first.values())[:most]


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


def minimize_peak(best: EvaluatedPlan, floor: int, until: float) -> Plan:
    """Return the plan with later gathers and earlier reductions: the smallest peak found for its step time."""
    step_s, plan = best
    low, high = floor, min_feasible_budget(plan)
    while high - low > high // 200 and time.monotonic() < until:
        middle = (low + high) // 2
        try:
            leaner = dataclasses.replace(repair(dataclasses.replace(plan, budget=None), middle), budget=plan.budget)
            as_fast = replay(leaner).period_s <= step_s * (1 + 1e-6)
        except PlanError:
            as_fast = False
        if as_fast:
            plan, high = leaner, middle
        else:
            low = middle
    return plan
