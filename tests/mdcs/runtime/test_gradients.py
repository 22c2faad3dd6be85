"""Loops that clip and scale as they do with FSDP or DDP keep their lines, and train as with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops import how, one_step, said
from tests.mdcs.runtime.training import Job, Setup, differing, optimizer_for, plan_for, profile_of, setup

STEPS = 4


def loss_of(made: Setup, model: nn.Module, step: int, overflows: bool = False) -> torch.Tensor:
    """The loss of a step; the second one's gradients may overflow where it is scaled."""
    loss = made.loss(model, made.batch(step, 0, dist.get_rank()))
    return loss * 1e36 if overflows and step == 1 else loss


def with_ddp(
    clip_value: float | None = None, clip_norm: float | None = None, scaled: bool = False
) -> tuple[Any, list[float], float]:
    """Train with DDP, clipped and scaled as usual; return weights, norms and the scale."""
    made = setup("tied")
    ddp = nn.parallel.DistributedDataParallel(made.model, process_group=dist.new_group())
    optimizer, norms = optimizer_for("sgd", made.model), []
    scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled=scaled)
    for step in range(STEPS):
        scaler.scale(loss_of(made, ddp, step, overflows=scaled)).backward()
        scaler.unscale_(optimizer)
        if clip_value is not None:
            nn.utils.clip_grad_value_(made.model.parameters(), clip_value)
        if clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(made.model.parameters(), clip_norm)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    del ddp
    return made.model.state_dict(), norms, scaler.get_scale()


def parallel_with(strategy: str, barrier: bool = False, **options: Any) -> Any:
    """Return a model and its run, with these options of parallelize."""
    job, made = Job("tied", optimizer="sgd"), setup("tied")
    optimizer, units = optimizer_for("sgd", made.model), mdcs.partition(made.model, made.policy)
    plan = plan_for(job, how(strategy, cross_iteration=not barrier), profile_of(job, how(strategy), made, units, optimizer))
    return made, mdcs.parallelize(made.model, optimizer, plan, units, timeout_s=20, **options)


def clip_values(strategy: str, limit: float) -> Any:
    made, parallel = parallel_with(strategy, clip_value=limit)
    with parallel:
        for step in range(STEPS):
            loss_of(made, made.model, step).backward()
            parallel.clip_grad_value_(limit)
            parallel.step()
        return differing(parallel.state_dict(), with_ddp(clip_value=limit)[0])


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "random"])
def test_values_are_clipped_as_by_ddp_without_a_barrier(two: Ranks, strategy: str):
    assert two.run(clip_values, strategy, 1e-2) == [[], []]


def clip_norms(strategy: str, limit: float) -> tuple[list[float], list[float | None], list[float]]:
    made, parallel = parallel_with(strategy, barrier=True, clip_norm=limit)
    norms = []
    with parallel:
        for step in range(STEPS):
            loss_of(made, made.model, step).backward()
            norms.append(parallel.clip_grad_norm_(limit).item())
            parallel.step()
            assert norms[-1] == parallel.grad_norm
        parallel.drain()
        records = parallel.records(flush=True)
    return norms, [record.grad_norm for record in records], with_ddp(clip_norm=limit)[1]


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "random"])
def test_the_norm_is_returned_where_ddps_loop_has_it(two: Ranks, strategy: str):
    for ours, recorded, theirs in two.run(clip_norms, strategy, 0.1):
        assert ours == recorded and ours == pytest.approx(theirs, rel=1e-5) and len(set(ours)) == STEPS


def refuse() -> list[str]:
    made, parallel = parallel_with("fsdp")
    with parallel:
        found = [said(lambda: parallel.clip_grad_norm_(1.0)), said(lambda: parallel.clip_grad_value_(0.5))]
        one_step(made, parallel)
    made, parallel = parallel_with("fsdp", barrier=True, clip_norm=1.0, clip_value=0.1)
    with parallel:
        found += [said(lambda: parallel.clip_grad_norm_(2.0)), said(lambda: parallel.clip_grad_norm_(1.0, norm_type=1))]
        found += [said(lambda: parallel.clip_grad_norm_(1.0)), said(lambda: parallel.clip_grad_value_(1.0))]
        one_step(made, parallel)
    return [*found, said(lambda: parallel_with("dp", clip_value=-1.0))]


def test_limits_that_the_run_does_not_have_are_refused(two: Ranks):
    for no_norm, no_value, other_norm, other_kind, too_early, other_value, negative in two.run(refuse):
        assert "started without clipping: write parallelize(…, clip_norm=1)" in no_norm
        assert "a plan= of your own: make it with cross_iteration=False" in no_norm
        assert "started without clipping: write parallelize(…, clip_value=0.5)" in no_value
        assert "clip_grad_norm_(2): this run clips at 1: write parallelize(…, clip_norm=2)" in other_norm
        assert "only the 2-norm is clipped" in other_kind
        assert "comes between backward and step()" in too_early
        assert "clip_grad_value_(1): this run clips at 0.1: write parallelize(…, clip_value=1)" in other_value
        assert "clip_value must be > 0" in negative


def scale(strategy: str) -> list[Any]:
    made, parallel = parallel_with(strategy, barrier=True, loss_scale=mdcs.LossScale(growth_interval=2))
    optimizer, scaler = parallel.optimizer, parallel.scaler
    with parallel:
        for step in range(STEPS):
            scaler.scale(loss_of(made, made.model, step, overflows=True)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            parallel.drain()  # the scale of an iteration is known once its gradients are
        weights, _, wanted = with_ddp(scaled=True)
        theirs = torch.amp.GradScaler("cpu")
        theirs.load_state_dict(scaler.state_dict())
        assert scaler.is_enabled() and scaler.get_scale() == theirs.get_scale() == wanted
        scaler.load_state_dict(theirs.state_dict())
        return differing(parallel.state_dict(), weights)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_loop_with_a_scaler_keeps_its_lines(two: Ranks, strategy: str):
    assert two.run(scale, strategy) == [[], []]
