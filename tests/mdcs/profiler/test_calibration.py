"""Plans that tell the costs of messages apart, and their runs before training."""

from __future__ import annotations

import pytest

from mdcs.plan.job import Job
from mdcs.profiler.calibration import calibration_plans
from mdcs.sizes import MIB

from ..profiles import chain
from .test_cost_fit import GUESS, PROFILE


@pytest.mark.parametrize("sizes", [[3 * MIB // 2] * 8, [MIB] * 8, [1000] * 8, [10, 10**7, 300, 10**6]])
def test_the_first_plan_has_every_operation_with_long_and_short_messages(sizes: list[int]) -> None:
    mixed, greedy = calibration_plans(Job(chain(*sizes, link=GUESS)))
    for kind in ("AR", "RS", "AG_F"):
        sent = [mixed.wire(m) for m in mixed.messages if str(m.kind) == kind]
        assert max(sent) >= 2 * min(sent)
    assert greedy.strategy == "greedy"


def test_calibration_plans_keep_a_budget() -> None:
    free = calibration_plans(Job(PROFILE))
    budget = min(plan.prediction.peak_bytes for plan in free if plan.prediction)
    plans = calibration_plans(Job(PROFILE), budget)
    assert all(plan.budget == budget and plan.prediction and plan.prediction.peak_bytes <= budget for plan in plans)
