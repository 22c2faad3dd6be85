"""Training that was stopped goes on from its checkpoint: bit for bit on as many ranks, and the same on others."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import mdcs
from mdcs.checkpoint import dcp_shards, directory
from tests.mdcs.runtime.ranks import OnTwo, Ranks
from tests.mdcs.runtime.test_loops import how, lacking, one_step, said
from tests.mdcs.runtime.test_optimizer_state import differences, of_ddp
from tests.mdcs.runtime.training import Job, Setup, differing, optimizer_for, parallel_for, reference, setup

on_two = OnTwo()


def other_start(job: Job) -> Setup:
    """The job's model with other weights: what must be forgotten."""
    made = setup(job.model, job.double)
    with torch.no_grad():
        for p in made.model.parameters():
            p.add_(1)
    return made


def steps(made: Setup, parallel: mdcs.Session, schedule: Any, numbers: range) -> None:
    for step in numbers:
        one_step(made, parallel, step)
        schedule.step()


def drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


@on_two(
    ("dp", "adam", True), ("fsdp", "adam", False), ("random", "adamw", False), ("zero2", "sgd", True), ("sdp", "plain sgd", True),
)  # fmt: skip
def resumed_on_as_many_ranks_it_is_the_same_bit_for_bit(root: str, strategy: str, optimizer_name: str, wait: bool) -> list[Any]:
    """Two steps, and two of another run that has resumed, are four of DDP: weights, state, rates and random numbers."""
    job = Job("tied", optimizer=optimizer_name, steps=4)
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        assert parallel.plan.cross_iteration
        schedule = job.scheduler(optimizer)
        steps(made, parallel, schedule, range(2))
        torch.manual_seed(dist.get_rank())
        saving = parallel.checkpoint(root, extra={"schedule": schedule.state_dict(), "rank": dist.get_rank()}, wait=wait)
        numbers = drawn()
        steps(made, parallel, schedule, range(2, 3))  # while it is written
        saving.wait()
        assert saving.folder.name == "step-00000002" and saving.written_s is not None and (saving.staged_bytes > 0) is not wait
    with parallel_for(job, how(strategy), other_start(job)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        resumed = mdcs.resume(parallel, root)
        assert resumed is not None and (resumed.step, resumed.world, resumed.extra["rank"]) == (2, 2, dist.get_rank())
        schedule.load_state_dict(resumed.extra["schedule"])
        assert drawn() == numbers and parallel.steps == 2
        steps(made, parallel, schedule, range(2, 4))
        assert parallel.steps == 4
        state = differences(parallel.optimizer_state_dict(), of_ddp(job))
        return differing(parallel.state_dict(), reference(job).state) + state


@on_two("dp", "fsdp")
def parameters_without_elements_are_saved_and_left_alone(root: str, strategy: str) -> list[Any]:
    """Saved, resumed, loaded and closed, a model with parameters without elements, and an expanded buffer, is a plain one."""
    job = Job("empty", steps=4)
    with parallel_for(job, how(strategy)) as (made, parallel, _):
        steps(made, parallel, job.scheduler(parallel.optimizer), range(2))
        parallel.checkpoint(root)
        state, optimizer_state = parallel.state_dict(), parallel.optimizer_state_dict()
    plain = optimizer_for(job.optimizer, made.model)
    plain.load_state_dict(optimizer_state)
    made.loss(made.model, made.batch(2, 0, 0)).backward()
    plain.step()  # as a plain loop would
    with parallel_for(job, how(strategy), other_start(job)) as (made, parallel, optimizer):
        parallel.load_state_dict(state)
        parallel.load_optimizer_state_dict(plain.state_dict())
        resumed = mdcs.resume(parallel, root)
        assert resumed is not None
        schedule = job.scheduler(optimizer)
        for _ in range(resumed.step):
            schedule.step()
        steps(made, parallel, schedule, range(2, 4))
        found = parallel.state_dict()
    read = mdcs.read_checkpoint(root)
    optimizer_for(job.optimizer, made.model).load_state_dict(read["optimizer"])
    made.model.load_state_dict(read["model"], assign=True)  # torch itself cannot write into an expanded buffer
    shapes = [{name: tuple(value.shape) for name, value in where.items() if "norm." in name} for where in (found, read["model"])]
    assert shapes[0] == shapes[1] and shapes[0]["norm.nothing"] == (0, 6)
    # DDP refuses parameters that no forward uses, and expanded buffers.
    return differing(found, setup(job.model).model.state_dict() | reference(dataclasses.replace(job, model="tied")).state)


# ---- other ranks, other plans

SAMPLES = 12
JOB = Job("line-8-16-4", double=True)


def losses(root: str, strategy: str, numbers: range) -> list[float]:
    """Losses of the steps, of all ranks together: each takes its part of the same twelve samples."""
    rank, world = dist.get_rank(), dist.get_world_size()
    how_ = dataclasses.replace(how(strategy), scheduler="joint") if strategy == "joint" else how(strategy)
    with parallel_for(JOB, how_, None if numbers.start == 0 else other_start(JOB)) as (made, parallel, _):
        if numbers.start:
            resumed = mdcs.resume(parallel, root)
            assert resumed is not None and resumed.step == numbers.start
        out = []
        for step in numbers:
            loss = made.loss(made.model, {"x": samples(step)[rank * SAMPLES // world : (rank + 1) * SAMPLES // world]})
            loss.backward()
            parallel.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            out.append(mean.item() / world)
        parallel.checkpoint(root)
        return out


def samples(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def alone() -> list[float]:
    made = setup(JOB.model, JOB.double)
    optimizer, out = optimizer_for(JOB.optimizer, made.model), []
    for step in range(9):
        loss = made.loss(made.model, {"x": samples(step)})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def test_a_run_goes_on_with_other_numbers_of_ranks(two: Ranks, three: Ranks, four: Ranks, tmp_path):
    """With other strategies, too; on as many ranks that is bitwise (test_update_rules.py)."""
    found: list[float] = []
    for i, (ranks, strategy) in enumerate(((two, "dp"), (four, "fsdp"), (three, "joint"))):
        found += ranks.run(losses, str(tmp_path), strategy, range(3 * i, 3 * i + 3))[0]
    assert found == pytest.approx(alone(), abs=1e-9)


# ---- plain PyTorch


def save_one(root: str, model: str, strategy: str) -> list[Any]:
    job = Job(model)
    with parallel_for(job, how(strategy)) as (made, parallel, _):
        one_step(made, parallel)
        parallel.checkpoint(root)
        return [parallel.state_dict(cpu=True), parallel.optimizer_state_dict(cpu=True)]


@pytest.mark.parametrize(("model", "strategy"), [("tied", "fsdp"), ("resnet", "random")])
def test_plain_pytorch_reads_it_under_the_plain_names(two: Ranks, tmp_path, model, strategy):
    state, optimizer = two.run(save_one, str(tmp_path), model, strategy)[0]
    made = setup(model)
    read = {"model": {name: torch.zeros_like(value) for name, value in made.model.state_dict().items()}}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(read, checkpoint_id=tmp_path / "step-00000001")
    assert differing(read["model"], state) == []
    plain = mdcs.read_checkpoint(tmp_path)
    made.model.load_state_dict(plain["model"])
    twin = optimizer_for("adam", made.model)
    twin.load_state_dict(plain["optimizer"])
    assert plain["step"] == 1 and differing(plain["model"], state) == [] and differences(twin.state_dict(), optimizer) == []
    torch.save(plain, tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt", weights_only=True)["step"] == 1


# ---- what goes wrong


def write_two(root: str) -> None:
    with parallel_for(Job("tied"), how("fsdp")) as (made, parallel, _):
        for step in range(3):
            one_step(made, parallel, step)
            parallel.checkpoint(root, keep=2)
    assert [path.name for path in directory.complete_checkpoints(Path(root))] == ["step-00000003", "step-00000002"]


def resume_each(root: str, harmed: list[str]) -> list[Any]:
    out = []
    with parallel_for(Job("tied"), how("sdp")) as (_, parallel, _):
        for name in harmed:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                resumed = mdcs.resume(parallel, Path(root) / name)
            text = next((str(w.message) for w in told if "not read" in str(w.message)), "")
            refused = said(lambda name=name: mdcs.resume(parallel, Path(root) / name / "step-00000003"))  # type: ignore[misc]
            out.append((resumed and resumed.step, text, refused))
    return out


def test_a_checkpoint_that_is_not_whole_is_named_and_the_one_before_is_used(two: Ranks, tmp_path):
    two.run(write_two, str(tmp_path / "good"))
    last = tmp_path / "good" / "step-00000003"
    files = sorted(path.name for path in last.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "rank-00000.pt", "rank-00001.pt", "run.pt"]
    harmed = [f"cut {name}" for name in files]
    for folder_, name in zip(harmed, files, strict=True):
        shutil.copytree(tmp_path / "good", tmp_path / folder_)
        file = tmp_path / folder_ / last.name / name
        file.write_bytes(file.read_bytes()[:-10])
    for rank, answers in enumerate(two.run(resume_each, str(tmp_path), harmed)):
        for name, (step, told, refused) in zip(harmed, answers, strict=True):
            file = name.split()[1]
            assert step == 2 and f"step-00000003: {file} " in refused and "CheckpointError" in refused
            assert rank or f"step-00000003: {file} " in told


def fault(root: str) -> list[Any]:
    """A fault of each rank at each stage: every rank is told which, and what counted before still does."""
    out: list[Any] = []
    stages = [
        (dcp_shards.FileSystemWriter, "write_data"),
        *((directory, name) for name in ("begin", "write", "finish", "keep_last")),
    ]
    with parallel_for(Job("tied"), how("zero2")) as (made, parallel, _):
        one_step(made, parallel)
        parallel.checkpoint(root, keep=1)
        for where, name in stages:
            for rank in (0, 1) if name in ("write_data", "write") else (0,):
                for wait in (True, False):
                    one_step(made, parallel)
                    steps = parallel.steps
                    with pytest.MonkeyPatch.context() as patch:
                        if dist.get_rank() == rank:
                            patch.setattr(where, name, failing)
                        told = said(lambda wait=wait: parallel.checkpoint(root, keep=1, wait=wait).wait())
                    dist.barrier()
                    resumed = mdcs.resume(parallel, root)
                    out.append((name, rank, steps, told, resumed and resumed.step))
        one_step(made, parallel)
        out.append(parallel.checkpoint(root, keep=1).folder.name)
        dist.barrier()
        out.append([path.name for path in Path(root).iterdir()])
    return out


def failing(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_fault_of_any_rank_at_any_stage_leaves_the_one_before(two: Ranks, tmp_path):
    for *faults, last, left in two.run(fault, str(tmp_path)):
        assert len(faults) == 14
        for name, rank, steps, told, resumed in faults:
            assert f"RunError: checkpoint of step {steps}: rank {rank}: " in told and "No space left" in told, (name, told)
            assert resumed == (steps if name == "keep_last" else 1)
        assert left == [last]


def die(root: str, stage: str) -> str:
    """Rank 1 is gone in the middle of a checkpoint."""
    with parallel_for(Job("tied"), how("fsdp"), timeout_s=5) as (made, parallel, _):
        one_step(made, parallel)
        parallel.checkpoint(root)
        one_step(made, parallel)
        if dist.get_rank() == 1:
            where: Any = {"write_data": dcp_shards.FileSystemWriter, "encode": directory}[stage]
            setattr(where, stage, lambda *_: os._exit(9))
        return said(lambda: parallel.checkpoint(root))


@pytest.mark.parametrize("stage", ["write_data", "encode"])
def test_a_rank_that_dies_leaves_the_checkpoint_before(two: Ranks, tmp_path, stage):
    left, gone = two.outcomes(die, str(tmp_path), stage)
    assert gone.exit_code == 9 and (not left.ok or "checkpoint of step 2" in left.value), left
    assert [path.name for path in directory.complete_checkpoints(tmp_path)] == ["step-00000001"]
    assert directory.find_problem(tmp_path / "step-00000001") is None


@on_two(True, False)
def extra_is_saved_as_it_was_at_the_call(root: str, wait: bool) -> list[Any]:
    """Values that the loop changes as soon as it goes on."""
    with parallel_for(Job("tied"), how("fsdp")) as (made, parallel, optimizer):
        one_step(made, parallel)
        extra, write, goes_on = {"seen": [1], "count": torch.ones(1)}, dcp_shards.Writer.write_data, threading.Event()

        def late(*arguments: Any) -> Any:
            assert goes_on.wait(20)
            return write(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp_shards.Writer, "write_data", late)
            if wait:
                goes_on.set()
            saving = parallel.checkpoint(root, extra=extra, wait=wait)
            extra["seen"].append(2)
            extra["count"].add_(1)
            optimizer.param_groups[0]["lr"] = 7.0
            goes_on.set()
            saving.wait()
        resumed = mdcs.resume(parallel, root)
        assert resumed is not None
        later = resumed.extra["seen"], resumed.extra["count"].item(), optimizer.param_groups[0]["lr"]
        return [] if later[:2] == ([1], 1.0) and later[2] != 7.0 else [later]


@on_two()
def what_does_not_fit_is_refused_by_name(root: str) -> list[str]:
    with parallel_for(Job("tied", optimizer="adamw"), how("fsdp")) as (made, parallel, _):
        assert mdcs.resume(parallel, root) is None
        one_step(made, parallel)
        parallel.checkpoint(root)
        message = said(lambda: parallel.checkpoint(root, extra=print))
        wrong = lacking(message, "what the loop gave as extra may hold numbers, strings, containers and tensors only")
        wrong += lacking(said(lambda: parallel.checkpoint(root, keep=0)), "ValueError: keep must be >= 1, got 0")
        parallel.state_dict()  # it goes on
    with parallel_for(Job("tied"), how("fsdp")) as (_, parallel, _):
        message = said(lambda: mdcs.resume(parallel, root))
        wrong += lacking(message, "step-00000001: it was saved with other parameter groups")
    with parallel_for(Job("twice"), how("fsdp")) as (_, parallel, _):
        message = said(lambda: mdcs.resume(parallel, root))
        wrong += lacking(message, "step-00000001: it was saved from another model: it has no first.weight")
        message = said(lambda: mdcs.resume(parallel, Path(root) / "step-00000009"))
        return wrong + lacking(message, "step-00000009: it has no manifest.json: it was not finished")


@on_two()
def a_copy_that_the_budget_has_no_room_for_is_not_made(root: str) -> list[int]:
    with parallel_for(Job("tied"), how("fsdp", budget=1.0)) as (made, parallel, _):
        one_step(made, parallel)
        copied = parallel.checkpoint(root, wait=False).staged_bytes
        return [copied] * (copied != 0)


test_training_goes_on_from_checkpoints = on_two.as_test()
