"""Habits of others' loops: each works as with DistributedDataParallel, or is refused in a sentence that says what to do.

One test per line of docs/dev/loop-behaviours.md.
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
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.planner.registry import SCHEDULERS
from mdcs.planner.strategies import Uniform
from mdcs.profiler.model_profile import measure_profile
from mdcs.runtime.communicator import backend_of
from tests.mdcs.runtime.ranks import ROOT, Ranks
from tests.mdcs.runtime.training import (
    How,
    Job,
    Setup,
    differing,
    optimizer_for,
    parallel_for,
    plan_for,
    profile_of,
    reference,
    setup,
    train,
)

SHARDED = ("zero2", "sdp", "fsdp")
STRATEGIES = ("dp", *SHARDED, "random")


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


def read_everywhere(strategy: str) -> dict[str, str]:
    with parallel_for(Job("tied"), how(strategy)) as (made, parallel, _):
        one_step(made, parallel)
        found = {what: said(lambda read=read: read(made.model)) for what, read in READINGS.items()}  # type: ignore[misc]
        found["metadata"] = said(lambda: [(p.shape, p.numel(), p.dtype, p.grad, repr(p)) for p in made.model.parameters()])
        found["alike"] = said(lambda: check_alike(list(made.model.parameters())))
        p = made.model.norm.weight
        found["new_tensor of a value"] = said(lambda: p.new_tensor(p))
        one_step(made, parallel, 1)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_that_is_not_whole_says_so(two: Ranks, strategy):
    for rank, found in enumerate(two.run(read_everywhere, strategy)):
        assert found.pop("metadata") == found.pop("alike") == ""
        for what, message in found.items():
            assert f"rank {rank}, step 2: " in message, (what, message)
            if what == "state_dict":
                assert "on every rank, not on rank 0 alone: state = parallel.state_dict(rank0_only=True, cpu=True)" in message
            else:
                assert "weight cannot be used here" in message, (what, message)
                assert ("with parallel.full_parameters(): …" in message) == (what not in ("load", "init")), (what, message)
                assert ("full_parameters(writeback=True)" in message) == (what in ("load", "init", "data")), (what, message)
                assert ("or parallel.load_state_dict(state)" in message) == (what == "load"), (what, message)
                assert ("To move or convert the model, close() first" in message) == (what == "to"), (what, message)


def read_after_drain(strategy: str) -> list[str]:
    job = Job("tied", steps=2)
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        parallel.drain()
        return differing(made.model.state_dict(), reference(job).state)


def test_weights_that_every_rank_has_can_be_read_after_a_drain(two: Ranks):
    assert two.run(read_after_drain, "dp") == [[], []]


def move_after_drain() -> str:
    with parallel_for(Job("tied"), how("dp")) as (made, parallel, _):
        one_step(made, parallel)
        parallel.drain()
        made.model.norm.weight.data = made.model.norm.weight.detach().clone()
        return said(lambda: one_step(made, parallel, 1))


def test_weights_that_were_moved_are_not_trained_in_silence(two: Ranks):
    for message in two.run(move_after_drain):
        assert "norm.weight was given other memory" in message


# ---- weights on purpose


def look(strategy: str, options: dict[str, bool]) -> dict[str, Any]:
    job = Job("tied", steps=3)
    halfway, wanted = reference(dataclasses.replace(job, steps=2)).state, reference(job).state
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer, 2)
        with parallel.full_parameters(**options):
            seen = said(lambda: copy.deepcopy(made.model)) or differing(copy.deepcopy(made.model).state_dict(), halfway)
            if not seen:
                for p in made.model.parameters():
                    p.data.zero_()
        one_step(made, parallel, 2)
        state = parallel.state_dict()
    return {"seen": seen, "kept": differing(state, wanted)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [{}, {"rank0_only": True}, {"cpu": True}], ids=str)
def test_whole_parameters_are_lent(two: Ranks, strategy, options):
    first, second = two.run(look, strategy, options)
    assert first == {"seen": [], "kept": []}
    assert second["kept"] == []
    assert ("cannot be used here" in second["seen"]) if options.get("rank0_only") else second["seen"] == []


def change(strategy: str, rank0_only: bool) -> list[str]:
    job = Job("tied", optimizer="plain sgd", steps=2)
    target = {n: torch.full_like(v, 0.01) for n, v in setup("tied").model.state_dict().items()}
    with parallel_for(job, how(strategy)) as (made, parallel, _):
        one_step(made, parallel)
        with parallel.full_parameters(writeback=True, rank0_only=rank0_only):
            if dist.get_rank() == 0:
                made.model.load_state_dict(target)
        return differing(parallel.state_dict(), target)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_what_rank_zero_changes_is_written_back(two: Ranks, strategy, rank0_only):
    assert two.run(change, strategy, rank0_only) == [[], []]


def save_on_rank_zero(strategy: str) -> tuple[int, list[str]]:
    job = Job("tied", steps=2)
    wanted = reference(job).state
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        state = parallel.state_dict(rank0_only=True, cpu=True)
    return len(state), differing(state, wanted) if state else []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_dict_for_rank_zero(two: Ranks, strategy):
    (size, changed), empty = two.run(save_on_rank_zero, strategy)
    assert size > 0 and changed == [] and empty == (0, [])


def average(strategy: str) -> list[str]:
    """An exponential moving average, as fine-tuning loops keep."""
    job = Job("tied", steps=3)
    alone = setup("tied").model
    wanted, mine = (copy.deepcopy(alone) for _ in range(2))
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        for step in range(job.steps):
            one_step(made, parallel, step)
            schedule.step()
            alone.load_state_dict(reference(dataclasses.replace(job, steps=step + 1)).state)
            with parallel.full_parameters():
                for average, model in ((wanted, alone), (mine, made.model)):
                    for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                        ours.data.lerp_(theirs.detach(), 0.1)
    return differing(mine.state_dict(), wanted.state_dict())


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_moving_average(two: Ranks, strategy):
    assert two.run(average, strategy) == [[], []]


AVERAGED = [
    How("dp", "wfbp"), How("zero2", "dear"), How("sdp", "priority"), How("fsdp", "priority"),
    How("fsdp", "sequential", budget=1.0), How("random", "random", seed=4),
]  # fmt: skip


def averaged_on_shards(way: How) -> list[Any]:
    """An average that is the optimizer's state is evaluated, lent and saved as the one that a loop with DDP keeps."""
    job, found = Job("tied", optimizer="averaged", steps=4), list[Any]()
    plain = setup("tied")
    ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
    wanted, theirs, batch = copy.deepcopy(plain.model), optimizer_for("adam", plain.model), plain.batch(9, 0, dist.get_rank())
    with parallel_for(job, way) as (made, parallel, optimizer):
        for step in range(job.steps):
            one_step(made, parallel, step)
            made.loss(ddp, made.batch(step, 0, dist.get_rank())).backward()
            theirs.step()
            theirs.zero_grad()
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
        found += differing(parallel.state_dict(), plain.model.state_dict())
        tensors = {"optimizer": 3 * sum(p.numel() for p in optimizer.param_groups[0]["params"]) * 4}
        share = parallel.memory()["predicted"]["optimizer"] / tensors["optimizer"]
        found += [share] if way.strategy in ("fsdp", "sdp", "zero2") and not 0.5 <= share < 0.6 else []
    averages = {p: optimizer.state[p]["average"] for p in optimizer.param_groups[0]["params"]}
    trained = [(p, w) for p, w in zip(made.model.parameters(), wanted.parameters(), strict=True) if p.requires_grad]
    return [item for item in found if item] + [p.shape for p, w in trained if not torch.equal(averages[p], w)]


