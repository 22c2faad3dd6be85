"""The search by replays: never slower, within the budget, the same for the same seed, and as good as trying everything."""

from __future__ import annotations

import itertools
import math

import pytest

from mdcs.plan.job import Job
from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.plan.worst_case import check, smallest_budget
from mdcs.planner.anneal import annealed
from mdcs.planner.fit import fit
from mdcs.planner.judge import Judge
from mdcs.planner.named import SCHEDULERS
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.ilp.test_slot_model import small_job
from tests.mdcs.planner.test_every_plan import job


def start(seed: int, name: str = "wfbp") -> Plan:
    judge = Judge(Job(job(seed)), None)
    mix = judge.mix([Strategy.fsdp] * len(judge.profile.units))
    return fit(SCHEDULERS[name]().schedule(mix), int(judge.floor * 1.2))


@pytest.mark.parametrize("strategies", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_never_slower_and_keeps_the_budget(seed: int, strategies: bool) -> None:
    plan = start(seed)
    found = annealed(plan, math.inf, strategies=strategies)
    check(found)
    assert found.budget == plan.budget and smallest_budget(found) <= (plan.budget or 0)
    assert replay(found).period_s <= replay(plan).period_s
    assert strategies or found.strategies == plan.strategies


def test_there_is_something_to_find() -> None:
    plans = [start(seed, "sequential") for seed in range(2)]
    assert all(replay(annealed(plan, math.inf)).period_s < 0.99 * replay(plan).period_s for plan in plans)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert annealed(start(1), math.inf, seed=3) == annealed(start(1), math.inf, seed=3)


def test_it_ends_at_the_bound_when_told_to_and_when_there_is_no_time() -> None:
    plan = start(0)
    assert annealed(plan, math.inf, bound=replay(plan).period_s) is plan
    assert annealed(plan, math.inf, stop=lambda: True) is plan
    assert annealed(plan, 0.0) is plan


def every(mix: Mix) -> list[Plan]:
    """Every order and every issue slot of whole units."""
    out = []
    windows = [range(mix.window(op)[0], mix.window(op)[1] + 1) for op in mix.ops]
    for order in itertools.permutations(range(len(mix.ops))):
        for slots in itertools.product(*windows):
            drafts = [Message(mix.ops[i].kind, ((mix.ops[i].unit, 0),), slots[i], micro=mix.ops[i].micro) for i in order]
            try:
                out.append(mix.plan("every", mix.whole(), drafts))
            except PlanError:
                continue
    return out


def test_from_the_worst_plan_it_mostly_finds_the_best_of_all_orders_and_slots() -> None:
    found = []
    for seed in range(4):
        judge = Judge(Job(small_job(seed, 2)), None)
        mix = judge.mix([Strategy.zero2, Strategy.zero2])
        budget = int(1.1 * judge.peak(mix.strategies))
        fitting = [p for p in every(mix) if smallest_budget(p) <= budget]
        worst = max(fitting, key=lambda p: replay(p).period_s)
        step_s = replay(annealed(fit(worst, budget), math.inf, strategies=False)).period_s
        found.append(step_s <= min(replay(p).period_s for p in fitting) * (1 + 1e-9))
    assert sum(found) >= 3
