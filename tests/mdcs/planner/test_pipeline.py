"""Properties of every plan: random profiles, strategies, schedulers, budgets and shares."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mdcs.plan.cost import CostModel
from mdcs.plan.ledger import check, min_feasible_budget
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import Scheduler, StrategyPlanner, floor_bytes, make_plan
from mdcs.planner.schedulers import Sequential, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.link import Kind
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import ADAM, Job, chain, examples, flexible, jobs, link, schedulers, strategies

factors = st.sampled_from([1.0, 1.02, 1.1, 1.3, 1.7, 3.0])  # of the floor
shares = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))


@dataclass(frozen=True)
class Asked:
    """A job with a budget that fits all fsdp, and how it is divided."""

    job: Job
    budget: int
    share: float | None

    def plan(self, strategy: StrategyPlanner, scheduler: Scheduler) -> Plan:
        return self.job.plan(strategy, scheduler, budget=self.budget, schedule_share=self.share)


@st.composite
def asked(draw: st.DrawFn, shares: st.SearchStrategy[float | None] = shares) -> Asked:
    job = draw(jobs())
    return Asked(job, int(job.problem.floor * draw(factors)), draw(shares))


# ---- every plan


@examples(100)
@given(asked(), flexible, schedulers)
def test_a_plan_keeps_its_budget(asked: Asked, strategy: StrategyPlanner, scheduler: Scheduler) -> None:
    plan = asked.plan(strategy, scheduler)
    assert plan.prediction is not None and plan.admissible is not None
    assert plan.budget == asked.budget  # though a share may admit less
    assert plan.prediction.peak_bytes <= plan.admissible <= asked.budget - plan.reserve
    assert min_feasible_budget(plan) <= plan.admissible + plan.reserve
    check(plan)
    assert plan.reserve == asked.job.reserve
    again = Plan.from_json(plan.to_json())
    assert (again, again.hash) == (plan, plan.hash)
    assert replay(again).prediction() == plan.prediction


@examples(120)
@given(asked(shares=st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])), flexible, schedulers)
def test_the_schedule_has_its_share_of_the_slack(asked: Asked, strategy: StrategyPlanner, scheduler: Scheduler) -> None:
    assert asked.share is not None
    plan = asked.plan(strategy, scheduler)
    assert plan.prediction is not None
    slack = asked.budget - asked.job.problem.floor
    sequential = asked.job.problem.peak(plan.strategies)
    assert sequential <= asked.job.problem.floor + (1 - asked.share) * slack + (asked.share < 1)
    assert plan.prediction.peak_bytes + plan.reserve - sequential <= asked.share * slack
    assert min_feasible_budget(plan) - sequential <= asked.share * slack


@examples(40)
@given(jobs(), strategies, schedulers)
def test_without_a_budget_everything_is_possible(job: Job, strategy: StrategyPlanner, scheduler: Scheduler) -> None:
    plan = job.plan(strategy, scheduler)
    assert plan.budget is None
    assert plan.prediction == replay(plan).prediction()


@examples(25)
@given(asked(shares=st.none()), flexible, schedulers)
def test_what_the_strategy_leaves_is_the_schedules(asked: Asked, strategy: StrategyPlanner, scheduler: Scheduler) -> None:
    plan = asked.plan(strategy, scheduler)
    assert plan.budget == asked.budget
    assert plan.strategies == asked.job.plan(strategy, Sequential(), budget=asked.budget).strategies


@examples(15)
@given(asked(), flexible, schedulers)
def test_planning_is_repeatable(asked: Asked, strategy: StrategyPlanner, scheduler: Scheduler) -> None:
    assert asked.plan(strategy, scheduler).to_json() == asked.plan(strategy, scheduler).to_json()


# ---- budgets that do not fit


@examples(50)
@given(jobs(), strategies, schedulers, shares, st.integers(1, 10**6))
def test_the_smallest_feasible_budget_that_the_error_names_is_feasible_and_smallest(
    job: Job, strategy: StrategyPlanner, scheduler: Scheduler, share: float | None, budget: int
) -> None:
    budget = min(budget, job.problem.floor - 1)
    try:
        job.plan(strategy, scheduler, budget=budget, schedule_share=share)
        assume(False)
    except InfeasibleBudget as e:
        smallest = e.smallest
    if smallest is None:  # the strategy needs more than the floor, which is all that share 1 leaves it
        assert share == 1 and isinstance(strategy, Uniform)
        with pytest.raises(InfeasibleBudget, match="no budget is enough"):
            job.plan(strategy, scheduler, budget=10**9, schedule_share=share)
        return
    assert budget < smallest
    job.plan(strategy, scheduler, budget=smallest, schedule_share=share)
    with pytest.raises(InfeasibleBudget) as caught:
        job.plan(strategy, scheduler, budget=smallest - 1, schedule_share=share)
    assert caught.value.smallest == smallest


def test_an_infeasible_budget_says_what_would_do() -> None:
    profile = chain(8, 16, 16, 16, optimizer=ADAM)
    floor = floor_bytes(profile)
    with pytest.raises(InfeasibleBudget, match=f"even all fsdp does not fit 10 bytes: the smallest .* is {floor} bytes"):
        make_plan(profile, Greedy(), Wfbp(), budget=10)
    need = floor_bytes(Job(profile, reserve=7))
    assert need == floor + 7
    with pytest.raises(InfeasibleBudget, match=f"is {need} bytes"):
        make_plan(Job(profile, reserve=7), Greedy(), Wfbp(), budget=need - 1)
    dp = min_feasible_budget(make_plan(profile, Uniform("dp"), Sequential()))
    assert dp > floor
    with pytest.raises(InfeasibleBudget, match=f"strategy dp does not fit {floor} bytes: .* is {dp} bytes"):
        make_plan(profile, Uniform("dp"), Wfbp(), budget=floor)
    with pytest.raises(InfeasibleBudget, match=f"is {floor + 2 * (dp - floor) - 1} bytes"):
        make_plan(profile, Uniform("dp"), Wfbp(), budget=floor, schedule_share=0.5)
    with pytest.raises(InfeasibleBudget, match="no budget is enough"):
        make_plan(profile, Uniform("dp"), Wfbp(), budget=10**9, schedule_share=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 10**6, "schedule_share": 1.5}, r"schedule_share must be in \[0, 1\], got 1.5"),
        ({"budget": 10**6, "schedule_share": -0.1}, r"schedule_share must be in \[0, 1\], got -0.1"),
        ({"schedule_share": 0.5}, "schedule_share divides a budget: set one"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(chain(8, 16), Uniform("dp"), Wfbp(), **options)  # type: ignore[arg-type]


# ---- what is sent


def test_bytes_sent_and_extra_communication() -> None:
    # 8 and 16 elements; a rank of two sends half: 16 and 32 bytes per reduce-scatter or gather, twice that all-reduced.
    profile = chain(8, 16, 16, link=link(0.5))
    sent = {s: make_plan(profile, Uniform(s), Sequential()).sent_bytes() for s in ("dp", "zero2", "fsdp")}
    assert sent["dp"] == {"AR": 160}
    assert sent["zero2"] == {"RS": 80, "AG_F": 80}
    assert sent["fsdp"] == {"RS": 80, "AG_F": 80, "AG_B": 16 + 32}  # not of the last unit
    extra = {s: CostModel(profile).extra_communication_s(bytes_) for s, bytes_ in sent.items()}
    assert extra == {"dp": 0, "zero2": 0, "fsdp": 24}
    accumulated = make_plan(Job(profile, micro_steps=3), Uniform("sdp"), Sequential()).sent_bytes()
    assert accumulated == {str(Kind.RS): 80, str(Kind.AG_F): 240}