def all_averaged() -> list[Any]:
    return [(way, found) for way in AVERAGED if (found := averaged_on_shards(way))]


def test_a_moving_average_on_shards(two: Ranks):
    assert two.run(all_averaged, timeout_s=120) == [[], []]


def open_one(strategy: str) -> list[str]:
    found = []
    with parallel_for(Job("tied"), how(strategy)) as (made, parallel, _):
        with parallel.full_parameters("norm.weight", writeback=True), torch.no_grad():
            open_units = [s.name for s in parallel._engine.storages if type(s.parameters[0]) is nn.Parameter]
            made.model.norm.weight.fill_(0.5)
        found += [] if strategy == "dp" or len(open_units) == 1 else open_units
        found += [] if parallel.state_dict()["norm.weight"].tolist() == [0.5] * 6 else ["lost"]
        message = said(lambda: parallel.full_parameters("norm.wieght"))
        return found + ([] if message.startswith("ValueError") and "'norm.weight' is" in message else [message])


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_the_units_of_one_parameter_are_opened(two: Ranks, strategy):
    assert two.run(open_one, strategy) == [[], []]


# ---- after close()


def close_and_train_on(first: str, second: str, optimizer_name: str) -> dict[str, Any]:
    """Two steps with a plan, two in a plain loop (with DDP), two with another plan: as six of DDP."""
    job = Job("tied", optimizer=optimizer_name, steps=6)
    made = setup("tied")
    wanted = reference(job).state
    optimizer = optimizer_for(job.optimizer, made.model)
    schedule = job.scheduler(optimizer)
    units = mdcs.partition(made.model, made.policy)
    profile = profile_of(job, How(), made, units, optimizer)
    rank = dist.get_rank()

    def planned(strategy: str, steps: range) -> None:
        parallel = mdcs.parallelize(made.model, optimizer, plan_for(job, how(strategy), profile), units, timeout_s=20)
        for step in steps:
            one_step(made, parallel, step)
            schedule.step()
        parallel.close()
        parallel.close()

    planned(first, range(2))
    plain = {type(p) for p in made.model.parameters()} == {nn.Parameter}
    own = len({p.untyped_storage().data_ptr() for p in made.model.parameters()}) == len(list(made.model.parameters()))
    group = dist.new_group()
    ddp = nn.parallel.DistributedDataParallel(made.model, process_group=group)
    for step in (2, 3):
        made.loss(ddp, made.batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    del ddp
    planned(second, range(4, 6))
    return {"plain": plain, "own": own, "weights": differing(made.model.state_dict(), wanted)}


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [
        ("fsdp", "zero2", "adam"), ("sdp", "dp", "sgd"), ("random", "fsdp", "adamw"), ("zero2", "random", "adam"),
        ("dp", "sdp", "adam"), ("fsdp", "fsdp", "plain sgd"), ("zero2", "sdp", "sgd"),
    ],
)  # fmt: skip
def test_after_close_model_and_optimizer_are_plain_and_whole(two: Ranks, first, second, optimizer):
    assert two.run(close_and_train_on, first, second, optimizer) == [{"plain": True, "own": True, "weights": []}] * 2


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


