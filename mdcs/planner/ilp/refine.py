"""Better plans from good ones, by replay: race searches, merge blocks, and lower the peak."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.plan.worst_case import check, min_feasible_budget
from mdcs.planner.budget_repair import repair
from mdcs.planner.ilp.portfolio import EvaluatedPlan, evaluate
from mdcs.planner.search import anneal, merge_adjacent_blocks
from mdcs.simulator.simulate import replay

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
