"""Plans that tell the costs of messages apart, and their runs before training."""

from __future__ import annotations

import pytest

from mdcs.plan.job import Job
from mdcs.profile.link import Link
from mdcs.profiler.calibration import calibration_plans
from mdcs.sizes import MIB

from ..profiles import chain

GUESS = Link.uniform(1.0, 100.0)
PROFILE = chain(*[3 * MIB // 2] * 8, link=GUESS, forward_s=0.03, backward_s=0.06)


def test_the_plans_tell_costs_apart() -> None:
    plans = calibration_plans(Job(PROFILE))
    kinds = {str(m.kind) for plan in plans for m in plan.messages}
    sent: dict[int, list[int]] = {}
    for plan in plans:
        sent.setdefault(sum(plan.sent_bytes().values()), []).append(len(plan.messages))
    assert kinds == {"AR", "RS", "AG_F", "AG_B"} and 4 <= len(plans) <= 6
    assert any(max(counts) >= 4 * min(counts) for counts in sent.values())


@pytest.mark.parametrize("sizes", [[MIB] * 8, [1000] * 8, [10, 10**7, 300, 10**6]])
def test_plans_of_any_sizes_of_units_differ_in_their_number_of_messages(sizes: list[int]) -> None:
    counts = [len(plan.messages) for plan in calibration_plans(Job(chain(*sizes, link=GUESS)))]
    assert max(counts) >= 3 * min(counts)


def test_calibration_plans_keep_a_budget() -> None:
    free = calibration_plans(Job(PROFILE))
    budget = min(plan.prediction.peak_bytes for plan in free if plan.prediction)
    plans = calibration_plans(Job(PROFILE), budget)
    assert all(plan.budget == budget and plan.prediction and plan.prediction.peak_bytes <= budget for plan in plans)
