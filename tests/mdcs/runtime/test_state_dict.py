"""State in and out: evaluation, state dicts whole and in pieces, loading, draining. The plain model is the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.profile.link import Kind
from mdcs.runtime.unshard import Unsharder
from tests.mdcs.measured import measure_profile
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import (
    How,
    Job,
    differing,
    optimizer_for,
    parallel_for,
    reference,
    scheduler_for,
    setup,
    strategy_for,
    train,
)

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


# ---- state dicts


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


# ---- some of the ranks


def train_in_a_subgroup() -> list[str] | None:
    """Ranks 0 and 2 train; rank 1 has nothing to do with it."""
    group, made, alone = dist.new_group([0, 2]), setup("tied"), setup("tied").model
    optimizer, sgd = (optimizer_for("plain sgd", model) for model in (made.model, alone))
    units = mdcs.partition(made.model, made.policy)
    first, link = made.batch(0, 0, 0), mdcs.Link.uniform(1.0, 50.0)
    box: list[Any] = [measure_profile(made.model, units, lambda: made.loss(made.model, first), optimizer, world=2, link=link)]
    if dist.get_rank() == 1:
        return None
    dist.broadcast_object_list(box, group_src=0, group=group)
    how = How("random", "priority")
    plan = mdcs.make_plan(mdcs.Job(box[0], cross_iteration=False), strategy_for(how), scheduler_for(how))
    ddp = nn.parallel.DistributedDataParallel(alone, process_group=group)
    with mdcs.parallelize(made.model, optimizer, plan, units, group=group, clip_norm=0.1, timeout_s=20) as parallel:
        for step in range(3):
            batch = made.batch(step, 0, dist.get_rank(group))
            made.loss(made.model, batch).backward()
            parallel.step()
            made.loss(ddp, batch).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            sgd.step()
            sgd.zero_grad()
        state = parallel.state_dict()
    return [n for n, v in alone.state_dict().items() if not torch.allclose(v, state[n], atol=1e-6)]


def test_a_subgroup_of_the_ranks_trains(three: Ranks):
    assert three.run(train_in_a_subgroup) == [[], None, []]
