"""Every elementwise optimizer trains on shards as with DDP, bit for bit on two ranks: weights, state, checkpoints and bytes."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from mdcs.telemetry.memory_meter import ShimMeter
from tests.mdcs.optimizers import OPTIMIZERS, OwnCount
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops import how, one_step
from tests.mdcs.runtime.test_optimizer_state import differences, of_ddp
from tests.mdcs.runtime.training import How, Job, differing, parallel_for, plan_for, profile_of, reference, setup, train


def train_and_resume(name: str, root: str) -> list[Any]:
    """Train half the way under one strategy, and the rest under another from its checkpoint."""
    job = Job("tied", optimizer=name, steps=6)
    wanted, state, found = reference(job), of_ddp(job), []
    for number, (first, second) in enumerate([("fsdp", "dp"), ("random", "fsdp")]):
        half, folder = dataclasses.replace(job, steps=3), Path(root) / str(number)
        with parallel_for(job, how(first)) as (made, parallel, optimizer):
            found += [train(half, made, parallel, optimizer) != list(wanted.losses[: half.steps])]
            parallel.checkpoint(folder)
        with parallel_for(job, how(second)) as (made, parallel, optimizer):
            one_step(made, parallel, 9)  # something that must be forgotten
            assert mdcs.resume(parallel, folder) is not None
            for step in range(half.steps, job.steps):
                one_step(made, parallel, step)
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * (1 / (1 + (step + 1) / 50))
            found += [differing(parallel.state_dict(), wanted.state), differences(parallel.optimizer_state_dict(), state)]
        found += [differences(optimizer.state_dict(), state)]
    return [item for item in found if item]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_with_ddp_and_resumes_under_another_strategy(two: Ranks, tmp_path: Path, name: str):
    assert two.run(train_and_resume, name, str(tmp_path)) == [[], []]


def count_steps(way: How) -> list[Any]:
    """Counts of an optimizer on its object move on once a step, and not in a step that is dropped."""
    job, made, plain = Job("tied", 1, "own count", None if way.cross_iteration else math.inf), setup("tied"), setup("tied")
    ours, theirs = (OwnCount([p for p in m.model.parameters() if p.requires_grad], lr=0.1) for m in (made, plain))
    ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
    with parallel_for(job, way, made, ours) as (_, parallel, _):
        for step in range(5):
            for model, optimizer in ((made.model, ours), (ddp, theirs)):
                made.loss(model, made.batch(step, 0, dist.get_rank())).backward()
                if step != 2 or way.cross_iteration:
                    optimizer.step()
                optimizer.zero_grad()
            if step == 3:
                parallel.drain()
                assert ours.steps == theirs.steps
    return [*differing(made.model.state_dict(), plain.model.state_dict()), *[ours.steps] * (ours.steps != theirs.steps)]


def count_under_all() -> list[Any]:
    ways = [How("dp"), How("zero2", "dear"), How("fsdp", "priority"), How("random", "random", seed=4)]
    ways += [How("fsdp", cross_iteration=False)]
    return [(way, found) for way in ways if (found := count_steps(way))]


def test_an_optimizer_may_count_its_steps_on_its_object(two: Ranks):
    assert two.run(count_under_all) == [[], []]


def measure(name: str, strategy: str) -> list[tuple[int, int]]:
    """Optimizer bytes of the ledger and of the allocator, before the first step and after."""
    job, found = Job("tied", optimizer=name), []
    with parallel_for(job, how(strategy)) as (made, parallel, _):
        for step in range(2):
            found.append((parallel.memory()["predicted"]["optimizer"], ShimMeter().live()["optimizer"]))
            one_step(made, parallel, step)
            parallel.drain()
    return found


@pytest.mark.parametrize("name", ["adagrad", "nadam", "lion", "subclass", "rprop", "fused"])
def test_its_state_is_in_the_ledger_to_the_byte(two: Ranks, name: str):
    for strategy in ("dp", "fsdp"):
        for rank in two.run(measure, name, strategy):
            (_, reserved), (predicted, held) = rank
            assert held == predicted and 0.8 * predicted < reserved <= predicted, (strategy, rank)


def biases(strategy: str) -> list[Any]:
    """An optimizer that has only the biases, of a model that is not frozen."""
    made, plain = setup("tied"), setup("tied")
    chosen = [[p for p in m.model.parameters() if p.dim() == 1] for m in (made, plain)]
    mine, theirs = (torch.optim.RMSprop(ps, lr=1e-2) for ps in chosen)
    ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
    units, job = mdcs.partition(made.model, made.policy), Job("tied", optimizer=f"biases {strategy}")
    plan = plan_for(job, How(strategy), profile_of(job, How(strategy), made, units, mine))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallel = mdcs.parallelize(made.model, mine, plan, units, timeout_s=20)
    with parallel:
        for step in range(3):
            one_step(made, parallel, step)
            plain.loss(ddp, plain.batch(step, 0, dist.get_rank())).backward()
            theirs.step()
            plain.model.zero_grad()
        found = differing(parallel.state_dict(), plain.model.state_dict())
    del ddp
    return [found, [str(w.message) for w in said if "in no optimizer" in str(w.message)]]


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_parameters_in_no_optimizer_stay_as_they_are(two: Ranks, strategy: str):
    first, second = two.run(biases, strategy)
    assert first[0] == second[0] == [] and second[1] == []
    assert len(first[1]) == 1 and "embedding.weight and 5 more: in no optimizer" in first[1][0]
