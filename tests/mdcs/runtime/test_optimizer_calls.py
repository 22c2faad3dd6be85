"""The loop keeps its optimizer: step, zero_grad, state dicts and schedules of the learning rate as with DDP."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.mdcs.runtime.ranks import OnTwo
from tests.mdcs.runtime.test_loops import how
from tests.mdcs.runtime.test_optimizer_state import differences
from tests.mdcs.runtime.training import Job, Twin, optimizer_for, parallel_for, setup

on_two = OnTwo()


@on_two("dp", "fsdp", "random")
def a_loop_keeps_its_lines(strategy: str) -> list[Any]:
    """The same lines for both: zero_grad, forward, backward, step, and a schedule made before or after parallelize."""
    found: list[Any] = []
    plain = setup("tied")
    twin = Twin(plain.model, optimizer_for("adam", plain.model))
    with parallel_for(Job("tied"), how(strategy)) as (made, parallel, ours), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert parallel.optimizer is ours
        sides = [
            (model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))
            for model, optimizer in ((made.model, parallel.optimizer), (twin.ddp, twin.optimizer))
        ]
        losses: list[list[float]] = [[], []]
        saved: Any = None
        for step in range(4):
            for (model, optimizer, schedule), kept in zip(sides, losses, strict=True):
                optimizer.zero_grad()
                loss = made.loss(model, made.batch(step, 0, dist.get_rank()))
                loss.backward()
                optimizer.step()
                schedule.step()
                kept.append(loss.item())
            if step == 1:
                saved = ours.state_dict()
                found += differences(saved, twin.optimizer.state_dict())
        found += [losses] * (losses[0] != losses[1]) + twin.differing(parallel.state_dict())
        ours.load_state_dict(saved)
        assert float(ours.state_dict()["state"][0]["step"]) == 2.0
        found += [str(w.message) for w in warned]
    return found + [name for name in ("step", "state_dict", "load_state_dict") if name in vars(ours)]


@on_two()
def a_step_may_be_given_a_closure() -> list[str]:
    """A closure runs once, before the update, as torch's elementwise optimizers call it."""
    plain = setup("tied")
    twin = Twin(plain.model, optimizer_for("adam", plain.model))
    with parallel_for(Job("tied"), how("fsdp")) as (made, parallel, ours):
        for step in range(2):
            for model, optimizer in ((made.model, ours), (twin.ddp, twin.optimizer)):

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()  # noqa: B023
                    loss = made.loss(model, made.batch(step, 0, dist.get_rank()))  # noqa: B023
                    loss.backward()
                    return loss

                assert optimizer.step(closure) is not None
        return twin.differing(parallel.state_dict())


@on_two()
def a_schedule_may_be_made_before_the_run() -> list[str]:
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
    return [str(w.message) for w in warned] + ["step"] * (vars(optimizer)["step"] is not wrapped)


test_loops_keep_their_optimizers = on_two.as_test()
