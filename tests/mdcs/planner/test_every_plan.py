"""Properties of every plan, whoever made it: a sweep over random jobs × strategies × schedulers × budgets."""

from __future__ import annotations

import dataclasses
import random

import pytest

import mdcs
from mdcs.plan.job import Job
from mdcs.plan.ledger import check, min_feasible_budget
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.budget_repair import repair
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem
from mdcs.planner.registry import SCHEDULERS, StrategyPlanner
from mdcs.planner.schedulers import Sequential, StrategyAssignment
from mdcs.planner.strategies import Greedy, RandomMix, Uniform
from mdcs.profile.link import Link
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import few


def job(seed: int) -> Profile:
    """A chain of units; the first may be tied to the head, some may be frozen."""
    rng = random.Random(seed)
    layers, world, tied = rng.randint(2, 8), rng.choice([1, 2, 3]), rng.random() < 0.4
    forward = [*range(layers), 0] if tied else list(range(layers))
    backward = forward[::-1]

    def span(order: list[int], unit: int) -> tuple[int, int]:
        return order.index(unit), len(order) - 1 - order[::-1].index(unit)

    units = tuple(
        Unit(f"u{i}", (rng.randint(10, 3000),) * rng.randint(1, 2), i == 0 or rng.random() < 0.8,
             span(forward, i), span(backward, i))
        for i in range(layers)
    )  # fmt: skip
    if seed % 3 == 2:  # units of two types
        around = [
            dataclasses.replace(u, name=f"{u.name}[float64]", segments=u.segments[:1], dtype="float64")
            for u in units if len(u.segments) == 2
        ]  # fmt: skip
        units = (*(dataclasses.replace(u, segments=u.segments[-1:]) for u in units), *around)
    slots, live = [], 0
    for u in forward:
        slots.append(Slot(u, "F", rng.uniform(5e-4, 2e-3), live, live + rng.randint(100, 4000)))
        live += rng.randint(50, 2000)
    for u in backward:
        slots.append(Slot(u, "B", rng.uniform(1e-3, 4e-3), live, live + rng.randint(100, 4000)))
        live = live * 2 // 3
    link = Link((2e-4, 1e-4, 1e-4, 1e-4), (2e-7,) * 4, rng.randint(1, 3), 4096)
    return Profile(units, tuple(slots), world, link, Optimizer("adam", 2, 4, 2, 1e-8, 1e-5))


def planners(seed: int) -> dict[str, StrategyPlanner]:
    return {**{str(k): Uniform(str(k)) for k in Strategy if not k.in_node}, "random": RandomMix(seed), "greedy": Greedy()}


@pytest.mark.parametrize("scheduler", sorted(set(SCHEDULERS) - {"memory_aware"}))  # see test_joint
@pytest.mark.parametrize("seed", few(range(5), 2))
def test_plans_keep_their_budget_their_share_and_their_word(seed: int, scheduler: str) -> None:
    rng = random.Random(seed)
    profile = job(seed)
    micro, cross = rng.choice([1, 1, 2, 3]), rng.random() < 0.6
    options = {"micro_steps": micro, "cross_iteration": cross}
    floor = mdcs.floor_bytes(Job(profile, **options))
    for name, strategy in planners(seed).items():
        for budget, share in ((None, None), (floor, None), (int(floor * 1.3), 0.0), (int(floor * 1.3), 0.6)):
            try:
                made = SCHEDULERS[scheduler]()
                plan = mdcs.make_plan(Job(profile, **options), strategy, made, budget=budget, schedule_share=share)
            except InfeasibleBudget:
                assert name not in ("random", "greedy"), "these always fit a budget of at least the floor"
                continue
            assert Plan.from_json(plan.to_json()) == plan
            assert plan.prediction is not None
            if budget is not None:
                check(plan)
                assert plan.prediction.peak_bytes <= (plan.admissible or 0) <= budget == plan.budget
            if share is not None and budget is not None:
                alone = PlanningProblem(Job(profile, **options), None).peak(plan.strategies)
                assert plan.prediction.peak_bytes - alone <= share * (budget - floor) + 1
            if scheduler == "sequential":
                assert plan.prediction.overlap_ratio == 0
                assert plan.prediction.peak_bytes == min_feasible_budget(plan)
            elif scheduler in ("wfbp", "partitioning", "dear", "priority") and budget is None and cross:
                assert plan.prediction.step_s <= replayed_sequential(plan) * (1 + 1e-9)


