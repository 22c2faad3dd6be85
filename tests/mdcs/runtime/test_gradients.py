"""Loops that clip as they do with FSDP or DDP keep their lines, and train as with DDP."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from tests.mdcs.runtime.ranks import OnTwo
from tests.mdcs.runtime.test_loops import how, lacking, one_step, said
from tests.mdcs.runtime.training import Job, differing, optimizer_for, parallel_for, setup

JOB = Job("tied", optimizer="sgd")
STEPS, LIMIT = 4, 1e-2
on_two = OnTwo()


@on_two("dp", "fsdp", "random")
def values_are_clipped_as_by_ddp_without_a_barrier(strategy: str) -> list[str]:
    plain = setup("tied")
    ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
    theirs = optimizer_for("sgd", plain.model)
    with parallel_for(JOB, how(strategy), clip_value=LIMIT) as (made, parallel, _):
        for step in range(STEPS):
            batch = made.batch(step, 0, dist.get_rank())
            made.loss(made.model, batch).backward()
            parallel.clip_grad_value_(LIMIT)
            parallel.step()
            made.loss(ddp, batch).backward()
            nn.utils.clip_grad_value_(plain.model.parameters(), LIMIT)
            theirs.step()
            theirs.zero_grad()
        return differing(parallel.state_dict(), plain.model.state_dict())


@on_two()
def limits_that_the_run_does_not_have_are_refused() -> list[str]:
    with parallel_for(JOB, how("fsdp")) as (made, parallel, _):
        wrong = lacking(
            said(lambda: parallel.clip_grad_norm_(1.0)), "started without clipping: write parallelize(…, clip_norm=1)",
            "a plan= of your own: make it with cross_iteration=False",
        )  # fmt: skip
        message = said(lambda: parallel.clip_grad_value_(0.5))
        wrong += lacking(message, "started without clipping: write parallelize(…, clip_value=0.5)")
        one_step(made, parallel)
    with parallel_for(JOB, how("fsdp", cross_iteration=False), clip_norm=1.0, clip_value=0.1) as (made, run, _):
        message = said(lambda: run.clip_grad_norm_(2.0))
        wrong += lacking(message, "clip_grad_norm_(2): this run clips at 1: write parallelize(…, clip_norm=2)")
        wrong += lacking(said(lambda: run.clip_grad_norm_(1.0, norm_type=1)), "only the 2-norm is clipped")
        wrong += lacking(said(lambda: run.clip_grad_norm_(1.0)), "comes between backward and step()")
        message = said(lambda: run.clip_grad_value_(1.0))
        wrong += lacking(message, "clip_grad_value_(1): this run clips at 0.1: write parallelize(…, clip_value=1)")
        one_step(made, run)
    return wrong + lacking(said(lambda: parallel_for(JOB, how("dp"), clip_value=-1.0).__enter__()), "clip_value must be > 0")


test_gradients_are_clipped_as_by_ddp = on_two.as_test()
