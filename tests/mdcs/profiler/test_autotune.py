"""A few plans run before training: which ones, that the fastest is kept, and that nothing is left of the others."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist

import mdcs
from mdcs.api.offline import fastest
from mdcs.model.units import ByLeaf, partition
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import Sequential
from mdcs.planner.strategies import Uniform
from mdcs.planner.trials import proposals
from mdcs.profile.link import Link
from mdcs.profiler.autotune import Trial
from tests.mdcs.measured import measure_profile

from ..optimizers import Counting, OwnCount
from ..profiles import chain


def tried() -> tuple[Plan, tuple[Trial, ...], bool]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(), torch.nn.Linear(64, 8))
    parameters = list(model.parameters())
    adam, own, grouped = torch.optim.Adam(parameters[:2]), OwnCount(parameters[2:4]), Counting(parameters[4:])
    optimizer: list[torch.optim.Optimizer] = [adam, own, grouped]
    units = partition(model, ByLeaf())

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(16, 64)).square().mean()
        return loss

    slow = Link.uniform(1, 50, emulated=True)
    profile = measure_profile(model, units, step, optimizer, world=dist.get_world_size(), link=slow)
    boxes: list[Any] = [proposals(make_plan(mdcs.Job(profile, 2), Uniform("fsdp"), Sequential()), 3)]
    dist.broadcast_object_list(boxes, src=0)
    state, random_state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    plan, seen = fastest(boxes[0], model, units, step, optimizer)
    same = all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    same = same and torch.equal(torch.random.get_rng_state(), random_state) and not adam.state
    same = same and own.steps == {"made": 0} and grouped.param_groups[0].keys() == {"params", "lr"}
    same = same and all(p.grad is None for p in model.parameters()) and step().requires_grad
    return plan, seen, same


def test_ranks_agree_on_the_fastest_and_the_model_is_as_before(two) -> None:  # type: ignore[no-untyped-def]
    (first, seen, untouched), (second, also_seen, also_untouched) = two.run(tried)
    assert untouched and also_untouched
    assert first.hash == second.hash and first.outcome == second.outcome and seen == also_seen
    assert all(math.isfinite(trial.standing.median_s) and trial.standing.median_s > 0 for trial in seen)
    assert [trial.plan.execution_hash for trial in seen if trial.is_chosen] == [first.execution_hash]
    assert first.outcome.endswith("; ".join(map(str, seen))) and str(seen[0]).startswith("fsdp sequential, ")
    assert seen[0].row()["messages"] == len(seen[0].plan.messages)


def test_a_world_of_one_tries_nothing() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = partition(model, ByLeaf())
    plan = make_plan(chain(3, world=1), Uniform("dp"), Sequential())
    assert fastest([plan, plan], model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer) == (plan, ())
