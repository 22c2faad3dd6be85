"""The optimizer's state is on shards while a plan runs: saved, loaded and handed back it is that of a plain loop, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import mdcs
from tests.mdcs.runtime.ranks import OnTwo
from tests.mdcs.runtime.test_loops import how, lacking, one_step, said
from tests.mdcs.runtime.training import Job, Twin, differing, optimizer_for, parallel_for, planned, reference, setup, train

on_two = OnTwo()


def of_ddp(job: Job) -> dict[str, Any]:
    """The optimizer's state dict after the job with DDP."""
    made = setup(job.model)
    twin = Twin(made.model, optimizer_for(job.optimizer, made.model))
    schedule = job.scheduler(twin.optimizer)
    for step in range(job.steps):
        twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
        schedule.step()
    return twin.optimizer.state_dict()


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[Any]:
    """Places in which two state dicts of optimizers differ, bit for bit."""
    if found["param_groups"] != wanted["param_groups"] or found["state"].keys() != wanted["state"].keys():
        return ["param_groups", found["state"].keys() ^ wanted["state"].keys()]
    return [
        (number, key)
        for number, own in wanted["state"].items()
        for key in own.keys() | found["state"][number].keys()
        if not same(own[key], found["state"][number][key])
    ]


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    return a.dtype == b.dtype and torch.equal(a, b)


@on_two(("zero2", "sgd"), ("random", "adam"))
def a_state_dict_is_that_of_a_plain_loop(strategy: str, optimizer_name: str) -> list[Any]:
    """Others are compared in test_checkpointing.py and test_update_rules.py."""
    job = Job("tied", optimizer=optimizer_name, steps=3)
    wanted = of_ddp(job)
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        saved = parallel.optimizer_state_dict()
        first = parallel.optimizer_state_dict(rank0_only=True, cpu=True)
        one_step(made, parallel)
    alone = differences(first, wanted) if dist.get_rank() == 0 else [*first]
    return differences(saved, wanted) + alone


@on_two(("dp", "adam", True), ("zero2", "sgd", True), ("sdp", "adamw", True), ("random", "adam", False))
def a_run_goes_on_where_another_has_stopped(strategy: str, optimizer_name: str, plain: bool) -> list[str]:
    """Two steps of a plain loop or a plan, and two of another run that has loaded them, are four of DDP."""
    job = Job("tied", optimizer=optimizer_name, steps=4)
    half = dataclasses.replace(job, steps=2)
    if plain:
        weights, saved = reference(half).state, of_ddp(half)
    else:
        with parallel_for(job, how("random")) as (made, parallel, optimizer):
            train(half, made, parallel, optimizer)
            weights, saved = parallel.state_dict(), parallel.optimizer_state_dict(cpu=True)
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        one_step(made, parallel, 7)  # something that must be forgotten
        parallel.load_state_dict(weights)
        parallel.load_optimizer_state_dict(saved)
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in saved["param_groups"]]
        twin = optimizer_for(job.optimizer, setup("tied").model)
        schedule = job.scheduler(twin)
        for step in range(job.steps):
            if step >= half.steps:
                for group, theirs in zip(optimizer.param_groups, twin.param_groups, strict=True):
                    group["lr"] = theirs["lr"]
                one_step(made, parallel, step)
            twin.step()
            schedule.step()
        return differing(parallel.state_dict(), reference(job).state)


@on_two()
def what_does_not_fit_is_refused_and_changes_nothing() -> list[Any]:
    with parallel_for(Job("tied", optimizer="adamw"), how("fsdp")) as (made, parallel, _):
        one_step(made, parallel)
        saved = parallel.optimizer_state_dict()
        number = saved["param_groups"][1]["params"][0]
        fewer = saved | {"param_groups": saved["param_groups"][:1]}
        shape = saved | {"state": saved["state"] | {number: saved["state"][number] | {"exp_avg": torch.zeros(1, 2, 3)}}}
        wrong = lacking(
            said(lambda: parallel.load_optimizer_state_dict(fewer)), "the optimizer has groups of [", "the state dict of ["
        )
        wrong += lacking(
            said(lambda: parallel.load_optimizer_state_dict(shape)), "its exp_avg in the optimizer's state (1, 2, 3)"
        )
        return wrong + differences(parallel.optimizer_state_dict(), saved)


@on_two("dp", "fsdp", "random")
def neighbours_may_have_been_updated_unequally_often(strategy: str) -> list[Any]:
    """Neighbours of a unit that were updated 1 and 3 times, and one that never was, go on as in a plain loop."""
    job = Job("tied", optimizer="adamw", steps=3)
    made = setup("tied")
    plain = optimizer_for("adamw", made.model)
    for step in range(3):
        made.loss(made.model, made.batch(step, 0, 0)).backward()
        for number, p in enumerate(p for group in plain.param_groups for p in group["params"]):
            if number % 3 > step or number == 4:  # left out in the first steps
                p.grad = None
        plain.step()
        plain.zero_grad()
    weights, saved = copy.deepcopy(made.model.state_dict()), copy.deepcopy(plain.state_dict())
    assert len({float(own["step"]) for own in saved["state"].values()}) == 3 and 4 not in saved["state"]
    twin = Twin(made.model, plain)
    for step in range(2):
        twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
    with parallel_for(job, how(strategy)) as (ours, parallel, _):
        parallel.load_state_dict(weights)
        parallel.load_optimizer_state_dict(saved)
        found = differences(parallel.optimizer_state_dict(), saved)
        one_step(ours, parallel, 0)
        again = parallel.optimizer_state_dict()  # from one cut into another
        parallel.load_optimizer_state_dict(again)
        one_step(ours, parallel, 1)
        return found + twin.differing(parallel.state_dict()) + differences(parallel.optimizer_state_dict(), plain.state_dict())


def half_trained() -> tuple[Any, Any]:
    """A model and its optimizer after a step of a plain loop."""
    made = setup("tied")
    optimizer = optimizer_for("adam", made.model)
    made.loss(made.model, made.batch(0, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return made, optimizer


@on_two()
def a_profile_leaves_the_state_as_it_is() -> list[Any]:
    made, optimizer = half_trained()
    before, units = optimizer.state_dict(), mdcs.partition(made.model, made.policy)
    mdcs.autoprofile(made.model, optimizer, units, lambda: made.loss(made.model, made.batch(0, 0, 0)), progress=False)
    with parallel_for(Job("tied"), how("dp"), made, optimizer) as (_, parallel, _):
        after = parallel.optimizer_state_dict()
    return differences(after, before) + differences(optimizer.state_dict(), before)


@on_two()
def frozen_parameters_keep_their_state() -> list[Any]:
    """A block that was trained and is frozen now, as in a plain loop."""
    made, optimizer = half_trained()
    made.model.blocks[0].requires_grad_(False)
    frozen = {number: own for number, own in optimizer.state_dict()["state"].items()
              if not optimizer.param_groups[0]["params"][number].requires_grad}  # fmt: skip
    first = made.batch(0, 0, 0)
    with planned(made.model, optimizer, lambda: made.loss(made.model, first), "fsdp", made.policy) as parallel:
        one_step(made, parallel)
    after = optimizer.state_dict()["state"]
    assert len(frozen) == 4 and len(after) > len(frozen)
    return [n for n, own in frozen.items() if any(not torch.equal(own[key], after[n][key]) for key in own)]


test_state_is_that_of_a_plain_loop = on_two.as_test()
