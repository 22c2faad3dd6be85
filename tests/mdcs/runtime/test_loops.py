"""Habits of others' loops: each works as with DistributedDataParallel, or is refused in a sentence that says what to do.

Each is a line of docs/dev/loop-behaviours.md. Most are functions that both ranks run, and that return what is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.strategies import Uniform
from mdcs.runtime.communicator import backend_of
from tests.mdcs.runtime.ranks import ROOT, OnTwo, Ranks
from tests.mdcs.runtime.training import (
    How,
    Job,
    Setup,
    Twin,
    differing,
    measured,
    optimizer_for,
    parallel_for,
    plan_for,
    planned,
    profile_of,
    reference,
    setup,
    train,
)

STRATEGIES = ("dp", "zero2", "sdp", "fsdp", "random")
on_two = OnTwo()


def how(strategy: str, **options: Any) -> How:
    return How(strategy, "random" if strategy == "random" else "priority", seed=4, **options)


def one_step(made: Setup, parallel: mdcs.Session, number: int = 0) -> float:
    loss = made.loss(made.model, made.batch(number, 0, dist.get_rank()))
    loss.backward()
    parallel.step()
    return loss.item()


def said(function: Callable[[], object]) -> str:
    """Text of the error that a call raises; "" if it does not."""
    try:
        function()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def lacking(message: str, *parts: str) -> list[str]:
    """The message, unless all parts are in it."""
    return [] if all(part in message for part in parts) else [message]


# ---- weights outside of forward

READINGS: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": lambda model: model.state_dict(),
    "norm": lambda model: [p.detach().norm() for p in model.parameters()],
    "data": lambda model: [p.data for p in model.parameters()],
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: torch.save(list(model.parameters()), io.BytesIO()),
    "average": torch.optim.swa_utils.AveragedModel,
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "to": lambda model: model.double(),
    "numpy": lambda model: [p.untyped_storage() for p in model.parameters()],
    "load": lambda model: model.load_state_dict(setup("tied").model.state_dict()),
    "init": lambda model: [nn.init.zeros_(p) for p in model.parameters()],
}


def check_alike(parameters: list[nn.Parameter]) -> None:
    """Tensors with the shape, type and device of a parameter, and none of its values: an EMA's first sum, a mask, noise."""
    for p in parameters:
        made = [
            p.new_zeros(2, 3), p.new_ones(2), p.new_full((2,), 7.0), p.new_empty(3), p.new_tensor([1.0, 2.0]),
            torch.zeros_like(p), torch.ones_like(p), torch.full_like(p, 2.0),
            torch.empty_like(p), torch.rand_like(p), torch.randn_like(p),
            torch.zeros_like(input=p),
        ]  # fmt: skip
        assert all(type(t) is Tensor and t.dtype == p.dtype and not t.requires_grad for t in made)
        assert all(t.shape == p.shape and t.untyped_storage().nbytes() for t in made[5:])


REMEDIES = {
    "state_dict": "state = parallel.state_dict(rank0_only=True, cpu=True)",
    "load": "parallel.load_state_dict(state)",
    "init": "full_parameters(writeback=True)",
    "data": "full_parameters(writeback=True)",
    "to": "close() first",
}
"""The text that an error has in the place of ``with parallel.full_parameters(): …``."""


@on_two("dp", "zero2", "fsdp")
def a_weight_that_is_not_whole_says_so(strategy: str) -> list[str]:
    with parallel_for(Job("tied"), how(strategy)) as (made, parallel, _):
        one_step(made, parallel)
        wrong = []
        for what, read in READINGS.items():
            remedy = REMEDIES.get(what, "with parallel.full_parameters(): …")
            wrong += lacking(said(lambda: read(made.model)), f"rank {dist.get_rank()}, step 2: ", remedy)  # noqa: B023
        p = made.model.norm.weight
        wrong += lacking(said(lambda: p.new_tensor(p)), "norm.weight cannot be used here")
        assert [(p.shape, p.numel(), p.dtype, p.grad, repr(p)) for p in made.model.parameters()]
        check_alike(list(made.model.parameters()))
        one_step(made, parallel, 1)
    return wrong


@on_two()
def weights_that_every_rank_has_can_be_read_after_a_drain() -> list[str]:
    job = Job("tied", steps=2)
    with parallel_for(job, how("dp")) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        parallel.drain()
        return differing(made.model.state_dict(), reference(job).state)