def thaw(strategy: str) -> str:
    with parallel_for(Job("tied"), how(strategy)) as (made, parallel, _):
        one_step(made, parallel)

        def unfreeze_and_train() -> None:
            made.model.norm.requires_grad_(False) if strategy == "zero2" else made.model.blocks[1].requires_grad_(True)
            one_step(made, parallel, 1)

        return said(unfreeze_and_train)


@pytest.mark.parametrize("strategy", ["dp", "zero2", "fsdp"])
def test_what_is_trained_is_fixed_in_a_run(two: Ranks, strategy):
    for message in two.run(thaw, strategy):
        assert "weight: requires_grad changed while a plan runs" in message


def unfreeze(strategy: str) -> list[str]:
    """Frozen layers are trained in a second run, as fine-tuning loops do."""
    job = Job("tied", optimizer="plain sgd", steps=2)
    made, twin = setup("tied"), setup("tied")
    group = dist.new_group()
    for round_ in range(2):
        for model in (made.model, twin.model):
            if round_:
                model.blocks[1][0].weight.requires_grad_(True)
        ddp = nn.parallel.DistributedDataParallel(twin.model, process_group=group)
        theirs, ours = (optimizer_for(job.optimizer, m.model) for m in (twin, made))
        units = mdcs.partition(made.model, made.policy)
        profile = measure_profile(
            made.model, units, lambda: made.loss(made.model, made.batch(0, 0, 0)), ours, world=2,
            link=mdcs.Link.uniform(1.0, 50.0), iterations=1,
        )  # fmt: skip
        with mdcs.parallelize(made.model, ours, plan_for(job, how(strategy), _agreed(profile)), units, timeout_s=20) as parallel:
            for step in range(2):
                one_step(made, parallel, step)
                made.loss(ddp, made.batch(step, 0, dist.get_rank())).backward()
                theirs.step()
                theirs.zero_grad()
        del ddp
    return differing(made.model.state_dict(), twin.model.state_dict())


