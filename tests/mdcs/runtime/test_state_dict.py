"""State in and out: evaluation, state dicts whole and in pieces, loading, draining. The plain model is the judge."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.profile.link import Kind
from mdcs.runtime.unshard import Unsharder
from mdcs.sizes import aligned
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, Setup, differing, parallel_for, reference, setup, train

STRATEGIES = ("dp", "zero2", "sdp", "fsdp", "random")
HOW = {s: How(s, "random" if s == "random" else "priority", seed=4) for s in STRATEGIES}


def plain(model: str, state: dict[str, Tensor]) -> nn.Module:
    """The model alone, with a state dict that must fit it to the last name."""
    made = setup(model)
    made.model.load_state_dict(state, strict=True)
    return made.model


# ---- evaluation


def evaluate(model: str, how: How) -> dict[str, bool]:
    job = Job(model, steps=3)
    with parallel_for(job, how) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        batch = made.batch(99, 0, 0)
        parallel.drain()
        before = storage_sizes(parallel)
        alone = plain(model, parallel.state_dict()).eval()
        made.model.eval()
        with parallel.evaluate(), torch.no_grad():
            twice = [made.loss(made.model, batch), made.loss(made.model, batch)]
        made.model.train()
        with torch.no_grad():
            wanted = made.loss(alone, batch)
        after = storage_sizes(parallel)
    return {"equal": all(torch.equal(loss, wanted) for loss in twice), "as before": after == before}


def storage_sizes(parallel: mdcs.Session) -> list[int]:
    return [s.flat_param.untyped_storage().nbytes() for s in parallel._engine.storages]


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *(("tied", s) for s in ("dp", "fsdp", "random")),
        ("twice", "fsdp"),
        *(pytest.param("resnet", s, marks=pytest.mark.slow) for s in STRATEGIES),
    ],
)
def test_evaluation_is_that_of_the_plain_model(two: Ranks, model, strategy):
    """BatchNorm's statistics are rank 0's on every rank, as with DDP; what was gathered for it is freed again."""
    how = How(strategy, "sequential", seed=4)
    assert two.run(evaluate, model, how) == [{"equal": True, "as before": True}] * 2


def evaluate_before_training() -> bool:
    with parallel_for(Job("tied"), HOW["fsdp"]) as (made, parallel, _):
        batch = made.batch(0, 0, 0)
        with parallel.evaluate(), torch.no_grad():
            loss = made.loss(made.model, batch)
        fresh = setup("tied")
        return torch.equal(loss, made.loss(fresh.model, batch))


def test_evaluation_before_the_first_step(two: Ranks):
    assert two.run(evaluate_before_training) == [True, True]


def evaluate_a_frozen_block() -> bool:
    """It is called by itself, where units are gathered for each forward."""
    with pytest.MonkeyPatch.context() as patch, parallel_for(Job("frozen"), HOW["fsdp"]) as (made, parallel, _):
        patch.setattr(Unsharder, "fits", lambda unsharder, size: False)
        x = torch.ones(1, 4, made.model.config.n_embd)
        with parallel.evaluate():
            outs = [made.model.transformer.h[0](x)[0] for _ in range(2)]
        assert not any(s.is_full for s in parallel._engine.storages if s.name == "transformer.h.0")
        plain = setup("frozen").model.transformer.h[0](x)[0]
    return all(torch.equal(out, plain) for out in outs)


def test_evaluation_of_a_frozen_block_alone(two: Ranks):
    assert two.run(evaluate_a_frozen_block) == [True, True]


def evaluate_with_an_error() -> bool:
    """A forward that fails in an evaluation leaves a model that trains on as if nothing had been."""
    job = Job("tied", steps=4)
    wanted = reference(job)
    with parallel_for(job, HOW["fsdp"]) as (made, parallel, optimizer):
        first = dataclasses.replace(job, steps=2)
        losses = train(first, made, parallel, optimizer)
        handle = made.model.blocks[1].register_forward_pre_hook(_fail)
        try:
            with parallel.evaluate(), torch.no_grad():
                made.loss(made.model, made.batch(0, 0, 0))
        except ArithmeticError:
            handle.remove()
        rank = dist.get_rank()
        schedule = job.scheduler(optimizer)
        for step in range(2, 4):
            loss = made.loss(made.model, made.batch(step, 0, rank))
            loss.backward()
            losses.append(loss.item())
            parallel.step()
            schedule.step()
    return losses[:3] == list(wanted.losses[:3])


def _fail(module: nn.Module, inputs: Any) -> None:
    raise ArithmeticError


def test_an_evaluation_that_fails(two: Ranks):
    assert two.run(evaluate_with_an_error) == [True, True]


# ---- state dicts


def round_trip(model: str, how: How) -> dict[str, Any]:
    job = Job(model, steps=3)
    wanted = reference(job).state
    with parallel_for(job, how) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        whole = parallel.state_dict()
        storages = parallel._engine.storages
        owned = sum(storage.owned_shard(b).numel() for storage in storages for b in range(len(storage.blocks)))
    return {
        "whole": differing(whole, wanted),
        "plain": differing(plain(model, whole).state_dict(), wanted),
        "owned": owned,
        "numel": sum(aligned(p.numel()) for p in made.model.parameters()),
    }


@pytest.mark.parametrize(
    ("model", "strategy"), [("tied", "dp"), ("tied", "zero2"), ("tied", "fsdp"), ("resnet", "random"), ("frozen", "random")]
)
def test_whole_state_dicts_are_the_plain_models(two: Ranks, model, strategy):
    for found in two.run(round_trip, model, HOW[strategy]):
        assert (found["whole"], found["plain"]) == ([], [])
        share = 1 if strategy == "dp" else 2
        if strategy != "random":
            assert found["numel"] / share <= found["owned"] < found["numel"] / share + 20  # a rank's part, and padding


def round_trip_of_three() -> list[str]:
    job = Job("tied", steps=2, double=True)
    with parallel_for(job, HOW["random"]) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        mine = parallel.state_dict()
    theirs: list[Any] = [mine]
    dist.broadcast_object_list(theirs, src=0)
    return differing(mine, theirs[0])


def test_three_ranks_have_the_same_state_dict(three: Ranks):
    assert three.run(round_trip_of_three) == [[]] * 3


# ---- loading


def load_and_train_on(how: How) -> dict[str, Any]:
    """Plain SGD has no state: a run of two steps, loaded elsewhere, continues as the run of four."""
    job = Job("tied", optimizer="plain sgd")
    with parallel_for(job, HOW["dp"]) as (made, parallel, _):
        checkpoint = _continue(made, parallel)
        continued = _continue(made, parallel)
    other = setup("tied")
    for p in other.model.parameters():
        p.data.add_(1.0)  # as if another run had been there
    with parallel_for(job, how, other) as (made, parallel, _):
        _continue(made, parallel)  # and had gathered and scheduled something
        parallel.load_state_dict(checkpoint)
        same = differing(parallel.state_dict(), checkpoint)
        return {"same": same, "continued": differing(_continue(made, parallel), continued)}


def _continue(made: Setup, parallel: mdcs.Session) -> dict[str, Tensor]:
    for step in (2, 3):
        made.loss(made.model, made.batch(step, 0, dist.get_rank())).backward()
        parallel.step()
    return parallel.state_dict()


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "random"])
def test_a_loaded_model_continues(two: Ranks, strategy):
    how = dataclasses.replace(HOW[strategy], scheduler="random")
    assert two.run(load_and_train_on, how) == [{"same": [], "continued": []}] * 2


def wrong_loads() -> list[Any]:
    with parallel_for(Job("tied"), HOW["fsdp"]) as (_, parallel, _):
        good = parallel.state_dict()
        found: list[Any] = []
        for name, change in (("norm.bias", None), ("norm.bias", torch.zeros(7)), ("blocks.3.0.bias", torch.zeros(9))):
            bad = {k: v for k, v in good.items() if k != name} | ({} if change is None else {name: change})
            try:
                parallel.load_state_dict(bad)
            except (KeyError, ValueError) as e:
                found.append(str(e))
        found.append(differing(parallel.state_dict(), good))
    return found


def test_a_state_dict_that_does_not_fit(two: Ranks):
    for missing, shape, unknown, changed in two.run(wrong_loads):
        assert "state dict has no norm.bias" in missing
        assert shape == "norm.bias is (6,), the state dict has (7,)"
        assert "blocks.3.0.bias" in unknown
        assert changed == []


def gather_without_memory() -> list[int]:
    """Return the bytes of gathered units by the account, before a gather whose allocation fails and after."""
    with parallel_for(Job("tied"), HOW["fsdp"]) as (_, parallel, _):
        engine, found = parallel._engine, []
        for storage in engine.storages[1:2]:
            found.append(engine.account.live["full_parameters"])
            with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(storage, "allocate", _out_of_memory)
                with engine.unsharder.unsharded([0, 1]):
                    pass
            found.append(engine.account.live["full_parameters"])
        parallel.state_dict()  # it goes on
        return found


def _out_of_memory() -> None:
    raise MemoryError


def test_a_gather_that_fails_is_not_booked(two: Ranks):
    assert two.run(gather_without_memory) == [[0, 0]] * 2


# ---- draining


def drain() -> dict[str, Any]:
    job = Job("tied", steps=4)
    wanted = reference(job).state
    with parallel_for(job, How("random", "random", seed=8)) as (made, parallel, optimizer):
        late = [m for m in parallel.plan.messages if not m.kind.is_gather and m.slot > parallel.plan.period.turn]
        launched: list[Kind] = []
        launch = parallel._engine.wire.messages.launch
        parallel._engine.wire.messages.launch = lambda t: (launched.append(t.message.kind), launch(t))[1]  # type: ignore[method-assign]
        train(job, made, parallel, optimizer)
        parallel.drain()
        count = len(launched)
        parallel.drain()
        again = len(launched) - count
        state = parallel.state_dict()
        gradients = [u for u, s in enumerate(parallel._engine.storages) if s.gradient is not None]
    return {"late": len(late), "state": differing(state, wanted), "again": again, "gradients": gradients}


def test_a_drain_finishes_what_would_be_reduced_in_the_next_forward(two: Ranks):
    for found in two.run(drain):
        assert found["late"] >= 2, "the plan must reduce in forward slots, or this shows nothing"
        assert (found["state"], found["again"], found["gradients"]) == ([], 0, [])


def buffers_after_drain() -> list[str]:
    job = Job("resnet", steps=2)
    with parallel_for(job, HOW["dp"]) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        parallel.drain()
        mine = {name: b.clone() for name, b in made.model.named_buffers()}
        theirs: list[Any] = [mine]
        dist.broadcast_object_list(theirs, src=0)
        return [name for name in mine if not torch.equal(mine[name], theirs[0][name])]


def test_buffers_are_rank_zeros(two: Ranks):
    assert two.run(buffers_after_drain) == [[], []]


def leave_without_drain() -> list[str]:
    """Leaving the block drains: the parameters that dp leaves are those after the last step."""
    job = Job("tied", steps=3)
    with parallel_for(job, HOW["dp"]) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
    return differing(made.model.state_dict(), reference(job).state)


def test_leaving_the_block_finishes_training(two: Ranks):
    assert two.run(leave_without_drain) == [[], []]


# ---- a loop with collectives of its own


def collectives_in_the_loop() -> bool:
    """Mean losses for a log, on the default group, while messages are in flight."""
    job = Job("tied", steps=10)
    wanted = reference(job)
    means = []
    with parallel_for(job, How("random", "random", seed=8, depth=4)) as (made, parallel, optimizer):
        schedule = job.scheduler(optimizer)
        losses = []
        for step in range(job.steps):
            loss = made.loss(made.model, made.batch(step, 0, dist.get_rank()))
            loss.backward()
            parallel.step()
            schedule.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            means.append(mean.item())
            losses.append(loss.item())
        state = parallel.state_dict()
    return losses == list(wanted.losses) and not differing(state, wanted.state) and len(means) == job.steps


def test_the_loop_may_use_the_default_group(two: Ranks):
    assert two.run(collectives_in_the_loop) == [True, True]


def train_in_a_subgroup() -> list[str] | None:
    """Ranks 0 and 2 train; rank 1 has nothing to do with it."""
    from mdcs.profile.schema import Optimizer, Profile
    from tests.mdcs.measured import measure_profile

    group = dist.new_group([0, 2])
    made = setup("tied")
    optimizer = torch.optim.SGD([p for p in made.model.parameters() if p.requires_grad], lr=0.1)
    units = mdcs.partition(made.model, made.policy)
    box: list[Any] = [
        measure_profile(
            made.model, units, lambda: made.loss(made.model, made.batch(0, 0, 0)), optimizer, world=2,
            link=mdcs.Link.uniform(1.0, 50.0),
        )
    ]  # fmt: skip
    if dist.get_rank() == 1:
        return None
    dist.broadcast_object_list(box, group_src=0, group=group)
    profile: Profile = box[0]
    assert isinstance(profile.optimizer, Optimizer)
    from mdcs.planner.registry import SCHEDULERS
    from mdcs.planner.registry import STRATEGIES as PLANNERS

    plan = mdcs.make_plan(mdcs.Job(profile, cross_iteration=False), PLANNERS["random"](), SCHEDULERS["priority"]())
    with mdcs.parallelize(made.model, optimizer, plan, units, group=group, clip_norm=0.1, timeout_s=20) as parallel:
        for step in range(3):
            made.loss(made.model, made.batch(step, 0, dist.get_rank(group))).backward()
            parallel.step()
        state = parallel.state_dict()
    alone = setup("tied").model
    ddp = nn.parallel.DistributedDataParallel(alone, process_group=group)
    sgd = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        made.loss(ddp, made.batch(step, 0, dist.get_rank(group))).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        sgd.step()
        sgd.zero_grad()
    return [n for n, v in alone.state_dict().items() if not torch.allclose(v, state[n], atol=1e-6)]


def test_a_subgroup_of_the_ranks_trains(three: Ranks):
    assert three.run(train_in_a_subgroup) == [[], None, []]
