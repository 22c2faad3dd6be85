"""Jobs: what all plans of one share; and slots with recomputation, worked out by hand, and what a plan says of it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from mdcs.plan.job import Job, recomputing
from mdcs.plan.ledger import worst_case_bytes_by_slot
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import PlanningProblem
from mdcs.profile.schema import Profile, Slot, Unit
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import FREE, chain, planned, recomputable


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


def three() -> Profile:
    """Units a, b, c. Each saves 100 bytes in forward, has 20 bytes more at work, and keeps 10 if it recomputes."""
    units = tuple(Unit(name, (10,), True, (i, i), (2 - i,) * 2) for i, name in enumerate("abc"))
    forward = [Slot(i, "F", 1.0, 100 * i, 100 * i + 120) for i in range(3)]
    backward = [Slot(i, "B", 2.0, 100 * i + 100, 100 * i + 120) for i in (2, 1, 0)]
    return recomputable(Profile(units, (*forward, *backward), 2, FREE), freed=90, seconds=1.0, peak=110)


def test_bytes_are_free_between_forward_and_backward() -> None:
    slots = recomputing(three(), ("none", "full", "none")).slots
    assert [slot.live for slot in slots] == [0, 100, 110, 210, 110, 100]
    assert [slot.peak for slot in slots] == [120, 220, 230, 230, 220, 120]  # b's backward: 110 + 110
    assert [slot.seconds for slot in slots] == [1, 1, 1, 2, 3, 2]


def test_recomputation_of_all_units_adds_up() -> None:
    slots = recomputing(three(), ("full",) * 3).slots
    assert [slot.live for slot in slots] == [0, 10, 20, 30, 20, 10]
    assert [slot.peak for slot in slots] == [120, 130, 140, 140, 130, 120]


def test_without_recomputation_the_profile_is_the_measured_one() -> None:
    profile = three()
    assert recomputing(profile, ()) is profile
    assert Job(profile).with_recompute(("none",) * 3) == Job(profile) and Job(profile).period.profile is profile


def test_gradients_come_later_in_a_slot_that_recomputes_first() -> None:
    profile = three()
    b = replace(profile.units[1], gradients=((4, 1.0), (6, 0.5)))
    units = recomputing(replace(profile, units=(profile.units[0], b, profile.units[2])), ("full", "full", "none")).units
    assert units[1].gradients == ((4, 1.0), (6, 2 / 3))  # one second of recomputation, then one of two


def test_a_plan_needs_the_bytes_and_seconds_of_its_recomputation() -> None:
    kept = planned(three(), "dp")
    freed = replace(kept, job=replace(kept.job, recompute=("full",) * 3))
    assert replay(kept).period_s == 9 and replay(freed).period_s == 12
    needs = zip(worst_case_bytes_by_slot(kept), worst_case_bytes_by_slot(freed), strict=True)
    assert [before - after for before, after in needs] == [180, 90, 0, 0, 90, 180]


def test_every_micro_step_recomputes() -> None:
    plan = planned(three(), "dp", micro_steps=2, recompute=("none", "full", "none"))
    assert plan.period.seconds == (2, 3, 2, 1, 1, 1, 2, 3, 2, 1, 1, 1)


def test_the_hash_tells_plans_with_recomputation_apart_and_json_keeps_it() -> None:
    kept = planned(three(), "zero2")
    freed = replace(kept, job=replace(kept.job, recompute=("none", "none", "full")))
    assert freed.recompute == ("none", "none", "full") and freed.hash != kept.hash
    again = Plan.from_json(freed.to_json())
    assert again.hash == freed.hash and again.recompute == freed.recompute and again.job.profile == three()
    assert '"recompute": []' not in kept.to_json() and Plan.from_json(kept.to_json()).recompute == ()


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        (("full",), "1 choices of recomputation for 2 units"),
        (("none", "full"), "the profile has no recomputation 'full' for unit b"),
        (("selective", "none"), "the profile has no recomputation 'selective' for unit a"),
    ],
)
def test_a_choice_that_the_profile_does_not_know_is_refused(choices: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Job(recomputable(chain(8, 8), 0, freed=10), recompute=choices)
