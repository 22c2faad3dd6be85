"""Costs and gains of a unit's strategy, by hand for two units, and the contents of the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.worst_case import min_feasible_budget
from mdcs.planner.explain import KeptActivations, ScheduleChoice, binding_slot, choices, kept_activations, schedule_choice
from mdcs.planner.registry import Scheduler
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import chain, link, planned, recomputable

# Forward takes 1 s and backward 2 s per unit. One rank of two sends 16 bytes of a (1 s) and 32 bytes of b (2 s).
PROFILE = chain(8, 16, link=link(1 / 16))


def test_a_unit_is_compared_with_the_strategy_that_holds_least() -> None:
    a, b = choices(planned(PROFILE, "zero2"), Sequential())
    # a as fsdp: one gather more, of 1 s. It holds half of 32 bytes less when b is reduced.
    assert (a.unit, a.bytes, a.strategy, a.instead, a.messages) == ("a", 32, "zero2", "fsdp", {"RS": 1, "AG_F": 1})
    assert a.buys_s == pytest.approx(1.0)
    assert a.costs_bytes == 16
    # b is the last: freed, it would be gathered again at once, so it would be sdp.
    assert (b.strategy, b.instead) == ("zero2", "sdp")
    assert b.buys_s == pytest.approx(0.0)


def test_an_fsdp_unit_is_compared_with_sdp() -> None:
    a, b = choices(planned(PROFILE, "fsdp"), Sequential())
    assert (a.strategy, a.instead) == ("fsdp", "sdp")
    assert a.buys_s == pytest.approx(-1.0)
    assert a.costs_bytes is not None and a.costs_bytes <= 0
    assert (b.strategy, b.instead) == ("sdp", "zero2")


@pytest.mark.parametrize("scheduler", [Sequential(), Wfbp()])
def test_the_difference_is_that_of_two_plans(scheduler: Scheduler) -> None:
    plan, other = (planned(PROFILE, [first, "sdp"], scheduler) for first in ("dp", "fsdp"))
    found = choices(replace(plan, budget=10**6), scheduler)[0]
    dp, fsdp = (min_feasible_budget(planned(PROFILE, [first, "sdp"])) for first in ("dp", "fsdp"))
    assert found.costs_bytes == dp - fsdp
    assert found.buys_s == replay(other).period_s - replay(plan).period_s


def test_the_schedule_is_compared_with_the_sequential_one() -> None:
    assert schedule_choice(planned(PROFILE, "zero2")) == ScheduleChoice(0, 0.0)
    found = schedule_choice(planned(PROFILE, "zero2", Wfbp()))
    # 12 s, of which wfbp hides 2. In B:a, b's gradient (64) is still there, and its reduce-scatter: 32 received, 32 kept.
    assert found == ScheduleChoice(replay(planned(PROFILE, "zero2", Wfbp())).peak["total"] - 96 - 64 - 64, 2.0)


def test_a_frozen_unit_without_messages_has_a_strategy_to_compare_with_too() -> None:
    frozen = choices(planned(chain(8, 16, 8, frozen=[1], link=link(1 / 16)), "dp"), Sequential())[1]
    assert (frozen.messages, frozen.instead) == ({}, "fsdp")


def test_the_binding_slot_is_where_the_sum_is_highest() -> None:
    found = binding_slot(planned(PROFILE, "zero2"))
    # In the backward of b: parameters 96, b's gradient 64; reduced in B:a: 64, and 32 received, 32 kept.
    assert found.slot in ("B:b", "B:a")
    assert found.bytes <= sum(found.memory.values())
    assert found.bytes == replay(planned(PROFILE, "zero2")).peak["total"]
    assert found.memory["parameters"] == 96


def test_what_recomputation_would_free_cost_and_buy() -> None:
    first, *others = PROFILE.slots
    kept = replace(PROFILE, slots=(first, *(replace(s, live=1000, peak=1000) for s in others)))
    plan = planned(recomputable(kept, freed=300, seconds=0.5, peak=0), "fsdp", micro_steps=2)
    found = kept_activations(plan)
    assert found is not None and (found.units, found.costs_s) == (2, 2.0)
    assert found.frees_bytes == 300 and found.buys_s > 0
    assert choices(plan, Sequential())[0].recompute == "none"


def test_where_all_is_recomputed_nothing_is_left_to_free() -> None:
    profile = recomputable(PROFILE, 0, freed=0, seconds=0.5)
    assert kept_activations(planned(profile, "dp", recompute=("full", "none"))) is None
    assert kept_activations(planned(PROFILE, "dp")) is None
    assert kept_activations(planned(profile, "dp")) == KeptActivations(1, 0, 0.5, 0.0)
