"""Solutions of the slot model become plans: costs per byte, and rounding."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import replace

import pytest

from mdcs.plan.cost import CostModel
from mdcs.plan.job import Job
from mdcs.plan.period import Strategy
from mdcs.plan.plan import PlanError
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem
from mdcs.planner.ilp.decode import SearchRequest, _diffused, linearize_costs, mixes, solve_bound
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.solver import solve
from mdcs.planner.pipeline import SCHEDULERS, make_plan, scheduler_named, strategy_named
from mdcs.profile.link import Contention
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.profiles import chain, link


def test_a_link_without_gaps_is_its_own_price() -> None:
    profile = chain(64, 64, link=link(1 / 64, alpha=0.5))
    assert linearize_costs(profile) is profile


def test_a_block_takes_as_long_and_costs_computing_as_much() -> None:
    gaps = replace(link(1 / 64), gap=(0.5, 0.25, 0.25, 0.125), block=1024)
    profile = replace(chain(4096, link=gaps), contention=Contention(message_seconds=30.0, compute_per_message=4.0))
    model, pieces = linearize_costs(profile), ((0, profile.block // 4),)
    for kind in profile.link.kinds:
        before, after = CostModel(profile).message(kind, pieces), CostModel(model).message(kind, pieces)
        assert after.transfer == pytest.approx(before.gap + before.transfer)
        assert after.gap == after.lost == 0
    slowest = max(4.0 / (c.gap + c.transfer) for c in (CostModel(profile).message(k, pieces) for k in profile.link.kinds))
    assert 1 - 1 / (1 + model.interference) == pytest.approx(slowest)


def model_of(*sizes: int) -> SlotModel:
    return SlotModel(PlanningProblem(Job(chain(*sizes)), 1 << 20))  # more than enough; all strategies count within a limit


def shares(model: SlotModel, zero2: float) -> list[float]:
    values = [0.0] * len(model.program.costs)
    for z in model.assign:
        first, second = (Strategy.zero2, Strategy.fsdp) if Strategy.fsdp in z else (Strategy.zero2, Strategy.sdp)
        values[z[first]], values[z[second]] = zero2, 1 - zero2
    return values


def test_halves_of_equal_units_become_every_other_unit() -> None:
    model = model_of(*[64] * 8)
    mix = _diffused(model, shares(model, 0.5), 1.0)
    assert mix.count(Strategy.zero2) == 4
    assert all(Strategy.zero2 in pair for pair in zip(mix[::2], mix[1::2], strict=True))


def test_the_bytes_of_a_strategy_are_kept_within_a_unit() -> None:
    rng = random.Random(0)
    sizes = [rng.randint(16, 256) for _ in range(8)]
    model = model_of(*sizes)
    for share in (0.2, 0.35, 0.8):
        mix = _diffused(model, shares(model, share), 1.0)
        resident = sum(n for n, k in zip(sizes, mix, strict=True) if k is Strategy.zero2)
        assert abs(resident - share * sum(sizes)) <= max(sizes)


def test_a_whole_solution_is_its_own_rounding() -> None:
    profile = job(2)
    problem = PlanningProblem(Job(profile), int(PlanningProblem(Job(profile), None).floor * 1.1))
    model = SlotModel(problem)
    values = solve(model.program).values
    assert values is not None
    assert model.decide(values).strategies in [strategies for strategies, _ in mixes(model, values)]


@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_few_tight_slots_are_below_the_exact_answer_and_every_plan(seed: int) -> None:
    problem = PlanningProblem(Job(replace(job(seed), interference=0.2)), None)
    problem = replace(problem, budget=int(1.1 * problem.floor))
    found = solve_bound(SearchRequest(problem, "joint", None, 20.0, 64, True, time.monotonic())).bound
    exact = SlotModel(problem)
    answer = solve(exact.program)
    assert found is not None and answer.bound is not None and answer.status == "optimal"
    assert 0 < found <= exact.step_bound(answer.bound) * (1 + 1e-6)
    for name in sorted(set(SCHEDULERS) - {"memory_aware"}):
        for strategy in (*map(str, Strategy), "greedy"):
            with contextlib.suppress(InfeasibleBudget, PlanError):
                plan = make_plan(problem.job.profile, strategy_named(strategy), scheduler_named(name), budget=problem.budget)
                assert plan.prediction is not None and found <= plan.prediction.step_s * (1 + 1e-6)
