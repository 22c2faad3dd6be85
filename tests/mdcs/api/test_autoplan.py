"""`autoplan` and `autoprofile` between real ranks: one way to a profile, and plans that know what a message costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from mdcs.profile.link import Contention

LINK = mdcs.Link.uniform(1, 50, emulated=True)  # without gaps, whose blocks are of 256 KiB


def made() -> tuple[nn.Module, torch.optim.Optimizer, list[mdcs.ModelUnit], Any]:
    """Three layers of 4 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    batch = torch.randn(4, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, mdcs.partition(model, mdcs.ByLeaf()), lambda: model(batch).square().mean()


@pytest.mark.parametrize(
    ("call", "options", "named"),
    [
        (mdcs.autoplan, {"seconds": -1}, "seconds"),
        (mdcs.autoplan, {"budget": "1 GiB", "reserve": 1 << 30}, "reserve"),
        (mdcs.autoprofile, {"iterations": 0}, "iterations"),
        (mdcs.autoprofile, {"depth": 0}, "depth"),
    ],
)
def test_an_option_that_leaves_nothing_is_refused_by_its_name_before_a_step_runs(call: Any, options: Any, named: str) -> None:
    model, optimizer, units, _ = made()
    with pytest.raises(ValueError, match=named):
        call(model, optimizer, units, lambda: pytest.fail("a step ran"), **options)


def profiled() -> tuple[mdcs.Profile, bool]:
    model, optimizer, units, step = made()
    before = [p.clone() for p in model.parameters()]
    profile = mdcs.autoprofile(model, optimizer, units, step, link=LINK, about={"model": "layers"}, iterations=1)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return profile, same and not optimizer.state


@pytest.mark.slow
def test_a_profile_of_the_library_is_calibrated_and_the_same_on_all_ranks(two) -> None:
    (profile, untouched), (other, also_untouched) = two.run(profiled, timeout_s=200.0)
    assert profile == other and untouched and also_untouched
    assert profile.about == {"model": "layers", "inputs": "4 x 1024"} and profile.world == 2 and profile.link == LINK
    assert profile.calibration_runs and all(min(seconds) > 0 for seconds in profile.calibration_runs.values())
    assert profile.contention != Contention()


def planned() -> dict[str, int]:
    model, optimizer, units, step = made()
    plan = mdcs.autoplan(model, optimizer, units, step, strategy="fsdp", seconds=6)
    floor = mdcs.floor_bytes(mdcs.Job(plan.profile))
    tight = mdcs.make_plan(plan.profile, *planners("greedy"), budget=int(1.1 * floor))
    joint = mdcs.autoplan(model, optimizer, units, step, strategy="joint", budget=int(1.3 * floor), seconds=6)
    assert joint.strategy == "joint"
    dist.barrier()
    return {"unlimited": len(plan.messages), "tight": len(tight.messages), "joint": len(joint.messages)}


def planners(strategy: str) -> tuple[Any, Any]:
    from mdcs.planner.pipeline import scheduler_named, strategy_named

    return strategy_named(strategy), scheduler_named("priority")


@pytest.mark.slow
def test_plans_under_tight_budgets_have_few_messages_and_joint_needs_no_scheduler(two) -> None:
    first, second = two.run(planned, timeout_s=300.0)
    assert first["unlimited"] == second["unlimited"]
    assert max(first.values()) <= 60, first  # of three units; in blocks of 256 KiB it would be 144