def _agreed(profile: mdcs.Profile) -> mdcs.Profile:
    from mdcs.profiler.consensus import merge_profiles

    return merge_profiles(profile)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_frozen_layers_are_unfrozen_between_runs(two: Ranks, strategy):
    assert two.run(unfreeze, strategy) == [[], []]


# ---- the optimizer's side


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def untrained(what: str) -> str:
    model, head = Headed(), nn.Linear(2, 2)
    units = mdcs.partition(model, mdcs.ByLeaf())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = _agreed(
        measure_profile(
            model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer, world=2, link=mdcs.Link.uniform(1.0, 50.0)
        )
    )
    plan = mdcs.make_plan(profile, Uniform("zero2"), SCHEDULERS["wfbp"]())
    if what == "a head of its own":
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    elif what == "added later":
        model.extra = nn.Linear(2, 2)
    elif what == "tied since":
        model.head.bias.data = model.body.bias.data[2:]
    elif what == "a sparse buffer":
        model.register_buffer("index", torch.eye(3).to_sparse())
    elif what == "a hook on step":
        optimizer.register_step_post_hook(lambda *_: None)
    elif what == "a hook for gradients":
        model.body.weight.register_post_accumulate_grad_hook(lambda p: None)
    elif what == "twice":
        mdcs.parallelize(model, optimizer, plan, units, timeout_s=5)
    return said(lambda: mdcs.parallelize(model, optimizer, plan, units, timeout_s=5))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a head of its own", "parameter 4 of the optimizer, of shape (2, 2): is in the optimizer and in no unit"),
        ("added later", "extra.weight: is in no unit, so it was added after partition(): call mdcs.partition(model) again"),
        ("tied since", "head.bias: is another parameter than body.bias and shares a part of its memory"),
        ("a sparse buffer", "index: torch.sparse_coo buffers are not supported"),
        ("a hook on step", "SGD has hooks on step()"),
        ("a hook for gradients", "body.weight: has a hook for its accumulated gradient"),
        ("twice", "body.weight: is parallelized already: close() that first"),
    ],
)
def test_what_would_not_be_trained_is_named_before_step_1(two: Ranks, what, message):
    for said_ in two.run(untrained, what):
        assert message in said_
    if what == "twice":
        two.stop()


def keep_a_view(strategy: str, anew: bool) -> str:
    """A view of a weight, since it was profiled; or in every forward ``anew``, which is another's affair."""
    job = Job("tied", steps=1)
    with parallel_for(job, how(strategy)) as (made, parallel, _):
        one_step(made, parallel)
    made.model.kept = [made.model.norm.weight.detach()]
    if anew:
        made.model.register_forward_pre_hook(lambda model, args: setattr(model, "kept", None))
    with parallel_for(job, how(strategy), made) as (_, parallel, _):
        return said(lambda: one_step(made, parallel))


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_view_of_a_weight_that_the_model_keeps_is_named_in_step_1(two: Ranks, strategy):
    for rank, message in enumerate(two.run(keep_a_view, strategy, False)):
        assert message.startswith(f"RunError: rank {rank}, step 1: kept: shares memory with the parameter norm.weight")
    assert two.run(keep_a_view, strategy, True) == ["", ""]


def test_sparse_embedding_bags_are_refused():
    model = nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True))
    with pytest.raises(mdcs.UnsupportedModel, match="0.weight: sparse gradients are not supported"):
        mdcs.partition(model, mdcs.ByLeaf())


def habits(strategy: str) -> dict[str, str]:
    """Between backward and step(): each is refused, and leaves training as it was."""
    found = {}
    with parallel_for(Job("tied"), how(strategy)) as (made, parallel, optimizer):
        parameters = list(made.model.parameters())
        made.loss(made.model, made.batch(0, 0, dist.get_rank())).backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        for what, habit in {
            "clip": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
            "clip value": lambda: nn.utils.clip_grad_value_(parameters, 1.0),
            "unscale": lambda: scaler.unscale_(optimizer),
            "zero": optimizer.zero_grad,
        }.items():
            found[what] = said(habit)
        parallel.step()
        optimizer.zero_grad()
        found["zero after step"] = str([p.grad for p in parameters if p.grad is not None])
        made.loss(made.model, made.batch(1, 0, dist.get_rank())).backward()
        optimizer.param_groups[0]["lr"] *= 2
        found["lr"] = said(parallel.step)
        optimizer.param_groups[0]["lr"] /= 2
        parallel.step()
    return found


