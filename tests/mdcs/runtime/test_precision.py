"""Mixed precision: compute in bfloat16 or float16, updates of float32 masters, beside a plain loop that does the same."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from mdcs.runtime.gradient_scaling import LossScale
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, optimizer_for, parallel_for, setup

pytestmark = pytest.mark.slow

OVERFLOWS = 2.0**40  # any gradient times it is infinite in float16


@lru_cache(maxsize=8)
def plain_losses(job: Job) -> tuple[float, ...]:
    """This rank's losses in a loop that computes every rank's gradients itself."""
    made = setup(job.model, half=job.half)
    parameters = [p for p in made.model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    given = optimizer_for(job.optimizer, made.model)
    options = {k: v for k, v in given.param_groups[0].items() if k not in ("params", "param_names")}
    optimizer = type(given)(masters, **options)
    losses = []
    for step in range(job.steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for rank in range(dist.get_world_size()):
            for micro in range(job.micro_steps):
                loss = made.loss(made.model, made.batch(step, micro, rank)) / job.micro_steps
                (loss * 1024).backward()  # as good as a float16 needs it
                if rank == dist.get_rank():
                    losses.append(loss.item())
                for p, master in zip(parameters, masters, strict=True):
                    master.grad += p.grad.float() / 1024 / dist.get_world_size()
                    p.grad = None
        optimizer.step()
        for p, master in zip(parameters, masters, strict=True):
            p.data.copy_(master)
    return tuple(losses)


def beside_a_plain_loop(job: Job, how: How, value: float) -> dict[str, Any]:
    made = setup(job.model, half=job.half)
    scale = LossScale(value) if job.half == "fp16" else None
    losses = []
    with parallel_for(job, how, made, loss_scale=scale) as (_, parallel, _):
        for step in range(job.steps):
            for micro in range(job.micro_steps):
                loss = made.loss(made.model, made.batch(step, micro, dist.get_rank())) / job.micro_steps
                parallel.scaled(loss).backward()
                losses.append(loss.item())
            parallel.step()
        whole, masters = parallel.state_dict(), masters_of(parallel)
        parallel.load_state_dict({name: value.float() for name, value in whole.items()})
        loaded = masters_of(parallel)
    wanted, trained = plain_losses(job), dict(made.model.named_parameters())
    first = setup(job.model, half=job.half)
    untrained = first.model.state_dict()
    untrained_loss = first.loss(first.model, first.batch(job.steps - 1, job.micro_steps - 1, dist.get_rank())).item()
    return {
        "apart": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "trained": abs(losses[-1] - untrained_loss / job.micro_steps),
        "dtypes": {str(v.dtype) for name, v in whole.items() if name in trained},
        "sum": sum(value.double().sum().item() for value in whole.values()),
        "untrained": all(torch.equal(value, untrained[name]) for name, value in whole.items()),
        # What compute sees is the masters, rounded; loaded, it is the masters, which had more digits before.
        "rounded": [name for name, value in whole.items() if not torch.equal(masters[name].to(value.dtype), value)],
        "loaded": [name for name, value in whole.items() if not torch.equal(loaded[name], value.to(loaded[name].dtype))],
        "digits": sum(not torch.equal(masters[name], loaded[name]) for name in trained),
        "skipped": None if scale is None else scale.skipped,
    }


def masters_of(parallel: mdcs.Session) -> dict[str, torch.Tensor]:
    """Return the state dict in the precision that is updated."""
    whole = parallel.state_dict()
    for u, storage in enumerate(parallel._engine.storages):
        parts = {b: storage.owned_shard(b) for b in range(len(storage.blocks))}
        flat = parallel._engine.unsharder.start_gather(u, parts, "masters")()
        whole |= {name: place.view(flat).clone() for name, place in zip(storage.names, storage.places, strict=True)}
    return whole


def check(results: list[dict[str, Any]], *dtypes: str) -> None:
    for result in results:
        assert result["apart"] <= 1e-2 and result["trained"] > max(4 * result["apart"], 1e-3), result
        assert result["dtypes"] == {f"torch.{dtype}" for dtype in dtypes}
        assert result["rounded"] == result["loaded"] == [] and result["digits"] > 0, result
    assert len({result["sum"] for result in results}) == 1


@pytest.mark.parametrize(
    ("model", "cross", "strategy"),
    [*(("gpt2", True, s) for s in ("dp", "fsdp", "random")), *(("tied", False, s) for s in ("zero2", "sdp"))],
)
def test_bfloat16(two: Ranks, model: str, strategy: str, cross: bool) -> None:
    how = How(strategy, "random" if strategy == "random" else "priority", cross, seed=4)
    check(two.run(beside_a_plain_loop, Job(model, half="bf16"), how, 1.0), "bfloat16")


@pytest.mark.parametrize(
    "job",
    [Job("gpt2", 2, wide_gradients=True), Job("resnet", optimizer="sgd", wide_gradients=True, steps=4)],
    ids=["gpt2", "resnet"],
)
def test_wide_gradients_accumulation_and_batch_norm(two: Ranks, job: Job) -> None:
    """BatchNorm over two samples, in bfloat16, makes much of little: a few steps only."""
    check(two.run(beside_a_plain_loop, dataclasses.replace(job, half="bf16"), How("random", "fusion", seed=2), 1.0), "bfloat16")


@pytest.mark.parametrize("strategy", ["fsdp", "random"])
def test_float16_with_a_loss_scale(two: Ranks, strategy: str) -> None:
    job, how = Job("gpt2", half="fp16"), How(strategy, "dear", cross_iteration=False, seed=4)
    results = two.run(beside_a_plain_loop, job, how, 1024.0)
    check(results, "float16")
    assert {result["skipped"] for result in results} == {0}


def test_an_overflow_leaves_the_update_out_on_every_rank(two: Ranks) -> None:
    job, how = Job("gpt2", half="fp16", steps=3), How("random", "wfbp", cross_iteration=False, seed=1)
    results = two.run(beside_a_plain_loop, job, how, OVERFLOWS)
    assert {result["skipped"] for result in results} == {3}
    assert all(result["untrained"] for result in results)


@pytest.mark.parametrize("name", ["master_dtype", "grad_dtype"])
@pytest.mark.parametrize(("own", "dtype"), [("", torch.bfloat16), ("bf16", torch.float16), ("", torch.int64)])
def test_a_precision_that_is_not_wider_is_refused(name: str, own: str, dtype: torch.dtype) -> None:
    made = setup("tied", half=own)
    units, optimizer = mdcs.partition(made.model, made.policy), optimizer_for("adam", made.model)
    with pytest.raises(ValueError, match=f"{name} must be torch.* or wider and float32 or float64, got {dtype}"):
        mdcs.autoplan(made.model, optimizer, units, lambda: made.loss(made.model, made.batch(0, 0, 0)), **{name: dtype})


@pytest.mark.parametrize("wrong", [{"value": 0.0}, {"value": float("inf")}, {"growth_interval": 0}])
def test_a_scale_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be > 0|must be >= 1"):
        LossScale(**wrong)
