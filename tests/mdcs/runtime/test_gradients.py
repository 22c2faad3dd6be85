"""Loops that clip as they do with FSDP or DDP keep their lines, and train as with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import mdcs
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops import how, one_step, said
from tests.mdcs.runtime.training import Job, differing, optimizer_for, plan_for, profile_of, setup

STEPS = 4


def parallel_with(strategy: str, barrier: bool = False, **options: Any) -> Any:
    """Return a model and its run, with these options of parallelize."""
    job, made = Job("tied", optimizer="sgd"), setup("tied")
    optimizer, units = optimizer_for("sgd", made.model), mdcs.partition(made.model, made.policy)
    plan = plan_for(job, how(strategy, cross_iteration=not barrier), profile_of(job, how(strategy), made, units, optimizer))
    return made, mdcs.parallelize(made.model, optimizer, plan, units, timeout_s=20, **options)


def clip_values(strategy: str, limit: float) -> list[str]:
    made, parallel = parallel_with(strategy, clip_value=limit)
    plain = setup("tied")
    ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
    theirs = optimizer_for("sgd", plain.model)
    with parallel:
        for step in range(STEPS):
            batch = made.batch(step, 0, dist.get_rank())
            made.loss(made.model, batch).backward()
            parallel.clip_grad_value_(limit)
            parallel.step()
            made.loss(ddp, batch).backward()
            nn.utils.clip_grad_value_(plain.model.parameters(), limit)
            theirs.step()
            theirs.zero_grad()
        return differing(parallel.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "random"])
def test_values_are_clipped_as_by_ddp_without_a_barrier(two: Ranks, strategy: str):
    assert two.run(clip_values, strategy, 1e-2) == [[], []]


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
