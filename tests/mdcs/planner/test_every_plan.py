"""Random jobs that many tests share; that messages beside compute cost no time, and two units by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

import mdcs
from mdcs.plan.job import Job
from mdcs.plan.period import Strategy
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.schedulers import Sequential, StrategyAssignment
from mdcs.planner.strategies import Greedy, RandomMix, Uniform
from mdcs.profile.link import Link
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import chain, few, link


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


DRAWN = [(seed, draw.choice([1, 1, 2, 3]), draw.random() < 0.6) for seed in range(5) for draw in [random.Random(seed)]]


@pytest.mark.parametrize("scheduler", ["wfbp", "partitioning", "dear", "priority"])
@pytest.mark.parametrize(("seed", "micro_steps"), few([(seed, micro) for seed, micro, is_crossing in DRAWN if is_crossing], 2))
def test_messages_beside_compute_take_no_longer_than_those_it_waits_for(seed: int, micro_steps: int, scheduler: str) -> None:
    asked = Job(job(seed), micro_steps)
    for strategy in (*(Uniform(str(k)) for k in Strategy if not k.in_node), RandomMix(seed), Greedy()):
        plan = mdcs.make_plan(asked, strategy, SCHEDULERS[scheduler]())
        assert plan.prediction is not None
        sequential = Sequential().schedule(StrategyAssignment(asked, plan.strategies))
        assert plan.prediction.step_s <= replay(sequential).period_s * (1 + 1e-9)


def test_two_dp_units_by_hand() -> None:
    """100 and 50 elements; all-reduces send 2·(1/2) of 400 and 200 bytes: 4 s and 2 s."""
    mix = StrategyAssignment(Job(chain(100, 50, link=link(0.01))), (Strategy.dp, Strategy.dp))
    alone = replay(Sequential().schedule(mix))
    assert alone.period_s == pytest.approx(6 + 6)
    # B_b [0,2], AR_b [2,4] beside B_a [2,4], AR_a [4,8] before F_a [8,9], F_b [9,10].
    overlapped = replay(SCHEDULERS["wfbp"]().schedule(mix))
    assert overlapped.period_s == pytest.approx(10)
    assert overlapped.times.overlap_s == pytest.approx(2)
    assert overlapped.times.stalled_s == pytest.approx(4)
    # Parameters 600; gradients of both while AR_b runs beside B_a: 600; a part of b that it receives: 100.
    assert overlapped.peak["parameters"] == overlapped.peak["gradients"] == 600
    assert overlapped.peak["total"] == 600 + 600 + 100
    assert alone.peak["total"] == 600 + 400 + 200  # b's 200 are gone when a's 400 come, and a part of a is received
