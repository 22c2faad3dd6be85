"""Bounds are below every plan, and the step of an ideal DDP is as counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mdcs
from experiments.bounds import bounds_of, ideal_ddp_s
from mdcs.planner.registry import SCHEDULERS
from mdcs.planner.strategies import Greedy
from mdcs.profile.link import Contention
from mdcs.profile.schema import Optimizer
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.profiles import chain, link


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_bounds_are_below_every_plan_and_in_order(seed: int) -> None:
    profile = job(seed)
    for budget in (None, int(mdcs.floor_bytes(profile) * 1.1)):
        for name in ("sequential", "priority", "fusion"):
            plan = mdcs.make_plan(profile, Greedy(), SCHEDULERS[name](), budget=budget)
            bounds = bounds_of(plan)
            assert plan.prediction is not None
            assert plan.prediction.compute_s * (1 - 1e-6) <= bounds.traffic_s <= bounds.structural_s
            assert bounds.structural_s <= plan.prediction.step_s * (1 + 1e-6)


def test_an_ideal_ddp_waits_for_nothing_but_the_link_and_the_update() -> None:
    update = Optimizer(seconds_per_element=1 / 64)
    slow = Contention(compute_per_message=1.0, dispatch_seconds=1.0)
    profile = replace(chain(64, 64, 64, link=link(1 / 64, alpha=0.5), optimizer=update), contention=slow)
    # All are 256 bytes, 4 s on the link. 2 s until the first gradients, 12 s of messages, 3 s of updates, 3 s of forward.
    assert ideal_ddp_s(profile) == pytest.approx(2 + 12 + 3 + 3)
    assert ideal_ddp_s(replace(profile, link=link(0.0))) == pytest.approx(6 + 3 + 3)
    assert ideal_ddp_s(profile, micro_steps=2) == pytest.approx(9 + 2 + 12 + 3 + 3)
