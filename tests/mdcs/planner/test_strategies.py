"""Strategy planners: uniform, random, greedy. The ILP has its own tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.lifetimes import extra_bytes_vs_fsdp
from mdcs.plan.period import Strategy, choices
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem
from mdcs.planner.pipeline import SCHEDULERS, STRATEGIES, scheduler_named, strategy_named
from mdcs.planner.schedulers import Sequential
from mdcs.planner.strategies import Greedy, RandomMix, Uniform
from mdcs.profile.link import Link
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import ADAM, Job, chain, examples, jobs, planned, seeds

dp, zero2, sdp, fsdp, *_ = Strategy


def step_s(problem: PlanningProblem, mix: tuple[Strategy, ...]) -> float:
    return replay(Sequential().schedule(problem.mix(mix))).period_s


# ---- the planning problem


def test_the_judge_measures_the_sequential_peak() -> None:
    profile = chain(8, 4, optimizer=ADAM)
    problem = PlanningProblem(Job(profile, reserve=5), None)
    assert problem.peak([dp, zero2]) == min_feasible_budget(planned(profile, ["dp", "zero2"])) + 5
    assert problem.floor == problem.peak([fsdp, fsdp])
    assert problem.fits([dp, dp])
    tight = replace(problem, budget=problem.floor)
    assert tight.fits([fsdp, fsdp]) and not tight.fits([dp, dp])
    with pytest.raises(InfeasibleBudget, match=f"both dp does not fit {problem.floor} bytes"):
        tight.require([dp, dp], "both dp")


# ---- uniform


def test_uniform_is_uniform_where_it_fits() -> None:
    profile = chain(8, 4, 4, optimizer=ADAM)
    need = PlanningProblem(Job(profile), None).peak([fsdp] * 3)
    assert Uniform("fsdp").choose(PlanningProblem(Job(profile), need)).strategies == (fsdp,) * 3
    with pytest.raises(InfeasibleBudget, match=f"strategy fsdp does not fit .* {need} bytes") as caught:
        Uniform("fsdp").choose(PlanningProblem(Job(profile), need - 1))
    assert (caught.value.budget, caught.value.smallest) == (need - 1, need)


def test_uniform_needs_a_strategy_that_exists() -> None:
    with pytest.raises(ValueError, match="each must be one of dp, zero2, sdp, fsdp, hsdp_no_reshard, hsdp; got zero9"):
        Uniform("zero9")


# ---- random


@examples(60)
@given(jobs(), seeds, st.sampled_from([1.0, 1.1, 1.5]))
def test_random_is_always_within_the_budget(job: Job, seed: int, factor: float) -> None:
    problem = replace(job.problem, budget=int(job.problem.floor * factor))
    mix = RandomMix(seed).choose(problem).strategies
    assert problem.fits(mix)
    assert mix == RandomMix(seed).choose(problem).strategies


def test_random_tries_everything() -> None:
    profile = chain(*[4] * 8)
    mixes = {RandomMix(seed).choose(PlanningProblem(Job(profile), None)).strategies for seed in range(20)}
    assert len(mixes) == 20
    assert {k for mix in mixes for k in mix} == {dp, zero2, sdp, fsdp}


# ---- what a strategy costs


@examples(60)
@given(jobs(), seeds)
def test_a_sequential_step_is_compute_and_the_seconds_of_its_strategies(job: Job, seed: int) -> None:
    none = (0.0,) * len(job.profile.link.kinds)
    alone = replace(job.profile.link, gap=none)  # a gap longer than the latency is seen between these messages, too
    job = replace(job, profile=replace(job.profile, link=alone))
    plan = job.plan(RandomMix(seed), Sequential())
    assert plan.prediction is not None
    stalled = sum(job.cost.unit_s(u, k, job.micro_steps) for u, k in enumerate(plan.strategies))
    assert plan.prediction.stalled_s == pytest.approx(stalled, abs=1e-9)


def test_bytes_beyond_fsdp() -> None:
    period = Job(chain(8, 8, world=2, optimizer=ADAM)).period  # 32 bytes, shards of 16, Adam twice that
    assert [extra_bytes_vs_fsdp(period, 0, k) for k in (fsdp, sdp, zero2, dp)] == [0, 32, 16, 16 + 32]


# ---- greedy


@examples(80)
@given(jobs(), st.sampled_from([None, 1.0, 1.05, 1.3, 2.0]))
def test_greedy_is_never_slower_than_all_fsdp_and_fits(job: Job, factor: float | None) -> None:
    budget = None if factor is None else int(job.problem.floor * factor)
    problem = replace(job.problem, budget=budget)
    mix = Greedy().choose(problem).strategies
    assert problem.fits(mix)
    link = job.profile.link  # a gap beyond the latency depends on when the message before was sent, so units do not add up
    if problem.fits(all_fsdp := (fsdp,) * len(mix)) and all(g <= a for g, a in zip(link.gap, link.alpha, strict=True)):
        assert step_s(problem, mix) <= step_s(problem, all_fsdp) + 1e-9


@examples(40)
@given(jobs())
def test_with_unlimited_memory_greedy_is_as_fast_as_can_be(job: Job) -> None:
    mix = Greedy().choose(job.problem).strategies
    best = sum(min(job.cost.unit_s(u, k, job.micro_steps) for k in choices(job.profile)) for u in range(len(mix)))
    chosen = sum(job.cost.unit_s(u, k, job.micro_steps) for u, k in enumerate(job.problem.mix(mix).strategies))
    assert chosen == pytest.approx(best, abs=1e-12)


def test_greedy_takes_most_time_per_byte_first() -> None:
    # An all-reduce takes 3 s, every gather 1 s, whatever its size: zero2 saves one second per unit, for half of its
    # bytes (16, 64 and 16). Activations make the first backward slot the peak, where the last unit is better whole than
    # whole beside its shard: so it is in the floor's mix.
    plain = chain(8, 32, 8, 8, link=Link((3.0, 1.0, 1.0, 1.0), (0.0,) * 4, 1, 64))
    slots = [replace(s, peak=10**4) if s.phase == "B" and s.unit == 3 else s for s in plain.slots]
    profile = replace(plain, slots=tuple(slots))
    floor = PlanningProblem(Job(profile), None).floor
    saved = {
        more: [i for i, k in enumerate(Greedy().choose(PlanningProblem(Job(profile), floor + more)).strategies) if k is zero2]
        for more in (0, 15, 16, 32, 95, 96)
    }
    assert saved == {0: [3], 15: [3], 16: [0, 3], 32: [0, 2, 3], 95: [0, 2, 3], 96: [0, 1, 2, 3]}


def test_every_planner_knows_its_name() -> None:
    assert {name: make().name for name, make in STRATEGIES.items()} == {name: name for name in STRATEGIES}
    assert {name: make().name for name, make in SCHEDULERS.items()} == {name: name for name in SCHEDULERS}
    assert strategy_named("greedy") == Greedy()
    with pytest.raises(ValueError, match="unknown strategy 'greed': dp, zero2, .*, hsdp, random, greedy, ilp, joint"):
        strategy_named("greed")
    with pytest.raises(ValueError, match="unknown scheduler 'deer': sequential, wfbp"):
        scheduler_named("deer")
