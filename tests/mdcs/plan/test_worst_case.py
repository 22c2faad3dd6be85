"""Bytes that must fit at each slot, whatever the timing: by hand, and against replays of random plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from mdcs.plan.ledger import check, min_feasible_budget, worst_case_bytes_by_slot
from mdcs.plan.plan import PlanError
from mdcs.planner.schedulers import RandomOrder
from mdcs.planner.strategies import RandomMix
from mdcs.simulator.simulate import replay
from tests.mdcs.plan.test_ledger import PROFILE
from tests.mdcs.profiles import Job, examples, jobs, of_job, planned, seeds


def test_the_peak_is_the_smallest_budget_of_a_plan() -> None:
    plan = planned(PROFILE, "zero2")
    assert worst_case_bytes_by_slot(plan) == [104 + 16 + 50, 104 + 32 + 45, 104 + 32 + 16 + 16 + 10, 104 + 40]
    check(replace(plan, budget=181))
    check(replace(of_job(plan, reserve=10), budget=191))
    check(replace(plan, budget=None))
    for budget, reserve in ((180, 0), (190, 10)):
        with pytest.raises(PlanError, match=rf"cycle: slot 1 \(B:a\) needs {181 + reserve} of {budget} bytes"):
            check(replace(of_job(plan, reserve=reserve), budget=budget))


def test_a_cycle_names_what_was_gathered_ahead() -> None:
    plan = planned(PROFILE, "sdp")  # RS b, RS a, AG_F a, AG_F b at slots 1, 2, 2, 3
    ahead = replace(plan, messages=(*plan.messages[:3], replace(plan.messages[3], slot=2)), budget=min_feasible_budget(plan))
    assert min_feasible_budget(ahead) == min_feasible_budget(plan)  # 48 bytes of parameters fit beside F:a
    tight = replace(PROFILE, slots=tuple(replace(s, peak=100) if s.phase == "F" and s.unit == 0 else s for s in PROFILE.slots))
    tight_plan = replace(of_job(ahead, profile=tight), budget=80 + 32 + 100)
    with pytest.raises(PlanError, match=r"slot 2 \(F:a\) needs 228 of 212 bytes.* \(gathered ahead: AG_F of b\)"):
        check(tight_plan)
    check(replace(of_job(plan, profile=tight), budget=212))


@examples(100)
@given(jobs(), seeds)
def test_the_peak_is_exact(job: Job, seed: int) -> None:
    """With its peak as budget a plan runs to the end; with one byte less it cannot, whatever the timing."""
    plan = job.plan(RandomMix(seed), RandomOrder(seed))
    smallest = min_feasible_budget(plan)
    enough = replace(plan, budget=smallest)
    check(enough)
    assert replay(enough).peak["total"] + plan.reserve <= smallest
    less = replace(plan, budget=smallest - 1)
    with pytest.raises(PlanError, match="cycle: slot"):
        check(less)
    with pytest.raises(PlanError, match="deadlock at slot"):
        replay(less)