@on_two()
def weights_that_were_moved_are_not_trained_in_silence() -> list[str]:
    with parallel_for(Job("tied"), how("dp")) as (made, parallel, _):
        one_step(made, parallel)
        parallel.drain()
        made.model.norm.weight.data = made.model.norm.weight.detach().clone()
        return lacking(said(lambda: one_step(made, parallel, 1)), "norm.weight was given other memory")


# ---- weights on purpose


@on_two(("dp", {"cpu": True}), ("sdp", {}), ("fsdp", {"rank0_only": True}), ("fsdp", {"cpu": True}))
def whole_parameters_are_lent(strategy: str, options: dict[str, bool]) -> list[str]:
    job = Job("tied", steps=3)
    halfway, wanted = reference(dataclasses.replace(job, steps=2)).state, reference(job).state
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer, 2)
        with parallel.full_parameters(**options):
            if options.get("rank0_only") and dist.get_rank():
                wrong = lacking(said(lambda: copy.deepcopy(made.model)), "cannot be used here")
            else:
                wrong = differing(copy.deepcopy(made.model).state_dict(), halfway)
                for p in made.model.parameters():
                    p.data.zero_()
        one_step(made, parallel, 2)
        return wrong + differing(parallel.state_dict(), wanted)


@on_two(("dp", True), ("zero2", False), ("fsdp", False), ("fsdp", True))
def what_rank_zero_changes_is_written_back(strategy: str, rank0_only: bool) -> list[str]:
    job = Job("tied", optimizer="plain sgd", steps=2)
    target = {n: torch.full_like(v, 0.01) for n, v in setup("tied").model.state_dict().items()}
    with parallel_for(job, how(strategy)) as (made, parallel, _):
        one_step(made, parallel)
        with parallel.full_parameters(writeback=True, rank0_only=rank0_only):
            if dist.get_rank() == 0:
                made.model.load_state_dict(target)
        return differing(parallel.state_dict(), target)


@on_two("dp", "random")
def a_state_dict_for_rank_zero(strategy: str) -> list[str]:
    job = Job("tied", steps=2)
    wanted = reference(job).state
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        state = parallel.state_dict(rank0_only=True, cpu=True)
    return list(state) if dist.get_rank() else differing(state, wanted)


@on_two(How("dp", "wfbp"), How("zero2", "dear"), How("fsdp", "priority"), How("fsdp", "sequential", budget=1.0))
def a_moving_average_on_shards(way: How) -> list[Any]:
    """An average that is the optimizer's state is evaluated, lent and saved as the one that a loop with DDP keeps."""
    job, found = Job("tied", optimizer="averaged", steps=4), list[Any]()
    plain = setup("tied")
    twin = Twin(plain.model, optimizer_for("adam", plain.model))
    wanted, batch = copy.deepcopy(plain.model), plain.batch(9, 0, dist.get_rank())
    with parallel_for(job, way) as (made, parallel, optimizer):
        for step in range(job.steps):
            one_step(made, parallel, step)
            twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
            for mine, weights in zip(wanted.parameters(), plain.model.parameters(), strict=True):
                mine.data.lerp_(weights.detach(), 1 - 0.9)
            if step % 2:
                with parallel.evaluate(weights="average"):
                    found += [made.loss(made.model, batch).item() - made.loss(wanted, batch).item()]
                with contextlib.suppress(Broken), parallel.evaluate(weights="average"):
                    raise Broken
                with parallel.full_parameters(weights="average"):
                    found += differing(made.model.state_dict(), wanted.state_dict())
        found += [said(lambda: parallel.evaluate(weights="averages").__enter__()).partition(":")[0] != "ValueError"]
        found += twin.differing(parallel.state_dict())
        whole = 3 * 4 * sum(p.numel() for p in optimizer.param_groups[0]["params"])
        share = parallel.memory()["predicted"]["optimizer"] / whole
        found += [share] if way.strategy in ("fsdp", "sdp", "zero2") and not 0.5 <= share < 0.6 else []
    averages = {p: optimizer.state[p]["average"] for p in optimizer.param_groups[0]["params"]}
    trained = [(p, w) for p, w in zip(made.model.parameters(), wanted.parameters(), strict=True) if p.requires_grad]
    return [item for item in found if item] + [p.shape for p, w in trained if not torch.equal(averages[p], w)]