def replayed_sequential(plan: Plan) -> float:
    mix = StrategyAssignment(Job(plan.profile, plan.micro_steps, plan.cross_iteration), plan.strategies)
    return replay(Sequential().schedule(mix)).period_s


def test_an_infeasible_budget_names_the_smallest_that_works() -> None:
    profile = job(3)
    greedy = Greedy()
    with pytest.raises(InfeasibleBudget) as refused:
        mdcs.make_plan(profile, greedy, SCHEDULERS["priority"](), budget=1000)
    smallest = refused.value.smallest
    assert smallest is not None and f"{smallest} bytes" in str(refused.value)
    mdcs.make_plan(profile, greedy, SCHEDULERS["priority"](), budget=smallest)
    with pytest.raises(InfeasibleBudget):
        mdcs.make_plan(profile, greedy, SCHEDULERS["priority"](), budget=smallest - 1)


def test_a_plan_that_gathers_all_ahead_is_refused_and_the_slot_named() -> None:
    profile = dataclasses.replace(job(5), world=2)
    mix = StrategyAssignment(Job(profile), (Strategy.fsdp,) * len(profile.units))
    plan = SCHEDULERS["priority"]().schedule(mix)
    tight = dataclasses.replace(plan, budget=PlanningProblem(Job(profile), None).floor)
    if min_feasible_budget(plan) > (tight.budget or 0):
        with pytest.raises(PlanError, match="cycle: slot .* needs"):
            check(tight)
    check(repair(plan, tight.budget or 0))


def two_units() -> Profile:
    """100 and 50 elements, fp32, plain SGD, one second per forward and two per backward slot, β = 1 s per 100 bytes."""
    units = (
        Unit("a", (100,), True, (0, 0), (1, 1)),
        Unit("b", (50,), True, (1, 1), (0, 0)),
    )
    slots = (
        Slot(0, "F", 1.0, 0, 10), Slot(1, "F", 1.0, 10, 20), Slot(1, "B", 2.0, 20, 30), Slot(0, "B", 2.0, 10, 15),
    )  # fmt: skip
    return Profile(units, slots, 2, Link((0.0,) * 4, (0.01,) * 4, 1, 4096))


def test_two_dp_units_by_hand() -> None:
    """All-reduce sends 2·(1/2) of 400 and 200 bytes: 4 s and 2 s."""
    mix = StrategyAssignment(Job(two_units()), (Strategy.dp, Strategy.dp))
    alone = replay(Sequential().schedule(mix))
    assert alone.period_s == pytest.approx(6 + 6)
    # B_b [0,2], AR_b [2,4] beside B_a [2,4], AR_a [4,8] before F_a [8,9], F_b [9,10].
    overlapped = replay(SCHEDULERS["wfbp"]().schedule(mix))
    assert overlapped.period_s == pytest.approx(10)
    assert overlapped.times.overlap_s == pytest.approx(2)
    assert overlapped.times.stalled_s == pytest.approx(4)
    # Parameters 600; gradients of both while AR_b runs beside B_a: 600; a part of b that it receives: 100; activations of B_a 15.
    assert overlapped.peak["parameters"] == 600
    assert overlapped.peak["gradients"] == 600
    assert overlapped.peak["total"] == 600 + 600 + 100 + 15
    assert alone.peak["total"] == 600 + 400 + 200  # b's 200 are gone when a's 400 come, and a part of a is received


def test_fsdp_memory_by_hand() -> None:
    """At rest half of 600 bytes; a is gathered (400) twice, b (the last) once and kept."""
    plan = Sequential().schedule(StrategyAssignment(Job(two_units()), (Strategy.fsdp, Strategy.fsdp)))
    assert plan.strategies == (Strategy.fsdp, Strategy.sdp)
    result = replay(plan)
    assert result.peak["parameters"] == 300
    assert result.peak["full_parameters"] == 400
    assert result.peak["staging"] == 200  # the part of a's gradients that is received
    assert result.peak["gradient_shards"] == 200
    # In a's backward: shards 300, a gathered 400, its gradient 400, activations 15.
    assert result.peak["total"] == 300 + 400 + 400 + 15
    wire = sum(plan.wire(m) for m in plan.messages)
    assert wire == (400 * 3 + 200 * 2) // 2
