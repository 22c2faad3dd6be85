"""The search by replays: never slower, within the budget, the same for the same seed, and as good as trying everything."""

from __future__ import annotations

import itertools
import math

import pytest

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.validity import PlanError
from mdcs.plan.worst_case import check, min_feasible_budget
from mdcs.planner.annealing import anneal
from mdcs.planner.budget_repair import repair
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.registry import SCHEDULERS
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.ilp.test_slot_model import small_job
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.planner.test_recompute import deep


def start(seed: int, name: str = "wfbp") -> Plan:
    problem = PlanningProblem(Job(job(seed)), None)
    mix = problem.mix([Strategy.fsdp] * len(problem.profile.units))
    return repair(SCHEDULERS[name]().schedule(mix), int(problem.floor * 1.2))


@pytest.mark.parametrize("strategies", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_never_slower_and_keeps_the_budget(seed: int, strategies: bool) -> None:
    plan = start(seed)
    found = anneal(plan, math.inf, strategies=strategies)
    check(found)
    assert found.budget == plan.budget and min_feasible_budget(found) <= (plan.budget or 0)
    assert replay(found).period_s <= replay(plan).period_s
    assert strategies or found.strategies == plan.strategies


def test_there_is_something_to_find() -> None:
    plans = [start(seed, "sequential") for seed in range(2)]
    assert all(replay(anneal(plan, math.inf)).period_s < 0.99 * replay(plan).period_s for plan in plans)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert anneal(start(1), math.inf, seed=3) == anneal(start(1), math.inf, seed=3)


def test_it_ends_at_the_bound_when_told_to_and_when_there_is_no_time() -> None:
    plan = start(0)
    assert anneal(plan, math.inf, bound=replay(plan).period_s) is plan
    assert anneal(plan, math.inf, stop=lambda: True) is plan
    assert anneal(plan, 0.0) is plan


def test_what_is_recomputed_changes_only_if_it_may() -> None:
    """Everything is recomputed at first, under a budget that needs half of it."""
    profile = deep(9000, 7000, 8000, 9000)
    asked = Job(profile, recompute=("full",) * 4)
    problem = PlanningProblem(asked, None)
    need = PlanningProblem(Job(profile, recompute=("full", "full", "none", "none")), None).peak((Strategy.fsdp,) * 4)
    plan = repair(SCHEDULERS["wfbp"]().schedule(problem.mix((Strategy.fsdp,) * 4)), need)
    kept, changed = anneal(plan, math.inf), anneal(plan, math.inf, recompute=True)
    check(changed)
    assert kept.recompute == plan.recompute != changed.recompute
    assert replay(changed).period_s < replay(kept).period_s - 1


def every(mix: StrategyAssignment) -> list[Plan]:
    """Every order and every issue slot of whole units."""
    out = []
    windows = [range(mix.period.window(op)[0], mix.period.window(op)[1] + 1) for op in mix.ops]
    for order in itertools.permutations(range(len(mix.ops))):
        for slots in itertools.product(*windows):
            drafts = [Message(mix.ops[i].kind, ((mix.ops[i].unit, 0),), slots[i], micro=mix.ops[i].micro) for i in order]
            try:
                out.append(mix.plan("every", mix.unpartitioned_blocks(), drafts))
            except PlanError:
                continue
    return out


def test_from_the_worst_plan_it_mostly_finds_the_best_of_all_orders_and_slots() -> None:
    found = []
    for seed in range(4):
        problem = PlanningProblem(Job(small_job(seed, 2)), None)
        mix = problem.mix([Strategy.zero2, Strategy.zero2])
        budget = int(1.1 * problem.peak(mix.strategies))
        fitting = [p for p in every(mix) if min_feasible_budget(p) <= budget]
        worst = max(fitting, key=lambda p: replay(p).period_s)
        step_s = replay(anneal(repair(worst, budget), math.inf, strategies=False)).period_s
        found.append(step_s <= min(replay(p).period_s for p in fitting) * (1 + 1e-9))
    assert sum(found) >= 3