@pytest.mark.parametrize("strategy", ["dp", "zero2", "fsdp"])
def test_habits_between_backward_and_step(two: Ranks, strategy):
    for found in two.run(habits, strategy):
        for what in ("clip", "clip value", "unscale", "zero"):
            assert "weight.grad does not hold the gradient between backward and step()" in found[what], (what, found)
            assert "Clip with parallelize(…, clip_norm=1.0)" in found[what], (what, found)
        assert found["zero after step"] == "[]"
        assert "lr of the optimizer's group 0 was changed between backward and step()" in found["lr"]


def tensor_rate(strategy: str) -> list[str]:
    """A rate in a tensor that a schedule changes in place: late updates must have the former one."""
    job = Job("tied", optimizer="plain sgd", steps=4)
    wanted, made = setup("tied"), setup("tied")
    rank = dist.get_rank()
    ddp = nn.parallel.DistributedDataParallel(wanted.model, process_group=dist.new_group())
    theirs, ours = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=torch.tensor(0.1), foreach=False)
        for m in (wanted.model, made.model)
    )
    units = mdcs.partition(made.model, made.policy)
    plan = plan_for(job, How(strategy, "dear"), profile_of(job, How(), made, units, ours))
    with mdcs.parallelize(made.model, ours, plan, units, timeout_s=20) as parallel:
        for step in range(job.steps):
            one_step(made, parallel, step)
            wanted.loss(ddp, wanted.batch(step, 0, rank)).backward()
            theirs.step()
            theirs.zero_grad()
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"].mul_(0.1)
        return differing(parallel.state_dict(), wanted.model.state_dict())


@pytest.mark.parametrize("strategy", ["zero2", "random"])
def test_a_rate_in_a_tensor(two: Ranks, strategy):
    assert two.run(tensor_rate, strategy) == [[], []]


# ---- evaluation


def evaluate_in_inference_mode(strategy: str) -> list[str]:
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inference_mode_around_evaluate(two: Ranks, strategy):
    assert two.run(evaluate_in_inference_mode, strategy) == [[], []]


