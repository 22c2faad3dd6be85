"""Costs and gains of a unit's strategy, by hand for two units, and the contents of the memory."""

from dataclasses import replace

import pytest

import mdcs
from experiments import explain
from experiments.explain import ScheduleChoice, binding_slot, bounds_of, choices, schedule_choice
from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.period import Strategy
from mdcs.planner.pipeline import SCHEDULERS, Scheduler, floor_bytes, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Fusion, StrategyAssignment, Wfbp
from mdcs.planner.strategies import Greedy
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.profiles import chain, link, planned

# Forward takes 1 s and backward 2 s per unit. One rank of two sends 16 bytes of a (1 s) and 32 bytes of b (2 s).
PROFILE = chain(8, 16, link=link(1 / 16))


def test_a_unit_is_compared_with_the_strategy_that_holds_least() -> None:
    a, b = choices(planned(PROFILE, "zero2"))
    # a as fsdp: one gather more, of 1 s, after which compute waits for it. It holds half of 32 bytes less when b is reduced.
    assert (a.unit, a.bytes, a.strategy, a.instead, a.messages) == ("a", 32, "zero2", "fsdp", {"RS": 1, "AG_F": 1})
    assert a.step_s is not None and 0 <= a.step_s <= 1.0
    # b is the last: freed, it would be gathered again at once, so it would be sdp.
    assert (b.strategy, b.instead, b.step_s) == ("zero2", "sdp", pytest.approx(0.0))


def test_an_fsdp_unit_is_compared_with_sdp() -> None:
    a, b = choices(planned(PROFILE, "fsdp"))
    assert (a.strategy, a.instead, a.is_better) == ("fsdp", "sdp", True)  # sequential: its second gather is waited for
    assert a.step_s == pytest.approx(-1.0) and a.needs_bytes is not None and a.needs_bytes >= 0
    assert (b.strategy, b.instead) == ("sdp", "zero2")


def test_what_does_not_fit_is_no_better_plan() -> None:
    plan = planned(PROFILE, "fsdp")
    least = min_feasible_budget(plan)
    tight, roomy = (choices(replace(plan, budget=budget))[0] for budget in (least, 10**6))
    assert roomy.is_better and roomy.needs_bytes == tight.needs_bytes > 0
    assert tight.step_s is None and not tight.is_better


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("scheduler", "share"), [(Priority(), None), (Priority(), 0.5), (Wfbp(), 0.2), (Fusion(), None)])
def test_a_row_is_what_a_plan_with_only_this_unit_changed_takes(seed: int, scheduler: Scheduler, share: float | None) -> None:
    """The other units' messages are those of the plan, so the order of others never makes the difference."""
    profile = job(seed)
    budget = int(1.3 * floor_bytes(profile))
    plan = make_plan(profile, Greedy(), scheduler, budget=budget, schedule_share=share)
    assert plan.prediction is not None
    for u, choice in enumerate(choices(plan)):
        if choice.instead is None:
            continue
        strategies = (*plan.strategies[:u], Strategy(choice.instead), *plan.strategies[u + 1 :])
        made = [each for each in explain._changed(plan, StrategyAssignment(plan.job, strategies), u)]
        assert made and all(each.strategies == strategies for each in made)
        for each in made:
            others = [tuple(part for part in m.parts if part[0] != u) for m in each.messages]
            assert [parts for parts in others if parts] == [
                parts for m in plan.messages if (parts := tuple(part for part in m.parts if part[0] != u))
            ]
        if choice.step_s is not None:
            least = plan.limit or budget
            within = [replace(each, budget=budget, limit=plan.limit) for each in made if min_feasible_budget(each) <= least]
            assert plan.prediction.step_s + choice.step_s == pytest.approx(min(replay(each).period_s for each in within))


def test_the_schedule_is_compared_with_the_sequential_one() -> None:
    assert schedule_choice(planned(PROFILE, "zero2")) == ScheduleChoice(0, 0.0)
    found = schedule_choice(planned(PROFILE, "zero2", Wfbp()))
    # 12 s, of which wfbp hides 2. In B:a, b's gradient (64) is still there, and its reduce-scatter: 32 received, 32 kept.
    assert found == ScheduleChoice(replay(planned(PROFILE, "zero2", Wfbp())).peak["total"] - 96 - 64 - 64, -2.0)


def test_a_frozen_unit_without_messages_has_a_strategy_to_compare_with_too() -> None:
    frozen = choices(planned(chain(8, 16, 8, frozen=[1], link=link(1 / 16)), "dp"))[1]
    assert (frozen.messages, frozen.instead) == ({}, "fsdp")


def test_the_binding_slot_is_where_the_sum_is_highest() -> None:
    found = binding_slot(planned(PROFILE, "zero2"))
    # In the backward of b: parameters 96, b's gradient 64; reduced in B:a: 64, and 32 received, 32 kept.
    assert found.slot in ("B:b", "B:a")
    assert found.bytes <= sum(found.memory.values())
    assert found.bytes == replay(planned(PROFILE, "zero2")).peak["total"]
    assert found.memory["parameters"] == 96


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_bounds_are_below_every_plan_and_in_order(seed: int) -> None:
    profile = job(seed)
    for budget in (None, int(mdcs.floor_bytes(profile) * 1.1)):
        schedulers = (SCHEDULERS[name]() for name in ("sequential", "priority", "fusion"))
        plans = [mdcs.make_plan(profile, Greedy(), scheduler, budget=budget) for scheduler in schedulers]
        bounds = bounds_of(plans[0])  # which are those of the job and the budget
        assert bounds.traffic_s <= bounds.structural_s
        for plan in plans:
            assert plan.prediction is not None and plan.prediction.compute_s * (1 - 1e-6) <= bounds.traffic_s
            assert bounds.structural_s <= plan.prediction.step_s * (1 + 1e-6)