@on_two("dp", "fsdp")
def the_units_of_one_parameter_are_opened(strategy: str) -> list[str]:
    with parallel_for(Job("tied"), how(strategy)) as (made, parallel, _):
        with parallel.full_parameters("norm.weight", writeback=True), torch.no_grad():
            others = said(lambda: made.model.blocks[0][0].weight.norm())
            made.model.norm.weight.fill_(0.5)
        found = [] if strategy == "dp" else lacking(others, "cannot be used here")
        found += [] if parallel.state_dict()["norm.weight"].tolist() == [0.5] * 6 else ["lost"]
        return found + lacking(said(lambda: parallel.full_parameters("norm.wieght")), "ValueError", "'norm.weight' is")


# ---- after close()


@on_two(
    ("fsdp", "zero2", "adam"), ("sdp", "dp", "sgd"), ("random", "fsdp", "adamw"), ("zero2", "random", "adam"),
    ("dp", "sdp", "adam"), ("fsdp", "fsdp", "plain sgd"),
)  # fmt: skip
def after_close_the_model_is_plain_and_whole(first: str, second: str, optimizer_name: str) -> list[str]:
    """Two steps with a plan, two in a plain loop (with DDP), two with another plan: as six of DDP."""
    job = Job("tied", optimizer=optimizer_name, steps=6)
    made = setup("tied")
    wanted = reference(job).state
    optimizer = optimizer_for(job.optimizer, made.model)
    schedule = job.scheduler(optimizer)
    units = mdcs.partition(made.model, made.policy)
    profile = profile_of(job, How(), made, units, optimizer)

    def with_plan(strategy: str, steps: range) -> None:
        parallel = mdcs.parallelize(made.model, optimizer, plan_for(job, how(strategy), profile), units, timeout_s=20)
        for step in steps:
            one_step(made, parallel, step)
            schedule.step()
        parallel.close()
        parallel.close()

    with_plan(first, range(2))
    parameters = list(made.model.parameters())
    assert {type(p) for p in parameters} == {nn.Parameter}
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
    twin = Twin(made.model, optimizer)
    for step in (2, 3):
        twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
        schedule.step()
    del twin
    with_plan(second, range(4, 6))
    return differing(made.model.state_dict(), wanted)


def close_alone() -> str:
    """Rank 1 leaves with an error; rank 0 closes, and must not wait for it."""
    with parallel_for(Job("tied"), how("fsdp"), timeout_s=5) as (made, parallel, _):
        one_step(made, parallel)
        if dist.get_rank() == 1:
            raise ArithmeticError("overflow")
        parallel.close()
        return said(lambda: made.model.state_dict())


def test_close_does_not_wait_for_a_rank_that_is_gone(two: Ranks):
    first, second = two.outcomes(close_alone, timeout_s=40)  # less than its process group waits
    assert second.kind == "ArithmeticError"
    assert "weight is in pieces, parallel is closed and could not gather it" in first.value
    two.stop()


@on_two("dp", "fsdp")
def frozen_layers_are_unfrozen_between_runs(strategy: str) -> list[str]:
    made, plain = setup("tied"), setup("tied")
    for round_ in range(2):
        for model in (made.model, plain.model):
            if round_:
                model.blocks[1][0].weight.requires_grad_(True)
        twin, ours = Twin(plain.model, optimizer_for("plain sgd", plain.model)), optimizer_for("plain sgd", made.model)
        first = made.batch(0, 0, 0)
        with planned(made.model, ours, lambda: made.loss(made.model, first), strategy, made.policy) as parallel:  # noqa: B023
            for step in range(2):
                one_step(made, parallel, step)
                twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
    return twin.differing(made.model.state_dict())


# ---- the optimizer's side


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