def evaluate_without_gradients(strategy: str, budget: float | None) -> list[Any]:
    job = Job("tied", steps=2)
    with parallel_for(job, dataclasses.replace(how(strategy), budget=budget)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        for step in range(job.steps):
            with parallel.evaluate():
                has_graph = made.loss(made.model, made.batch(9, 0, 0)).requires_grad
            one_step(made, parallel, step)  # with gradients again
            schedule.step()
        return [has_graph, differing(parallel.state_dict(), reference(job).state)]


@pytest.mark.parametrize(("strategy", "budget"), [("dp", None), ("fsdp", 1.0)])
def test_an_evaluation_has_no_gradients(two: Ranks, strategy, budget):
    assert two.run(evaluate_without_gradients, strategy, budget) == [[False, []]] * 2


def evaluate_unequal_parts(strategy: str, budget: float | None) -> dict[str, Any]:
    job = Job("tied", steps=2)
    rank = dist.get_rank()
    with parallel_for(job, how(strategy, budget=budget)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        alone = setup("tied").model
        alone.load_state_dict(reference(job).state)
        gathers: list[int] = []
        gather = parallel._engine.wire.messages.unshard_now
        parallel._engine.wire.messages.unshard_now = lambda u: (gathers.append(u), gather(u))[1]  # type: ignore[method-assign]
        batches = [made.batch(50 + i, 0, rank) for i in range(2 + 3 * rank)]
        with torch.no_grad():
            wanted = [made.loss(alone, b).item() for b in batches]
            with parallel.evaluate():
                losses = [made.loss(made.model, b).item() for b in batches]
        parallel._engine.wire.messages.unshard_now = gather  # type: ignore[method-assign]
        one_step(made, parallel, 2)
        state = parallel.state_dict()
    same = differing(state, reference(dataclasses.replace(job, steps=3)).state)
    return {"equal": losses == wanted, "most": max(map(gathers.count, gathers), default=0), "same": same}


@pytest.mark.parametrize(("strategy", "budget"), [("dp", None), ("zero2", None), ("fsdp", None), ("fsdp", 1.0), ("random", 1.1)])
def test_ranks_with_unequal_numbers_of_batches(two: Ranks, strategy, budget):
    for found in two.run(evaluate_unequal_parts, strategy, budget):
        assert found["equal"] and found["same"] == []
        assert found["most"] <= (1 if budget is None else 10)  # a tied unit is used twice


# ---- exceptions that the loop catches


class Broken(Exception):
    pass


def _break(*_: object) -> None:
    raise Broken


def catch_in_forward(strategy: str, micro_steps: int, places: tuple[str, str]) -> dict[str, Any]:
    """Batches that fail on all ranks, each where it says, are left out; the others train as ever."""
    job = Job("tied", micro_steps, steps=4)
    with parallel_for(job, how(strategy)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        losses = []
        for step in range(job.steps):
            if step in (0, 2):
                module = made.model.get_submodule(places[dist.get_rank()])
                handle = module.register_forward_hook(_break)
                if micro_steps > 1:
                    handle.remove()
                    made.loss(made.model, made.batch(77, 0, 0)).backward()
                    handle = module.register_forward_hook(_break)
                try:
                    made.loss(made.model, made.batch(78, 1, 0)).backward()
                except Broken:
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
        wanted = reference(job)
        return {
            "losses": losses == list(wanted.losses), "weights": differing(parallel.state_dict(), wanted.state),
            "records": len(parallel.records(flush=True)),
        }  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("micro_steps", "places"), [(1, ("norm", "norm")), (1, ("blocks.0", "norm")), (2, ("norm", "blocks.1"))])
def test_an_iteration_that_raised_is_given_up(two: Ranks, strategy, micro_steps, places):
    for found in two.run(catch_in_forward, strategy, micro_steps, places):
        assert found["losses"] and found["weights"] == [] and found["records"] == 4


def catch_in_backward(cross_iteration: bool) -> dict[str, Any]:
    job = Job("tied", steps=3)
    with parallel_for(job, how("random", cross_iteration=cross_iteration)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        message = ""
        for step in range(job.steps):
            if step == 1:
                handle = made.model.embedding.weight.register_hook(_break)  # the last gradient of all
                message = said(lambda: made.loss(made.model, made.batch(77, 0, 0)).backward())
                handle.remove()
                message += said(parallel.abandon)
            if message != "Broken: ":
                break_message = said(lambda: one_step(made, parallel, step)) if message else ""  # noqa: B023
                if message:
                    return {"message": message, "next": break_message}
            one_step(made, parallel, step)
            schedule.step()
        return {"weights": differing(parallel.state_dict(), reference(job).state)}


def test_a_backward_pass_that_raised(two: Ranks):
    """It can be given up as long as no update has begun, which a barrier between backward and updates sees to."""
    assert two.run(catch_in_backward, False) == [{"weights": []}] * 2
    for found in two.run(catch_in_backward, True):
        assert "the iteration cannot be given up: updates of step 2 have begun" in found["message"]
        assert "start again from a checkpoint" in found["message"]


# ---- fewer micro-steps than planned


def short_accumulation(strategy: str, micro_steps: int, cross: bool) -> dict[str, Any]:
    """The last batches of an epoch are fewer than an accumulation takes."""
    rank, job = dist.get_rank(), Job("tied", micro_steps, steps=1)
    made, twin = setup("tied"), setup("tied")
    ddp = nn.parallel.DistributedDataParallel(twin.model, process_group=dist.new_group())
    theirs = optimizer_for(job.optimizer, twin.model)
    counts = [micro_steps, 1, micro_steps, micro_steps - 1, micro_steps]
    with parallel_for(job, how(strategy, cross_iteration=cross), made) as (_, parallel, _):
        for step, count in enumerate(counts):
            for micro in range(count):
                made.loss(made.model, made.batch(step, micro, rank)).backward()
            parallel.step()
            for micro in range(count):
                with ddp.no_sync() if micro < count - 1 else torch.enable_grad():
                    made.loss(ddp, made.batch(step, micro, rank)).backward()
            theirs.step()
            theirs.zero_grad()
        return {"weights": differing(parallel.state_dict(), twin.model.state_dict())}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("micro_steps", [2, 3])
@pytest.mark.parametrize("cross", [True, False])
def test_the_last_accumulation_may_be_short(two: Ranks, strategy, micro_steps, cross):
    assert two.run(short_accumulation, strategy, micro_steps, cross) == [{"weights": []}] * 2


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


def codebooks(option: bool | None) -> Any:
    rank = dist.get_rank()

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Codebook()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()

    (wanted, theirs), (mine, ours) = built(), built()
    ddp = nn.parallel.DistributedDataParallel(wanted, process_group=dist.new_group(), broadcast_buffers=option is not False)
    units = mdcs.partition(mine, mdcs.ByLeaf())
    profile = _agreed(measure_profile(mine, units, lambda: loss(mine, 0), ours, world=2, link=mdcs.Link.uniform(1.0, 50.0)))
    plan = mdcs.make_plan(profile, Uniform("zero2"), SCHEDULERS["wfbp"]())
    with mdcs.parallelize(mine, ours, plan, units, timeout_s=10, broadcast_buffers=option) as parallel:
        for step in range(4):
            loss(mine, step).backward()
            message = said(parallel.step)
            if message:
                return message
            loss(ddp, step).backward()
            theirs.step()
            theirs.zero_grad()
        state = parallel.state_dict()
    # DDP gives rank 0's at the beginning of the next forward.
    return [n for n in state if not torch.equal(state[n], wanted.state_dict()[n]) and (n != "codes" or rank == 0 or not option)]


@pytest.mark.parametrize("option", [True, False])
def test_buffers_that_forward_reads_are_ddps(two: Ranks, option):
    assert two.run(codebooks, option) == [[], []]


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


def made_in_forward(kind: str, strategy: str, option: bool | None) -> Any:
    rank = dist.get_rank()

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Lazy(kind))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()

    (wanted, theirs), (mine, ours) = built(), built()
    if kind == "expanded":
        wanted[1].mean = wanted[1].mean.contiguous()  # DDP cannot broadcast it
    ddp = nn.parallel.DistributedDataParallel(wanted, process_group=dist.new_group())
    units = mdcs.partition(mine, mdcs.ByClass(("Lazy",)))
    profile = _agreed(measure_profile(mine, units, lambda: loss(mine, 9), ours, world=2, link=mdcs.Link.uniform(1.0, 50.0)))
    plan = mdcs.make_plan(profile, Uniform(strategy), SCHEDULERS["wfbp"]())
    with mdcs.parallelize(mine, ours, plan, units, timeout_s=10, broadcast_buffers=option) as parallel:
        for step in range(4):
            loss(mine, step).backward()
            message = said(parallel.step)
            if message:
                return message
            loss(ddp, step).backward()
            theirs.step()
            theirs.zero_grad()
        state = parallel.state_dict()
        parallel.load_state_dict(state)
    return differing(state, wanted.state_dict())


@pytest.mark.parametrize(
    ("kind", "strategy", "option"),
    [("lazy", "fsdp", None), ("lazy", "dp", True), ("none", "zero2", None), ("expanded", "fsdp", None)],
)
def test_buffers_that_the_first_forward_makes_are_ddps(two: Ranks, kind, strategy, option):
    assert two.run(made_in_forward, kind, strategy, option) == [[], []]


def test_a_buffer_that_a_later_forward_makes_is_refused_by_name(two: Ranks):
    for message in two.run(made_in_forward, "later", "dp", None):
        assert "step 2: buffer 1.second changes in forward" in message and "broadcast_buffers=True" in message


def test_buffers_that_differ_are_not_left_to_differ(two: Ranks):
    for message in two.run(codebooks, None):
        assert "buffer codes changes in forward" in message and "broadcast_buffers=True" in message


def adversaries(strategies: tuple[str, str]) -> dict[str, list[str]]:
    """Two models and two optimizers that train in turns in one process, as a GAN's do."""
    job = Job("tied", steps=4)
    other = Job("tied", steps=4, optimizer="adamw")
    wanted = reference(job).state, reference(other).state
    with parallel_for(job, how(strategies[0])) as one, parallel_for(other, how(strategies[1])) as two:
        schedules = [job.scheduler(optimizer) for _, _, optimizer in (one, two)]
        for step in range(job.steps):
            for (made, parallel, _), schedule in zip((one, two), schedules, strict=True):
                one_step(made, parallel, step)
                schedule.step()
        states = [parallel.state_dict() for _, parallel, _ in (one, two)]
    return {"first": differing(states[0], wanted[0]), "second": differing(states[1], wanted[1])}


@pytest.mark.parametrize("strategies", [("fsdp", "zero2"), ("dp", "random")])
def test_several_models_in_one_process(two: Ranks, strategies):
    assert two.run(adversaries, strategies) == [{"first": [], "second": []}] * 2


def idioms(strategy: str) -> list[str]:
    """Other things that a loop may do: named parameters, hooks on gradients, train and eval, zero_grad, progress in metadata."""
    job = Job("tied", steps=3)
    wanted = reference(job).state
    made = setup("tied")
    optimizer = torch.optim.Adam([(n, p) for n, p in made.model.named_parameters() if p.requires_grad], lr=1e-2)
    units = mdcs.partition(made.model, made.policy)
    plan = plan_for(job, how(strategy), profile_of(job, how(strategy), made, units, optimizer))
    schedule = job.scheduler(optimizer)
    seen: list[float] = []
    with mdcs.parallelize(made.model, optimizer, plan, units, timeout_s=20) as parallel:
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


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "random"])
def test_idioms(two: Ranks, strategy):
    assert two.run(idioms, strategy) == [[], []]


