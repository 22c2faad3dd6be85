"""Trade-offs: memory of the strategies against memory of the schedule, and memory against time.

Pure functions over a function that makes a plan for a budget and a share of the slack for the schedule
(:func:`mdcs.planner.pipeline.make_plan` with fixed planners). All times are predicted by replays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget

Make = Callable[[int, float | None], Plan]
"""(budget in bytes, schedule_share) -> plan with its prediction.

Share None: the slack is not divided. Raises InfeasibleBudget.
"""

MakeDivided = Callable[[int, float, float], Plan]
"""(budget in bytes, schedule_share, activation_share) -> plan with its prediction. Raises InfeasibleBudget."""


@dataclass(frozen=True)
class Point:
    """The plan for a budget and a share, or the reason why there is none.

    - ``budget``: bytes.
    - ``share``: part of the slack for the schedule. None: not divided.
    - ``activations``: part of what the schedule leaves that is for activations. None: not divided.
    - ``plan``: the plan, or None.
    - ``reason``: why there is no plan.
    - ``planned_for``: the budget that the plan was made for, if smaller than ``budget``.
    """

    budget: int
    share: float | None
    plan: Plan | None
    reason: str = ""
    planned_for: int | None = None
    activations: float | None = None

    @property
    def step_s(self) -> float:
        """Predicted step time, in seconds. Infinite without a plan."""
        return math.inf if self.plan is None or self.plan.prediction is None else self.plan.prediction.step_s


def shares(count: int) -> tuple[float, ...]:
    """Return ``count`` equally spaced shares from 0 to 1. Raises ValueError for fewer than two."""
    if count < 2:
        raise ValueError(f"a curve has two shares or more, got {count}")
    return tuple(i / (count - 1) for i in range(count))


def point(make: Make, budget: int, share: float | None) -> Point:
    """Return the plan for one budget and share, or the reason why there is none."""
    try:
        return Point(budget, share, make(budget, share))
    except InfeasibleBudget as e:
        return Point(budget, share, None, str(e))


def curve(make: Make, budget: int, of: Sequence[float]) -> list[Point]:
    """Return a point for every share."""
    return [point(make, budget, share) for share in of]


def plane(make: MakeDivided, budget: int, count: int) -> list[Point]:
    """Return a point for each division of the slack into ``count`` - 1 equal parts: for schedule, activations,
    strategies.

    Raises ValueError for fewer than two parts.
    """
    if count < 3:
        raise ValueError(f"a plane has three shares or more, got {count}")
    parts, found = count - 1, []
    for schedule in range(count):
        rest = parts - schedule
        for activations in range(rest + 1):
            share, part = schedule / parts, activations / rest if rest else 0.0
            made = point(partial(_divided, make, part), budget, share)
            found.append(dataclasses.replace(made, activations=part))
    return found


def _divided(make: MakeDivided, activations: float, budget: int, share: float | None) -> Plan:
    assert share is not None
    return make(budget, share, activations)


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
            candidates.append(
                dataclasses.replace(before, budget=budget, planned_for=before.planned_for or before.budget)
            )
        found.append(best(candidates))
    return found
