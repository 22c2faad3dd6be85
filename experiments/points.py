"""Trade-offs: memory of strategies against memory of the schedule, and memory against time, as replays predict them.

Functions of one that makes a plan (:func:`mdcs.planner.pipeline.make_plan` with fixed planners).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget

Make = Callable[[int, float | None, float | None], Plan]
"""(budget in bytes, schedule_share, activation_share) -> plan with its prediction. Raises InfeasibleBudget."""


@dataclass(frozen=True)
class Point:
    """The plan for a budget (bytes) and shares of its slack, or the reason why there is none.

    - share, activations: parts for the schedule, and of the rest for activations. None: not divided.
    - planned_for: the budget that the plan was made for, if smaller than `budget`.
    """

    budget: int
    share: float | None
    activations: float | None
    plan: Plan | None
    reason: str = ""
    planned_for: int | None = None

    @property
    def step_s(self) -> float:
        """Predicted step time, in seconds. Infinite without a plan."""
        return math.inf if self.plan is None or self.plan.prediction is None else self.plan.prediction.step_s


def shares(count: int) -> tuple[float, ...]:
    """Return ``count`` equally spaced shares from 0 to 1."""
    return tuple(i / (count - 1) for i in range(count))


def point(make: Make, budget: int, share: float | None, activations: float | None = None) -> Point:
    """Return the plan for one budget and shares, or the reason why there is none."""
    try:
        return Point(budget, share, activations, make(budget, share, activations))
    except InfeasibleBudget as error:
        return Point(budget, share, activations, None, str(error))


def curve(make: Make, budget: int, of: Sequence[float]) -> list[Point]:
    """Return a point for every share of the schedule."""
    return [point(make, budget, share) for share in of]


def plane(make: Make, budget: int, count: int) -> list[Point]:
    """Return a point for each division of the slack into ``count`` - 1 parts: schedule, activations, strategies."""
    parts = count - 1
    return [
        point(make, budget, schedule / parts, activations / max(1, parts - schedule))
        for schedule in range(count) for activations in range(count - schedule)
    ]  # fmt: skip


def best(points: Iterable[Point]) -> Point:
    """Return the point with the smallest predicted step time, the first of several. On a curve it is the stop point."""
    return min(points, key=lambda p: p.step_s)


def front(make: Make, budgets: Iterable[int], of: Sequence[float] = ()) -> list[Point]:
    """Return the fastest point for every budget, in ascending order.

    It is the fastest of three: the plan with undivided slack, the stop point over the shares ``of``, and the plan of
    the budget before, which also fits. So a larger budget never gives a slower plan.
    """
    found: list[Point] = []
    for budget in sorted(set(budgets)):
        candidates = [point(make, budget, None), *curve(make, budget, of)]
        if found:
            before = found[-1]
            earlier = before.planned_for or before.budget
            candidates.append(dataclasses.replace(before, budget=budget, planned_for=earlier))
        found.append(best(candidates))
    return found
