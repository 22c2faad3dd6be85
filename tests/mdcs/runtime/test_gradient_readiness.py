"""Reductions that leave before the slot ends in which their gradients come."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.plan.ledger import min_feasible_budget
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.strategies import Uniform
from mdcs.profiler.consensus import on_rank_zero
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import OnTwo, Ranks
from tests.mdcs.runtime.test_loops import Broken, _break
from tests.mdcs.runtime.training import (
    How,
    Job,
    Setup,
    differing,
    optimizer_for,
    parallel_for,
    profile_of,
    reference,
    setup,
    square,
    train,
)

on_two = OnTwo()
BYTES = 128  # of a block: 16 elements per rank


def plan_of(made: Setup, job: Job, strategy: str, *, cross_iteration: bool = True, told: bool = False) -> mdcs.Plan:
    """Every unit in small blocks; ``told`` that the second half of its gradients comes first, whatever was measured."""
    units = mdcs.partition(made.model, made.policy)
    profile = profile_of(job, How(), made, units, optimizer_for(job.optimizer, made.model))
    if told:
        halves = tuple(replace(u, gradients=((u.numel // 2, 1.0), (u.numel // 2, 0.5))) for u in profile.units)
        profile = replace(profile, units=halves)
    scheduler = SCHEDULERS["partitioning"](block_mib=BYTES / 2**20)
    asked = mdcs.Job(profile, job.micro_steps, cross_iteration)
    return on_rank_zero(lambda: mdcs.make_plan(asked, Uniform(strategy), scheduler))


def issued_inside(parallel: mdcs.Session) -> list[int]:
    """The messages, by their place in the plan, that are issued while compute is in a slot, as they are."""
    sequencer, transport = parallel._engine.sequencer, parallel._engine.wire
    issue, seen = transport.issue, list[int]()

    def issuing(activations: int) -> None:
        if not sequencer.arrived and sequencer.entered is not None:
            seen.append(transport.queue.issued % transport.queue.n)
        issue(activations)

    transport.issue = issuing  # type: ignore[method-assign]
    return seen


@on_two(*few([("dp", 1), ("fsdp", 1), ("zero2", 2), ("sdp", 2)], 2), *few([("dp", 1, True), ("fsdp", 1, True)]))
def what_has_its_gradients_leaves_in_every_step(strategy: str, micro_steps: int, tight: bool = False) -> list[Any]:
    """Where it fits, or waits for compute to arrive: a plan's smallest budget knows nothing of messages beside a slot."""
    job = Job("tied", micro_steps, steps=3)
    wanted = reference(job)
    made = setup(job.model, job.double)
    plan = plan_of(made, job, strategy)
    if tight:
        plan = on_rank_zero(lambda: replace(plan, budget=min_feasible_budget(plan)))
    with parallel_for(job, How(), made, plan=plan) as (_, parallel, optimizer):
        seen = issued_inside(parallel)
        losses = train(job, made, parallel, optimizer)
        state = parallel.state_dict()
    early, seen = [i for i, part in enumerate(plan.schedule.ready) if part < 1], sorted({*seen})
    right = {*seen} <= {*early} if tight else early and seen == early
    return ([] if right and losses == list(wanted.losses) else [seen, early, losses]) + differing(state, wanted.state)


# ---- passes that raise


def break_at_different_places() -> dict[str, Any]:
    """Rank 1 raises before its unit's first reduction could leave, rank 0 when some have left."""
    job = Job("tied", steps=3)
    made, rank = setup(job.model, job.double), dist.get_rank()
    plan = plan_of(made, job, "sdp", cross_iteration=False)
    with parallel_for(job, How(), made, plan=plan) as (_, parallel, optimizer):
        schedule, counts = job.scheduler(optimizer), []
        for step in range(job.steps):
            if step == 1:
                seen = issued_inside(parallel)
                weight = made.model.get_submodule("blocks.0")[2 * rank].weight  # type: ignore[index]
                handle = weight.register_hook(_break)
                with pytest.raises(Broken):
                    made.loss(made.model, made.batch(77, 0, 0)).backward()
                handle.remove()
                counts.append(len(seen))
                parallel.abandon()
            made.loss(made.model, made.batch(step, 0, rank)).backward()
            parallel.step()
            schedule.step()
        return {"counts": counts, "weights": differing(parallel.state_dict(), reference(job).state)}


def test_what_one_rank_has_issued_is_sent_by_all_when_they_give_up(two: Ranks):
    first, second = two.run(break_at_different_places)
    assert first["counts"] > second["counts"]
    assert first["weights"] == second["weights"] == []


# ---- weights that are used once more, detached


class Detached(nn.Module):
    """Its second weight has its gradient before a pass through the same numbers, detached, needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first) @ self.second.detach() @ self.second


@on_two("dp", "sdp", ("sdp", True))  # shards are not what computes
def weights_that_are_needed_after_their_gradients_are_not_updated_before(strategy: str, told: bool = False) -> list[str]:
    """Differences to a plain loop, or the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Detached())
    batch = lambda step, *_: {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(step))}  # noqa: E731
    made = Setup(model, square, mdcs.ByClass(("Linear", "Detached")), batch)
    job = Job("detached", steps=2)
    twin = copy.deepcopy(model)
    plan = plan_of(made, job, strategy, told=told)
    assert bool(plan.profile.units[-1].gradients) == told
    with parallel_for(job, How(), made, plan=plan) as (_, parallel, optimizer):
        try:
            train(job, made, parallel, optimizer)
        except RuntimeError as e:
            return [str(e)]
        state = parallel.state_dict()
    theirs = optimizer_for(job.optimizer, twin)  # the ranks' batches are the same: their mean gradient is that of one
    schedule = job.scheduler(theirs)
    for step in range(job.steps):
        made.loss(twin, batch(step, 0, 0)).backward()
        theirs.step()
        theirs.zero_grad()
        schedule.step()
    return differing(state, twin.state_dict())


def test_should_they_be_all_the_same_nothing_computes_with_them(two: Ranks):
    for [said] in two.run(weights_that_are_needed_after_their_gradients_are_not_updated_before, "dp", True):
        assert "one of the variables needed for gradient computation has been modified by an inplace operation" in said


test_reductions_leave_when_they_can = on_two.as_test()
