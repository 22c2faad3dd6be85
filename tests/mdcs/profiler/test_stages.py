"""A few plans run before training: which ones, that the fastest is kept, and that nothing is left of the others."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import mdcs
from mdcs.api.offline import fastest
from mdcs.model.units import ByLeaf, partition
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import Partitioning, Sequential
from mdcs.planner.strategies import Uniform
from mdcs.planner.trials import proposals
from mdcs.profile.link import Link
from mdcs.profiler.stages import Trial, take_turns
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
    assert first.outcome.endswith("; ".join(map(str, seen))) and "fsdp sequential, " in first.outcome
    assert seen[0].row()["messages"] == len(seen[0].plan.messages)


def test_a_world_of_one_tries_nothing() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = partition(model, ByLeaf())
    plan = make_plan(chain(3, world=1), Uniform("dp"), Sequential())
    assert fastest([plan, plan], model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer) == (plan, ())


def measured(count: int, off: float) -> list[int]:
    """The messages of plans that were tried of ``count``, where each step takes its prediction times 1 + ``off``."""
    profile = chain(*[10**6] * 4, link=Link.uniform(1, 50), forward_s=0.01, backward_s=0.02)
    plans = [make_plan(profile, Uniform("zero2"), Partitioning(block_mib=4 / blocks)) for blocks in range(1, count + 1)]
    turns = take_turns(plans, 8)
    stage = next(turns)
    try:
        while True:
            assert stage.plan is not None and stage.plan.prediction is not None
            record: Any = SimpleNamespace(times=SimpleNamespace(step_s=stage.plan.prediction.step_s * (1 + off)))
            ran: Any = SimpleNamespace(records=[record] * stage.steps)
            stage = turns.send(ran)
    except StopIteration as end:
        assert sum(trial.is_chosen for trial in end.value) == 1
        return [len(trial.plan.messages) for trial in end.value]


def test_more_than_two_plans_are_tried_only_where_a_prediction_was_wrong() -> None:
    assert len(measured(3, 0.01)) == 2 and len(set(measured(3, 0.1))) == 3
    assert len(set(measured(8, 0.1))) == 8  # more than the steps suffice for: each has two
