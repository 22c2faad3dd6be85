"""The trade-off: its curve, its stop point, and the front over budgets."""

import random

import pytest

from experiments.curve import Make, best, front, plane, point, shares
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import Scheduler, StrategyPlanner, floor_bytes, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Dear, Sequential, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from tests.mdcs.planner.test_every_plan import job


def maker(seed: int, strategy: StrategyPlanner, scheduler: Scheduler) -> tuple[Make, int]:
    """Plans for a random job, and its floor."""
    profile = job(seed)
    return lambda budget, share, _: make_plan(
        profile, strategy, scheduler, budget=budget, schedule_share=share
    ), floor_bytes(profile)


def test_a_share_that_nothing_fits_is_a_point_with_a_reason() -> None:
    make, floor = maker(1, Uniform("dp"), Wfbp())
    tight = point(make, floor, 1.0)
    assert tight.plan is None and tight.step_s == float("inf")
    assert "does not fit" in tight.reason
    assert best([tight, point(make, 4 * floor, 0.0)]).plan is not None


# ---- the front


@pytest.mark.parametrize("seed", range(8))
def test_a_larger_budget_is_never_slower(seed: int) -> None:
    make, floor = maker(seed, Greedy(), random.Random(seed).choice([Dear(), Priority()]))
    points = front(make, [int(floor * (1 + i / 10)) for i in (5, 0, 1, 2, 3)], shares(5))
    assert [p.budget for p in points] == sorted(p.budget for p in points)
    steps = [p.step_s for p in points]
    assert steps == sorted(steps, reverse=True)
    for p in points:
        assert p.plan is not None and p.plan.prediction is not None
        assert p.plan.prediction.peak_bytes <= (p.plan.budget or 0) <= p.budget


def test_a_plan_of_a_smaller_budget_stands_in_for_a_worse_one() -> None:
    make, floor = maker(3, Greedy(), Wfbp())
    small, large = floor, 2 * floor

    def worse_with_more(budget: int, share: float | None, activations: float | None) -> Plan:
        return make_plan(job(3), Uniform("fsdp"), Sequential()) if budget == large else make(budget, share, activations)

    points = front(worse_with_more, [large, small])
    assert points[1].plan is points[0].plan
    assert (points[1].budget, points[1].planned_for) == (large, small)


def test_a_plane_has_every_division_in_equal_parts_once() -> None:
    asked: list[tuple[float, float]] = []

    def make(budget: int, schedule: float | None, activations: float | None) -> Plan:
        asked.append((schedule or 0.0, activations or 0.0))
        raise InfeasibleBudget(budget, None, "nothing")

    points = plane(make, 100, 5)
    assert len(points) == len(set(asked)) == 15
    divided = {(schedule, round((1 - schedule) * activations, 9)) for schedule, activations in asked}
    assert divided == {(i / 4, j / 4) for i in range(5) for j in range(5 - i)}
    assert all("nothing" in p.reason for p in points)