def copies(strategy: str, pickled: bool) -> dict[str, Any]:
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
        return {"weights": differing(parallel.state_dict(), wanted), "grads": all(
            p.grad is not None for p in twin.parameters() if p.requires_grad
        )}  # fmt: skip


@pytest.mark.parametrize(("strategy", "pickled"), [("dp", False), ("fsdp", False), ("fsdp", True)])
def test_copies_are_plain_models(two: Ranks, strategy, pickled):
    assert two.run(copies, strategy, pickled) == [{"weights": [], "grads": True}] * 2


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
    units = mdcs.partition(model, mdcs.ByLeaf())
    link = mdcs.Link.uniform(1.0, 50.0)
    profile = _agreed(measure_profile(model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer, world=2, link=link))
    plan = mdcs.make_plan(profile, Uniform(strategy), SCHEDULERS["wfbp"]())
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=10) as parallel:
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


def watch(strategy: str) -> list[str]:
    job = Job("tied", steps=1)
    made, twin = setup("tied"), setup("tied")
    ddp = nn.parallel.DistributedDataParallel(twin.model, process_group=dist.new_group())
    with parallel_for(job, how(strategy), made) as (_, parallel, _):
        parallel.watch_gradients("blocks.0", "embedding+head")
        one_step(made, parallel)
        made.loss(ddp, made.batch(0, 0, dist.get_rank())).backward()
        found = parallel.gradients("blocks.0") | parallel.gradients("embedding+head")
        assert "watch_gradients('norm')" in said(lambda: parallel.gradients("norm"))
        one_step(made, parallel, 1)
    wanted = dict(twin.model.named_parameters())
    return [n for n, g in found.items() if not torch.equal(g, wanted[n].grad)] + ([] if len(found) == 5 else [str(found.keys())])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_on_purpose(two: Ranks, strategy):
    assert two.run(watch, strategy) == [[], []]


def compiled(strategy: str, what: str) -> list[str]:
    job = Job("tied", optimizer="plain sgd", steps=2)
    made, twin = setup("tied"), setup("tied")
    for model in (made.model, twin.model):
        for module in (model.blocks if what == "blocks" else [model]):
            module.compile(backend="eager")
    ddp = nn.parallel.DistributedDataParallel(twin.model, process_group=dist.new_group())
    theirs = optimizer_for(job.optimizer, twin.model)
    with parallel_for(job, how(strategy), made) as (_, parallel, _):
        for step in range(job.steps):
            one_step(made, parallel, step)
            made.loss(ddp, made.batch(step, 0, dist.get_rank())).backward()
            theirs.step()
            theirs.zero_grad()
        with parallel.evaluate(), torch.no_grad():
            made.loss(made.model, made.batch(0, 0, 0))
        return differing(parallel.state_dict(), twin.model.state_dict())


@pytest.mark.parametrize(
    ("strategy", "what"), [pytest.param("dp", "blocks", marks=pytest.mark.slow), ("fsdp", "blocks"), ("fsdp", "model")]
)
def test_compiled_blocks_and_models(two: Ranks, strategy, what):
    assert two.run(compiled, strategy, what) == [[], []]