UNTRAINED = {
    "optimizer.param_groups[0]['params'].append(nn.Parameter(torch.ones(2, 2)))": (
        "parameter 4 of the optimizer, of shape (2, 2): is in the optimizer and in no unit"
    ),
    "model.extra = nn.Linear(2, 2)": "extra.weight: is in no unit",
    "model.head.bias.data = model.body.bias.data[2:]": (
        "head.bias: is another parameter than body.bias and shares a part of its memory"
    ),
    "model.register_buffer('index', torch.eye(3).to_sparse())": "index: torch.sparse_coo buffers are not supported",
    "optimizer.register_step_post_hook(print)": "SGD has hooks on step()",
    "model.body.weight.register_post_accumulate_grad_hook(print)": "body.weight: has a hook for its accumulated gradient",
    "start()": "body.weight: is parallelized already: close() that first",
}
"""Deeds of the loop before it starts a run, and the error; the last one leaves a run behind."""


def start_untrained() -> list[str]:
    wrong = []
    for change, message in UNTRAINED.items():
        model = Headed()
        units, optimizer = mdcs.partition(model, mdcs.ByLeaf()), torch.optim.SGD(model.parameters(), lr=0.1)
        profile = measured(model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer)  # noqa: B023
        plan = mdcs.make_plan(profile, Uniform("zero2"), SCHEDULERS["wfbp"]())
        start = partial(mdcs.parallelize, model, optimizer, plan, units, timeout_s=5)
        exec(change, {"model": model, "optimizer": optimizer, "start": start, "nn": nn, "torch": torch})
        wrong += lacking(said(start), message)
    return wrong


def test_what_would_not_be_trained_is_named_before_step_1(two: Ranks):
    assert two.run(start_untrained) == [[], []]
    two.stop()


@on_two(("dp", False), ("dp", True), ("fsdp", False), ("fsdp", True))
def a_view_of_a_weight_that_the_model_keeps_is_named_in_step_1(strategy: str, anew: bool) -> list[str]:
    """A view of a weight, since it was profiled; or in every forward ``anew``, which is another's affair."""
    job = Job("tied", steps=1)
    with parallel_for(job, how(strategy)) as (made, parallel, _):
        one_step(made, parallel)
    made.model.kept = [made.model.norm.weight.detach()]
    if anew:
        made.model.register_forward_pre_hook(lambda model, args: setattr(model, "kept", None))
    with parallel_for(job, how(strategy), made) as (_, parallel, _):
        message = said(lambda: one_step(made, parallel))
    return [message] * (message != "") if anew else lacking(message, "step 1: kept: shares memory with", "norm.weight")


@on_two("zero2", "random")
def a_rate_in_a_tensor(strategy: str) -> list[str]:
    """A rate in a tensor that a schedule changes in place: late updates must have the former one."""
    job, (wanted, made) = Job("tied", optimizer="plain sgd"), (setup("tied"), setup("tied"))
    theirs, ours = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=torch.tensor(0.1), foreach=False)
        for m in (wanted.model, made.model)
    )
    twin = Twin(wanted.model, theirs)
    with parallel_for(job, How(strategy, "dear"), made, ours) as (_, parallel, _):
        for step in range(4):
            one_step(made, parallel, step)
            twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"].mul_(0.1)
        return twin.differing(parallel.state_dict())


# ---- evaluation


@on_two("dp", "random")
def inference_mode_around_evaluate(strategy: str) -> list[str]:
    job = Job("tied", steps=4)
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        for step in range(job.steps):
            one_step(made, parallel, step)
            schedule.step()
            with torch.inference_mode():
                with parallel.evaluate():
                    made.loss(made.model, made.batch(9, 0, 0))
                parallel.drain()
                parallel.state_dict()
        return differing(parallel.state_dict(), reference(job).state)


