"""The floor: no mix needs less, planners plan at exactly that budget, and a byte less is refused with it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given

import mdcs
from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.period import Strategy, choices
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem, min_peak_strategies
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.pipeline import StrategyPlanner
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Sequential
from mdcs.planner.strategies import Greedy, RandomMix
from mdcs.profile.schema import Profile
from tests.mdcs.profiles import ADAM, Job, chain, examples, few, jobs, link

dp, zero2, sdp, fsdp, *_ = Strategy


def peak(job: Job, *mix: Strategy) -> int:
    return job.problem.peak(mix)


def busy(profile: Profile, *units: int) -> Profile:
    """The backward slots of these units have as much workspace as makes them the peak."""
    slots = [replace(s, peak=s.peak + 20_000) if s.unit in units and s.phase == "B" else s for s in profile.slots]
    return replace(profile, slots=tuple(slots))


def test_one_large_unit_is_better_whole_than_whole_beside_its_shard() -> None:
    job = Job(busy(chain(8, 1000, optimizer=ADAM), 1))
    floor = mdcs.floor_bytes(job.plain)
    assert floor == peak(job, fsdp, zero2) < peak(job, zero2, zero2) < peak(job, fsdp, fsdp)
    assert min_peak_strategies(job.plain) == (fsdp, zero2)
    assert floor == peak(job, fsdp, fsdp) - 1000 * 4 // 2  # its shard


def test_where_nothing_needs_less_it_is_all_fsdp() -> None:
    job = Job(chain(500, 500, 500, 500, optimizer=ADAM))
    assert min_peak_strategies(job.plain) == (fsdp,) * 4
    assert mdcs.floor_bytes(job.plain) == peak(job, *[fsdp] * 4)


@examples(60)
@given(jobs(max_units=6))
def test_no_mix_of_few_units_and_no_uniform_one_needs_less(job: Job) -> None:
    kinds, count = choices(job.profile), len(job.profile.units)
    mixes = [(kind,) * count for kind in kinds] if count > 3 else itertools.product(kinds, repeat=count)
    assert job.problem.floor <= min(map(job.problem.peak, mixes))


TIGHT = Job(busy(chain(8, 1000, 8, optimizer=ADAM, link=link(1e-6, 1e-4)), 1), reserve=7)


@pytest.mark.parametrize("planner", few([Greedy(), RandomMix(3), Ilp(seconds=5.0)], 2), ids=lambda p: p.name)
@pytest.mark.parametrize("share", [None, 0.0, 1.0])
def test_a_planner_plans_at_exactly_the_floor_and_names_it_below(planner: StrategyPlanner, share: float | None) -> None:
    floor = TIGHT.problem.floor
    assert floor < peak(TIGHT, fsdp, fsdp, fsdp)
    for scheduler in (Sequential(), Priority()):
        plan = TIGHT.plan(planner, scheduler, budget=floor, schedule_share=share)
        assert min_feasible_budget(plan) <= floor
    with pytest.raises(InfeasibleBudget, match=f"even the leanest mix .* does not fit .* is {floor} bytes") as refused:
        TIGHT.plan(planner, Priority(), budget=floor - 1, schedule_share=share)
    assert refused.value.smallest == floor


def test_the_joint_planner_plans_at_exactly_the_floor_too() -> None:
    floor = TIGHT.problem.floor
    plan = mdcs.make_plan(TIGHT.plain, Joint(seconds=3.0), budget=floor)
    assert min_feasible_budget(plan) <= floor
    with pytest.raises(InfeasibleBudget, match=f"is {floor} bytes"):
        mdcs.make_plan(TIGHT.plain, Joint(seconds=3.0), budget=floor - 1)


def test_greedy_starts_from_the_floors_mix_where_all_fsdp_would_fit_as_well() -> None:
    """It has fewer gathers and needs less: with more bytes greedy must not be slower."""
    judges = [PlanningProblem(TIGHT.plain, TIGHT.problem.floor + more) for more in range(0, 9000, 300)]
    times = [problem.seconds(Greedy().choose(problem).strategies) for problem in judges]
    assert times == sorted(times, reverse=True) and times[0] < TIGHT.problem.seconds([fsdp] * 3)
