"""The loop keeps its optimizer: step, zero_grad, state dicts and schedules of the learning rate as with DDP."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops import how
from tests.mdcs.runtime.training import Job, differing, optimizer_for, parallel_for, setup


def plain_lines(strategy: str) -> dict[str, Any]:
    """The same lines for both: zero_grad, forward, backward, step, and a schedule made before or after parallelize."""
    found: dict[str, Any] = {}
    rank, job = dist.get_rank(), Job("tied", optimizer="adam")
    twin = setup("tied")
    ddp = nn.parallel.DistributedDataParallel(twin.model, process_group=dist.new_group())
    theirs = optimizer_for("adam", twin.model)
    with parallel_for(job, how(strategy)) as (made, parallel, ours), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert parallel.optimizer is ours
        sides = [
            (made.model, made, ours, torch.optim.lr_scheduler.LambdaLR(parallel.optimizer, lambda step: 0.5**step)),
            (ddp, twin, theirs, torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 0.5**step)),
        ]
        losses: list[list[float]] = [[], []]
        saved: Any = None
        for step in range(4):
            for (model, side, optimizer, schedule), kept in zip(sides, losses, strict=True):
                optimizer.zero_grad()
                loss = side.loss(model, side.batch(step, 0, rank))
                loss.backward()
                optimizer.step()
                schedule.step()
                kept.append(loss.item())
            if step == 1:
                saved = ours.state_dict()
                state = theirs.state_dict()["state"]
                found["state"] = [
                    (number, key) for number, own in state.items() for key, v in own.items()
                    if not torch.equal(saved["state"][number][key], v)
                ]  # fmt: skip
        found["losses"] = losses[0] == losses[1]
        found["weights"] = differing(parallel.state_dict(), twin.model.state_dict())
        ours.load_state_dict(saved)
        found["loaded"] = float(ours.state_dict()["state"][0]["step"])
        found["warned"] = [str(w.message) for w in warned]
    found["own again"] = {"step", "state_dict", "load_state_dict"} & set(vars(ours))
    return found


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "random"])
def test_a_loop_keeps_its_lines(two: Ranks, strategy):
    for found in two.run(plain_lines, strategy):
        assert found == {"state": [], "losses": True, "weights": [], "loaded": 2.0, "warned": [], "own again": set()}


def closures() -> list[str]:
    """A closure runs once, before the update, as torch's elementwise optimizers call it."""
    rank, job = dist.get_rank(), Job("tied", optimizer="adam")
    twin = setup("tied")
    ddp = nn.parallel.DistributedDataParallel(twin.model, process_group=dist.new_group())
    theirs = optimizer_for("adam", twin.model)
    with parallel_for(job, how("fsdp")) as (made, parallel, ours):
        for step in range(2):
            for model, side, optimizer in ((made.model, made, ours), (ddp, twin, theirs)):

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()  # noqa: B023
                    loss = side.loss(model, side.batch(step, 0, rank))  # noqa: B023
                    loss.backward()
                    return loss

                assert optimizer.step(closure) is not None
        return differing(parallel.state_dict(), twin.model.state_dict())


def test_a_step_may_be_given_a_closure(two: Ranks):
    assert two.run(closures) == [[], []]


def a_schedule_from_before() -> tuple[list[str], bool]:
    """A schedule wraps the optimizer's step when it is made. The wrapper is there again after the run."""
    job, made = Job("tied", optimizer="adam"), setup("tied")
    optimizer = optimizer_for(job.optimizer, made.model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = vars(optimizer)["step"]
    with parallel_for(job, how("fsdp"), made, optimizer), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made.loss(made.model, made.batch(0, 0, dist.get_rank())).backward()
        optimizer.step()
        schedule.step()
    return [str(w.message) for w in warned], vars(optimizer)["step"] is wrapped


def test_a_schedule_may_be_made_before_the_run(two: Ranks):
    assert two.run(a_schedule_from_before) == [([], True)] * 2