@on_two(("dp", None), ("fsdp", 1.0))
def an_evaluation_has_no_gradients(strategy: str, budget: float | None) -> list[Any]:
    job = Job("tied", steps=2)
    with parallel_for(job, how(strategy, budget=budget)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        for step in range(job.steps):
            with parallel.evaluate():
                assert not made.loss(made.model, made.batch(9, 0, 0)).requires_grad
            one_step(made, parallel, step)  # with gradients again
            schedule.step()
        return differing(parallel.state_dict(), reference(job).state)


@on_two(("dp", None), ("fsdp", None), ("fsdp", 1.0), ("random", 1.1))
def ranks_with_unequal_numbers_of_batches(strategy: str, budget: float | None) -> list[Any]:
    job = Job("tied", steps=2)
    rank = dist.get_rank()
    with parallel_for(job, how(strategy, budget=budget)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        alone = setup("tied").model
        alone.load_state_dict(reference(job).state)
        gathers: list[int] = []
        gather = parallel._engine.wire.messages.unshard_flat
        parallel._engine.wire.messages.unshard_flat = lambda u, flat: (gathers.append(u), gather(u, flat))[1]  # type: ignore[method-assign]
        batches = [made.batch(50 + i, 0, rank) for i in range(2 + 3 * rank)]
        with torch.no_grad():
            wanted = [made.loss(alone, b).item() for b in batches]
            with parallel.evaluate():
                losses = [made.loss(made.model, b).item() for b in batches]
        parallel._engine.wire.messages.unshard_flat = gather  # type: ignore[method-assign]
        one_step(made, parallel, 2)
        state = parallel.state_dict()
    most = max(map(gathers.count, gathers), default=0)
    found = [most] * (most > (1 if budget is None else 10)) + [losses] * (losses != wanted)  # a tied unit is used twice
    return found + differing(state, reference(dataclasses.replace(job, steps=3)).state)


# ---- exceptions that the loop catches


class Broken(Exception):
    pass


def _break(*_: object) -> None:
    raise Broken


PLACES = (1, "norm", "norm"), (1, "blocks.0", "norm"), (2, "norm", "blocks.1")


@on_two(*((strategy, *PLACES[i % 3]) for i, strategy in enumerate(STRATEGIES)))
def an_iteration_that_raised_is_given_up(strategy: str, micro_steps: int, *places: str) -> list[Any]:
    """Batches that fail on all ranks, each where it says, are left out; the others train as ever."""
    job = Job("tied", micro_steps, steps=4)
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        losses = []
        for step in range(job.steps):
            if step in (0, 2):
                if micro_steps > 1:
                    made.loss(made.model, made.batch(77, 0, 0)).backward()
                handle = made.model.get_submodule(places[dist.get_rank()]).register_forward_hook(_break)
                with contextlib.suppress(Broken):
                    made.loss(made.model, made.batch(78, 1, 0)).backward()
                handle.remove()
                if step == 0 and micro_steps == 1:
                    made.loss(made.model, made.batch(0, 0, 0))  # one more forward pass is no harm
                parallel.abandon()
            for micro in range(micro_steps):
                loss = made.loss(made.model, made.batch(step, micro, dist.get_rank())) / micro_steps
                loss.backward()
                losses.append(loss.item())
            parallel.step()
            schedule.step()
        wanted, records = reference(job), len(parallel.records(flush=True))
        wrong = [losses] * (losses != list(wanted.losses)) + [records] * (records != job.steps)
        return wrong + differing(parallel.state_dict(), wanted.state)


@on_two(False, True)
def a_backward_pass_that_raised(cross_iteration: bool) -> list[str]:
    """It can be given up as long as no update has begun, which a barrier between backward and updates sees to."""
    job = Job("tied", steps=3)
    with parallel_for(job, how("random", cross_iteration=cross_iteration)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        for step in range(job.steps):
            if step == 1:
                handle = made.model.embedding.weight.register_hook(_break)  # the last gradient of all
                with pytest.raises(Broken):
                    made.loss(made.model, made.batch(77, 0, 0)).backward()
                handle.remove()
                refusal = said(parallel.abandon)
                if cross_iteration:
                    return lacking(refusal, "updates of step 2 have begun", "start again from a checkpoint")
            one_step(made, parallel, step)
            schedule.step()
        return differing(parallel.state_dict(), reference(job).state)


# ---- fewer micro-steps than planned


@on_two(*((strategy, i % 2 == 1) for i, strategy in enumerate(STRATEGIES)))
def the_last_accumulation_may_be_short(strategy: str, cross: bool) -> list[str]:
    job, made, plain = Job("tied", 3), setup("tied"), setup("tied")
    twin = Twin(plain.model, optimizer_for(job.optimizer, plain.model))
    with parallel_for(job, how(strategy, cross_iteration=cross), made) as (_, parallel, _):
        for step, count in enumerate((3, 1, 3, 2, 3)):
            batches = [made.batch(step, micro, dist.get_rank()) for micro in range(count)]
            for batch in batches:
                made.loss(made.model, batch).backward()
            parallel.step()
            twin.step(*(lambda model, batch=batch: made.loss(model, batch) for batch in batches))  # type: ignore[misc]
        return twin.differing(parallel.state_dict())


# ---- models


class Codebook(nn.Module):
    """Forward reads a buffer that it changes, as vector quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("codes", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.codes.lerp_(hidden.detach().mean(0), 0.5)
        out: Tensor = hidden * self.mask - self.codes
        return out


class Lazy(nn.Module):
    """Makes a buffer in its first forward, of this rank's input; has another that is expanded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.register_buffer("scale", torch.ones(4))  # without any, DDP leaves those that come later to each rank
        if kind == "expanded":
            self.register_buffer("mean", torch.arange(4.0).expand(3, 4))
        elif kind == "none":
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", x.detach().mean(0))
        elif self.kind == "later" and self.linear.weight[0, 0] != self.first:
            self.register_buffer("second", x.detach().mean(0))
        self.first = float(self.linear.weight[0, 0])
        out: Tensor = self.linear(x) * self.scale - self.mean
        return out


def with_buffers(kind: str, strategy: str, option: bool | None) -> Any:
    """Names of what differs from DDP after four steps, or the error of a step."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Codebook() if kind == "codes" else Lazy(kind))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return model(torch.randn(3, 4, generator=generator)).square().mean()

    (mine, ours), (plain, theirs) = build(), build()
    for name, buffer in plain[1].named_buffers():  # type: ignore[index]
        setattr(plain[1], name, buffer.contiguous())  # type: ignore[index]  # DDP cannot broadcast one that is expanded
    twin = Twin(plain, theirs, broadcast_buffers=option is not False)
    policy = mdcs.ByClass(("Lazy", "Codebook"))
    with planned(mine, ours, lambda: loss(mine, 9), strategy, policy, broadcast_buffers=option) as parallel:
        for step in range(4):
            loss(mine, step).backward()
            if message := said(parallel.step):
                return message
            twin.step(lambda model: loss(model, step))  # noqa: B023
        state = parallel.state_dict()
        parallel.load_state_dict(state)
    # DDP gives rank 0's at the beginning of the next forward.
    return [n for n in twin.differing(state) if n != "1.codes" or dist.get_rank() == 0 or not option]


@on_two(("codes", "zero2", True), ("codes", "zero2", False))
def buffers_that_forward_reads_are_ddps(*case: Any) -> Any:
    return with_buffers(*case)


@on_two(("lazy", "fsdp", None), ("lazy", "dp", True), ("none", "zero2", None), ("expanded", "fsdp", None))
def buffers_that_the_first_forward_makes_are_ddps(*case: Any) -> Any:
    return with_buffers(*case)


@on_two()
def a_buffer_that_a_later_forward_makes_is_refused_by_name() -> list[str]:
    return lacking(with_buffers("later", "dp", None), "step 2: buffer 1.second changes in forward", "broadcast_buffers=True")


@on_two()
def buffers_that_differ_are_not_left_to_differ() -> list[str]:
    return lacking(with_buffers("codes", "zero2", None), "buffer 1.codes changes in forward", "broadcast_buffers=True")


@on_two("dp", "fsdp", "random")
def idioms(strategy: str) -> list[str]:
    """Other things that a loop may do: named parameters, hooks on gradients, train and eval, zero_grad, progress in metadata."""
    job = Job("tied", steps=3)
    wanted = reference(job).state
    made = setup("tied")
    optimizer = torch.optim.Adam([(n, p) for n, p in made.model.named_parameters() if p.requires_grad], lr=1e-2)
    schedule = job.scheduler(optimizer)
    seen: list[float] = []
    with parallel_for(job, how(strategy), made, optimizer) as (_, parallel, _):
        made.model.norm.weight.register_hook(lambda g: seen.append(g.norm().item()))
        for step in range(job.steps):
            made.model.train()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            one_step(made, parallel, step)
            schedule.step()
            made.model.zero_grad()
            made.model.eval()
            assert sum(p.numel() for p in made.model.parameters() if p.requires_grad) > 0
            assert all(p.grad is None for p in made.model.parameters())
        state = parallel.state_dict()
    assert len(seen) == job.steps
    return differing(state, wanted)


@on_two(("dp", False), ("fsdp", False), ("fsdp", True))
def copies_are_plain_models(strategy: str, pickled: bool) -> list[str]:
    """A copy made while a plan runs is a model of its own: its forward drives no plan."""
    job = Job("tied", steps=2)
    wanted = reference(job).state
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        one_step(made, parallel, 0)
        schedule.step()
        with parallel.full_parameters():
            torch.save(made.model, file := io.BytesIO())
            twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False) if pickled else copy.deepcopy(made.model)
        assert all(vars(m).keys() == vars(t).keys() for m, t in zip(setup("tied").model.modules(), twin.modules(), strict=True))
        made.loss(twin, made.batch(5, 0, 0)).backward()
        with torch.no_grad():
            made.loss(twin, made.batch(5, 0, 0))
        one_step(made, parallel, 1)
        assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)
        return differing(parallel.state_dict(), wanted)


ELSEWHERE = """
import sys, torch
sys.modules["mdcs"] = None  # cannot be imported
model = torch.load(sys.argv[1], weights_only=False)
model(torch.ones(2, 4)).sum().backward()
print(sorted(name for name, p in model.named_parameters() if p.grad is not None))
"""


def saved_whole(strategy: str, path: str, when: str) -> None:
    """``torch.save(model)``, as many examples end, with a hook of the loop's own on it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[1].register_forward_hook(contextlib.nullcontext().__exit__)  # it can be pickled, and does nothing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with planned(model, optimizer, lambda: model(torch.ones(1, 4)).sum(), strategy) as parallel:
        model(torch.ones(1, 4)).sum().backward()
        parallel.step()
        with parallel.full_parameters() if when == "lent" else contextlib.nullcontext(parallel.drain()):
            if dist.get_rank() == 0:
                torch.save(model, path)
            twin = copy.deepcopy(model)
    twin(torch.ones(1, 4))


@pytest.mark.parametrize(("strategy", "when"), [("fsdp", "lent"), ("dp", "drained")])
def test_a_model_that_is_saved_whole_is_loaded_where_this_package_is_not(two: Ranks, tmp_path, strategy, when):
    path = str(tmp_path / "model.pt")
    two.run(saved_whole, strategy, path, when)
    program = tmp_path / "elsewhere.py"
    program.write_text(ELSEWHERE)
    done = subprocess.run(
        [sys.executable, str(program), path], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert "0.weight" in done.stdout and "2.bias" in done.stdout


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
def test_the_backend_is_that_of_the_models_device(tmp_path, backend):
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert backend_of(None, torch.device("cpu")) == "gloo"
        assert backend_of(dist.new_group([0]), torch.device("cpu")) == "gloo"
    finally:
        dist.destroy_process_group()


@on_two(pytest.param("dp", "blocks", marks=pytest.mark.slow), ("fsdp", "blocks"), ("fsdp", "model"))
def compiled_blocks_and_models(strategy: str, what: str) -> list[str]:
    job, made, plain = Job("tied", optimizer="plain sgd"), setup("tied"), setup("tied")
    for model in (made.model, plain.model):
        for module in (model.blocks if what == "blocks" else [model]):
            module.compile(backend="eager")
    twin = Twin(plain.model, optimizer_for(job.optimizer, plain.model))
    with parallel_for(job, how(strategy), made) as (_, parallel, _):
        for step in range(2):
            one_step(made, parallel, step)
            twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
        with parallel.evaluate(), torch.no_grad():
            made.loss(made.model, made.batch(0, 0, 0))
        return twin.differing(parallel.state_dict())


@on_two()
def an_example_batch_of_a_loader() -> list[Any]:
    """Taken apart from the loop's random numbers it leaves shuffling and dropout as they are with DDP; else they are others."""
    found = []
    for how in ("ddp", "apart", "drawn"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
        trained: nn.Module = model
        context: Any = contextlib.nullcontext(optimizer)
        if how == "ddp":
            trained = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())
        else:
            with torch.random.fork_rng() if how == "apart" else contextlib.nullcontext():
                example = next(iter(loader))
            context = planned(model, optimizer, lambda: model(example).square().mean(), "random")  # noqa: B023
        losses = []
        with context as runs:
            for batch in loader:
                optimizer.zero_grad()
                loss = trained(batch).square().mean()
                loss.backward()
                runs.step()
                losses.append(loss.item())
        found.append(losses)
    ddp, apart, drawn = found
    return [apart] * (apart != ddp) + [drawn] * (drawn == ddp)


test_loops_train_as_with_ddp_or_say_why_not = on_two.as_test()
