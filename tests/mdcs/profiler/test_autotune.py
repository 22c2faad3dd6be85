"""A few plans run before training: which ones, that the fastest is kept, and that nothing is left of the others."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mdcs
from mdcs.model.units import ByLeaf, partition
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import floor_bytes, make_plan
from mdcs.planner.schedulers import Sequential
from mdcs.planner.strategies import Uniform
from mdcs.profile.link import Link
from mdcs.profiler import autotune
from mdcs.profiler.autotune import PERIODS, ROUNDS, Trial, candidates, cost_s, fastest
from mdcs.profiler.model_profile import measure_profile

from ..optimizers import Counting, OwnCount
from ..profiles import chain, link


def test_the_plan_asked_for_is_first_and_then_come_the_best_heuristics() -> None:
    slow = make_plan(chain(*[64] * 6, link=link(0.01)), Uniform("fsdp"), Sequential())
    chosen = candidates(slow, 4)
    assert chosen[0] is slow and len(chosen) == 4
    predicted = [plan.prediction.step_s for plan in chosen if plan.prediction is not None]
    assert predicted[1:] == sorted(predicted[1:]) and predicted[1] < predicted[0]
    assert len({(plan.strategies, plan.messages) for plan in chosen}) == 4


def test_all_candidates_keep_the_budget_and_the_job() -> None:
    job = mdcs.Job(chain(*[64] * 6, link=link(0.01)), micro_steps=2)
    budget = int(1.2 * floor_bytes(job))
    plan = make_plan(job, Uniform("fsdp"), Sequential(), budget=budget)
    chosen = candidates(plan, 3)
    assert {(each.budget, each.job) for each in chosen} == {(budget, job)}
    assert all(each.prediction.peak_bytes <= budget for each in chosen if each.prediction is not None)


def test_one_candidate_is_the_plan_and_makes_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(chain(3), Uniform("dp"), Sequential())
    monkeypatch.setattr(autotune, "_heuristics", None)
    assert candidates(plan, 1) == [plan]


def test_the_cost_is_that_of_all_rounds_with_warm_up_and_the_period_that_is_cut_short() -> None:
    plan = make_plan(chain(3), Uniform("dp"), Sequential())
    assert plan.prediction is not None
    assert cost_s([plan, plan]) == pytest.approx(ROUNDS * 2 * (1 + PERIODS + 1) * plan.prediction.step_s)


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
    boxes: list[Any] = [candidates(make_plan(mdcs.Job(profile, 2), Uniform("fsdp"), Sequential()), 3)]
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
    assert all(math.isfinite(trial.measured_s) and trial.measured_s > 0 for trial in seen)
    best = min(seen, key=lambda trial: trial.measured_s)
    assert first.hash == best.plan.hash
    assert first.outcome.endswith(f"fastest of {', '.join(map(str, seen))}")
    assert str(seen[0]).startswith("fsdp sequential ")


def test_a_world_of_one_tries_nothing() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = partition(model, ByLeaf())
    plan = make_plan(chain(3, world=1), Uniform("dp"), Sequential())
    assert fastest([plan, plan], model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer) == (plan, ())
