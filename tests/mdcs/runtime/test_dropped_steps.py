"""Loops that leave out a step whose gradients' norm is not finite train as with DDP, from the first step on."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from tests.mdcs.api.test_session import blocks, texts
from tests.mdcs.runtime.ranks import OnTwo
from tests.mdcs.runtime.test_loops import said
from tests.mdcs.runtime.training import How, Job, differing, optimizer_for, parallel_for, setup

on_two = OnTwo()
STEPS, LIMIT = 6, 1e6
BAD = (1, 2, 5)  # steps by number
PLANS = [
    How("dp", "wfbp", False), How("zero2", "sequential", False), How("sdp", "fusion", False), How("fsdp", "partitioning", False),
    How("fsdp", "sequential", False, budget=1.0), How("random", "random", False, seed=3),
]  # fmt: skip


def is_bad(step: int, bad: tuple[int, ...]) -> bool:
    """On one rank only: the other hears it by the norm."""
    return step in bad and dist.get_rank() == 1


def train(
    loss_of: Any, optimizer: torch.optim.Optimizer, clip: Any, scaler: Any, drop: Any, *, bad: tuple[int, ...], micro_steps: int,
    no_sync: Any = None,
) -> Any:  # fmt: skip
    """Return losses, norms, and the steps that were made. ``scaler``: None, or with a GradScaler's calls."""
    losses, norms, made = [], [], 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    for step in range(1, STEPS + 1):
        for micro in range(micro_steps):
            with no_sync() if no_sync and micro < micro_steps - 1 else nullcontext():
                loss = loss_of(step, micro) / micro_steps
                loss = loss * math.inf if is_bad(step, bad) and micro == 0 else loss
                (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        norms.append(clip(LIMIT).item())
        if math.isfinite(norms[-1]):
            optimizer.step() if scaler is None else scaler.step(optimizer)
            schedule.step()
            made += 1
            optimizer.zero_grad()
        else:
            drop()
        if scaler is not None:
            scaler.update()
    return losses, norms, made


def with_ddp(model: nn.Module, loss_of: Any, optimizer: torch.optim.Optimizer, scaled: bool, **options: Any) -> Any:
    ddp = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())
    scaler = torch.amp.GradScaler("cpu", growth_interval=2) if scaled else None

    def clip(limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    found = train(lambda *at: loss_of(ddp, *at), optimizer, clip, scaler, optimizer.zero_grad, no_sync=ddp.no_sync, **options)
    return *found, None if scaler is None else scaler.get_scale()


def compared(wanted: Any, found: Any, parallel: mdcs.Session, plain: nn.Module, scaled: bool) -> list[str]:
    """Differences from DDP; norms may differ by their rounding."""
    out = [what for what, i in (("losses", 0), ("steps", 2)) if str(wanted[i]) != str(found[i])]  # NaN is not equal to itself
    out += [] if found[1] == pytest.approx(wanted[1], rel=1e-5, nan_ok=True) else ["norms", str(wanted[1]), str(found[1])]
    out += [] if str(parallel.grad_norm) == str(found[1][-1]) else ["the last norm"]
    if scaled:
        theirs = torch.amp.GradScaler("cpu")
        theirs.load_state_dict(parallel.scaler.state_dict())
        out += [] if parallel.scaler.get_scale() == theirs.get_scale() == wanted[3] else ["scale"]
        parallel.scaler.load_state_dict(theirs.state_dict())
    return out + differing(parallel.state_dict(), plain.state_dict())


def planned(how: How, bad: tuple[int, ...], micro_steps: int, scaled: bool, drops: str) -> list[str]:
    """Train by a plan that was made before."""
    made, plain, job = setup("tied"), setup("tied"), Job("tied", micro_steps, clip_norm=LIMIT)

    def loss_of(model: nn.Module, step: int, micro: int) -> Tensor:
        return made.loss(model, made.batch(step, micro, dist.get_rank()))

    options: dict[str, Any] = {"bad": bad, "micro_steps": micro_steps}
    wanted = with_ddp(plain.model, loss_of, optimizer_for("adam", plain.model), scaled, **options)
    scale = mdcs.LossScale(growth_interval=2) if scaled else None
    with parallel_for(job, how, made, loss_scale=scale) as (_, parallel, optimizer):
        drop = {"zero_grad": optimizer.zero_grad, "abandon": parallel.abandon}[drops]
        scaler = parallel.scaler if scaled else None
        found = train(lambda *at: loss_of(made.model, *at), optimizer, parallel.clip_grad_norm_, scaler, drop, **options)
        return compared(wanted, found, parallel, plain.model, scaled)


CASES = [
    *((how, BAD, 1, False, "zero_grad") for how in PLANS),
    *((how, BAD, 1, False, "abandon") for how in PLANS[1:3]),
    *((how, BAD, 2, False, "zero_grad") for how in PLANS),
    *((how, BAD, 1, True, "zero_grad") for how in PLANS[:4]),
]  # fmt: skip


@on_two()
def steps_are_left_out_as_with_ddp_under_any_plan() -> list[Any]:
    return [(case, found) for case in CASES if (found := planned(*case))]


@on_two((BAD, 1, False), ((5,), 1, False), (BAD, 2, False), (BAD, 1, True))
def steps_are_left_out_as_with_ddp_without_a_plan(bad: tuple[int, ...], micro_steps: int, scaled: bool) -> list[str]:
    """Train without a plan: the first step that is made is measured."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = blocks()
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(model: nn.Module, step: int, micro: int) -> Tensor:
        torch.manual_seed(100 * step + 10 * micro + dist.get_rank())  # for dropout
        return texts(model, 100 * step + 10 * micro + dist.get_rank())

    options: dict[str, Any] = {"bad": bad, "micro_steps": micro_steps}
    (plain, theirs), (model, optimizer) = made(), made()
    wanted = with_ddp(plain, loss_of, theirs, scaled, **options)
    scale = mdcs.LossScale(growth_interval=2) if scaled else None
    parallel = mdcs.parallelize(
        model, optimizer, clip_norm=LIMIT, loss_scale=scale, profiles=False, seconds=0.5, progress=False, timeout_s=20
    )
    scaler = parallel.scaler if scaled else None
    with parallel:
        clip = parallel.clip_grad_norm_
        found = train(lambda *at: loss_of(model, *at), optimizer, clip, scaler, optimizer.zero_grad, **options)
        return compared(wanted, found, parallel, plain, scaled)


def before_backward(loss: Tensor, is_bad: bool, optimizer: torch.optim.Optimizer) -> bool:
    if is_bad:
        optimizer.zero_grad()
        return False
    loss.backward()
    return True


def going_on_at_once(loss: Tensor, is_bad: bool, optimizer: torch.optim.Optimizer) -> bool:
    if not is_bad:
        loss.backward()
    return not is_bad


def after_backward(loss: Tensor, is_bad: bool, optimizer: torch.optim.Optimizer) -> bool:
    """Updates must wait for it: ``clip_norm=inf``."""
    loss.backward()
    if is_bad:
        optimizer.zero_grad()
    return not is_bad


IDIOMS = [before_backward, going_on_at_once, after_backward]


def leave_out(loss_of: Any, optimizer: torch.optim.Optimizer, idiom: Any) -> list[float]:
    """Leave out the batches of BAD, whose losses are not finite on any rank."""
    losses = []
    for step in range(1, STEPS + 1):
        loss = loss_of(step) * (math.inf if step in BAD else 1.0)
        losses.append(loss.item())
        if idiom(loss, not math.isfinite(losses[-1]), optimizer):
            optimizer.step()
            optimizer.zero_grad()
    return losses


@on_two()
def batches_whose_loss_is_not_finite_are_left_out_as_people_write_it() -> list[Any]:
    """Under plans without a barrier, but for the last idiom, and without a plan."""
    found = []
    for idiom in IDIOMS:
        for strategy, scheduler in (("dp", "wfbp"), ("fsdp", "priority"), ("random", "random"), ("", "")):
            made, plain, job = setup("tied"), setup("tied"), Job("tied", clip_norm=math.inf if idiom is after_backward else None)
            ours, theirs = (optimizer_for("adam", m.model) for m in (made, plain))
            ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
            wanted = leave_out(lambda step: plain.loss(ddp, plain.batch(step, 0, dist.get_rank())), theirs, idiom)  # noqa: B023
            if strategy:
                started: Any = parallel_for(job, How(strategy, scheduler, seed=3), made, ours)
            else:
                started = mdcs.parallelize(
                    made.model, ours, units=mdcs.partition(made.model, made.policy), clip_norm=job.clip_norm, profiles=False,
                    progress=False, seconds=0.5, timeout_s=20,
                )  # fmt: skip
            with started as run:
                losses = leave_out(lambda step: made.loss(made.model, made.batch(step, 0, dist.get_rank())), ours, idiom)  # noqa: B023
                names = differing((run[1] if strategy else run).state_dict(), plain.model.state_dict())
            if names or str(losses) != str(wanted):
                found.append((idiom.__name__, strategy, names, losses, wanted))
    return found


@on_two(PLANS[0], PLANS[3])
def the_norm_after_a_step_is_that_steps(how: How) -> list[Any]:
    """The norm that clipping returns, and what ``grad_norm`` is right after ``step()``, of runs that do not ask before."""
    out: list[list[Any]] = []
    for asks in (True, False):
        norms = []
        with parallel_for(Job("tied", clip_norm=LIMIT), how) as (made, parallel, optimizer):
            for step in range(STEPS):
                made.loss(made.model, made.batch(step, 0, dist.get_rank())).backward()
                if asks:
                    norms.append(parallel.clip_grad_norm_(LIMIT).item())
                    assert "call it after step()" in said(parallel.drain)
                optimizer.step()
                if not asks:
                    norms.append(parallel.grad_norm)
            parallel.drain()
            assert [record.grad_norm for record in parallel.records(flush=True)] == norms
        out.append(norms)
    asked, after = out
    return out * (asked != after or len({*asked}) != STEPS)


@on_two("dp", "fsdp")
def gradients_may_be_dropped_between_micro_steps(strategy: str) -> list[str]:
    """The gradients of the first pass of each second step are dropped, under a plan without a barrier."""
    made, plain, job = setup("tied"), setup("tied"), Job("tied", 2)
    ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
    with parallel_for(job, How(strategy, "wfbp"), made) as (_, parallel, ours):
        for model, optimizer in ((made.model, ours), (ddp, optimizer_for("adam", plain.model))):
            for step in range(STEPS):
                for micro in range(2):
                    with ddp.no_sync() if model is ddp and not micro else nullcontext():
                        made.loss(model, made.batch(step, micro, dist.get_rank())).backward()
                    if step % 2 and not micro:
                        optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
        return differing(parallel.state_dict(), plain.model.state_dict())


test_steps_are_left_out_as_with_ddp = on_two.as_test(timeout_s=200)
