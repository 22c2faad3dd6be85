"""Every elementwise optimizer trains on shards as with DDP, bit for bit on two ranks: weights, state, checkpoints and bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mdcs
from mdcs.telemetry.memory_meter import ShimMeter
from tests.mdcs.optimizers import OPTIMIZERS, OwnCount
from tests.mdcs.runtime.ranks import OnTwo
from tests.mdcs.runtime.test_loops import how, one_step
from tests.mdcs.runtime.test_optimizer_state import differences, of_ddp
from tests.mdcs.runtime.training import How, Job, Twin, differing, parallel_for, plan_for, profile_of, reference, setup, train

on_two = OnTwo()


@on_two(*OPTIMIZERS)
def it_trains_as_with_ddp_and_resumes_under_another_strategy(root: str, name: str) -> list[Any]:
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


@on_two(
    How("dp"), How("zero2", "dear"), How("fsdp", "priority"), How("random", "random", seed=4), How("fsdp", cross_iteration=False),
)  # fmt: skip
def an_optimizer_may_count_its_steps_on_its_object(way: How) -> list[Any]:
    """Counts move on once a step, and not in a step that is dropped."""
    job, made, plain = Job("tied", 1, "own count", None if way.cross_iteration else math.inf), setup("tied"), setup("tied")
    ours, theirs = (OwnCount([p for p in m.model.parameters() if p.requires_grad], lr=0.1) for m in (made, plain))
    twin = Twin(plain.model, theirs)
    with parallel_for(job, way, made, ours) as (_, parallel, _):
        for step in range(5):
            for model, optimizer in ((made.model, ours), (twin.ddp, theirs)):
                made.loss(model, made.batch(step, 0, dist.get_rank())).backward()
                if step != 2 or way.cross_iteration:
                    optimizer.step()
                optimizer.zero_grad()
            if step == 3:
                parallel.drain()
                assert ours.steps == theirs.steps
    return [*twin.differing(made.model.state_dict()), *[ours.steps] * (ours.steps != theirs.steps)]


@on_two(*itertools.product(("adagrad", "nadam", "lion", "subclass", "rprop", "fused"), ("dp", "fsdp")))
def its_state_is_in_the_ledger_to_the_byte(name: str, strategy: str) -> list[Any]:
    """Optimizer bytes of the ledger and of the allocator, before the first step and after."""
    found = []
    with parallel_for(Job("tied", optimizer=name), how(strategy)) as (made, parallel, _):
        for step in range(2):
            found.append((parallel.memory()["predicted"]["optimizer"], ShimMeter().live()["optimizer"]))
            one_step(made, parallel, step)
            parallel.drain()
    (_, reserved), (predicted, held) = found
    return [] if held == predicted and 0.8 * predicted < reserved <= predicted else found


@on_two("dp", "fsdp")
def parameters_in_no_optimizer_stay_as_they_are(strategy: str) -> list[Any]:
    """An optimizer that has only the biases, of a model that is not frozen. Rank 0 says so once."""
    made, plain = setup("tied"), setup("tied")
    chosen = [[p for p in m.model.parameters() if p.dim() == 1] for m in (made, plain)]
    mine, theirs = (torch.optim.RMSprop(ps, lr=1e-2) for ps in chosen)
    twin = Twin(plain.model, theirs)
    units, job = mdcs.partition(made.model, made.policy), Job("tied", optimizer=f"biases {strategy}")
    plan = plan_for(job, How(strategy), profile_of(job, How(strategy), made, units, mine))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallel = mdcs.parallelize(made.model, mine, plan, units, timeout_s=20)
    with parallel:
        for step in range(3):
            one_step(made, parallel, step)
            twin.step(lambda model: plain.loss(model, plain.batch(step, 0, dist.get_rank())))  # noqa: B023
        found = twin.differing(parallel.state_dict())
    told = [str(w.message) for w in said if "in no optimizer" in str(w.message)]
    wanted = ["embedding.weight and 5 more: in no optimizer"] if dist.get_rank() == 0 else []
    return found + [told] * ([text.partition(", ")[0] for text in told] != wanted)


test_shards_are_updated_as_with_ddp = on_two.as_test()
