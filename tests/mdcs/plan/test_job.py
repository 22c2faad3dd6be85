"""Jobs: what all plans of one share."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from mdcs.plan.job import Job
from mdcs.planner.feasibility import PlanningProblem
from tests.mdcs.profiles import chain, planned


def test_a_profile_is_a_job_of_plain_steps() -> None:
    profile = chain(8, 8)
    assert Job.of(profile) == Job(profile, 1, True, 0)
    job = Job(profile, 2, False, 7)
    assert Job.of(job) is job


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"micro_steps": 0}, "micro_steps must be >= 1, got 0"), ({"reserve": -1}, "reserve must be >= 0 bytes, got -1")],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Job(chain(8), **settings)  # type: ignore[arg-type]


def test_all_plans_of_a_job_share_its_period_and_costs() -> None:
    plan = planned(chain(8, 8), "fsdp")
    other = replace(plan, budget=10**6)
    assert other.period is plan.period and other.job.cost is plan.job.cost
    problem = PlanningProblem(plan.job, None)
    assert problem.mix(plan.strategies).period is plan.period


def test_what_was_worked_out_does_not_travel() -> None:
    plan = planned(chain(8, 8), "zero2")
    assert plan.period.length == 4 and plan.hash
    copy = pickle.loads(pickle.dumps(plan))
    assert "period" not in vars(copy.job) and "hash" not in vars(copy)
    assert copy == plan and copy.hash == plan.hash
