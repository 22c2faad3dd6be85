"""State in and out: evaluation, state dicts whole and in pieces, loading, draining. The plain model is the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.strategies import RandomMix
from mdcs.runtime.unshard import Unsharder
from tests.mdcs.measured import measure_profile
from tests.mdcs.runtime.ranks import OnTwo, Ranks
from tests.mdcs.runtime.test_loops import STRATEGIES, how, lacking, said
from tests.mdcs.runtime.training import How, Job, differing, optimizer_for, parallel_for, reference, setup, train

on_two = OnTwo()

# ---- evaluation


@on_two(("twice", "fsdp"), *(pytest.param("resnet", strategy, marks=pytest.mark.slow) for strategy in STRATEGIES))
def evaluation_is_that_of_the_plain_model(model: str, strategy: str) -> list[Any]:
    """BatchNorm's statistics are rank 0's on every rank, as with DDP; what was gathered for it is freed again."""
    job, alone = Job(model, steps=3), setup(model).model
    with parallel_for(job, How(strategy, "sequential", seed=4)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        batch = made.batch(99, 0, 0)
        parallel.drain()
        before = storage_sizes(parallel)
        alone.load_state_dict(parallel.state_dict(), strict=True)
        alone.eval()
        made.model.eval()
        with parallel.evaluate(), torch.no_grad():
            twice = [made.loss(made.model, batch).item(), made.loss(made.model, batch).item()]
        made.model.train()
        with torch.no_grad():
            wanted = made.loss(alone, batch).item()
        after = storage_sizes(parallel)
    return [loss for loss in twice if loss != wanted] + [(before, after)] * (before != after)


def storage_sizes(parallel: mdcs.Session) -> list[int]:
    return [s.flat_param.untyped_storage().nbytes() for s in parallel._engine.storages]


@on_two()
def a_frozen_block_is_evaluated_alone() -> list[Any]:
    """It is called by itself, where units are gathered for each forward."""
    with pytest.MonkeyPatch.context() as patch, parallel_for(Job("frozen"), how("fsdp")) as (made, parallel, _):
        patch.setattr(Unsharder, "fits", lambda unsharder, size: False)
        x = torch.ones(1, 4, made.model.config.n_embd)
        with parallel.evaluate():
            outs = [made.model.transformer.h[0](x)[0] for _ in range(2)]
        assert not any(s.is_full for s in parallel._engine.storages if s.name == "transformer.h.0")
        plain = setup("frozen").model.transformer.h[0](x)[0]
    return [out.sum().item() for out in outs if not torch.equal(out, plain)]


# ---- loading


@on_two()
def a_state_dict_that_does_not_fit() -> list[Any]:
    wrong: list[Any] = []
    with parallel_for(Job("tied"), how("fsdp")) as (_, parallel, _):
        good = parallel.state_dict()
        for name, change, message in (
            ("norm.bias", None, "state dict has no norm.bias"),
            ("norm.bias", torch.zeros(7), "ValueError: norm.bias is (6,), the state dict has (7,)"),
            ("blocks.3.0.bias", torch.zeros(9), "blocks.3.0.bias"),
        ):
            bad = {k: v for k, v in good.items() if k != name} | ({} if change is None else {name: change})
            wrong += lacking(said(lambda bad=bad: parallel.load_state_dict(bad)), message)
        return wrong + differing(parallel.state_dict(), good)


@on_two()
def a_gather_that_fails_is_not_booked() -> list[int]:
    with parallel_for(Job("tied"), how("fsdp")) as (_, parallel, _):
        engine = parallel._engine
        before = engine.account.live["full_parameters"]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(engine.storages[1], "allocate", _out_of_memory)
            with engine.unsharder.unsharded([0, 1]):
                pass
        after = engine.account.live["full_parameters"]
        parallel.state_dict()  # it goes on
        return [size for size in (before, after) if size]


def _out_of_memory() -> None:
    raise MemoryError


# ---- draining


@on_two()
def a_drain_finishes_what_would_be_reduced_in_the_next_forward() -> list[Any]:
    job = Job("tied", steps=4)
    wanted, launched = reference(job).state, []
    with parallel_for(job, How("random", "random", seed=8)) as (made, parallel, optimizer):
        late = [m for m in parallel.plan.messages if not m.kind.is_gather and m.slot > parallel.plan.period.turn]
        assert len(late) >= 2, "the plan must reduce in forward slots, or this shows nothing"
        messages = parallel._engine.wire.messages
        launch = messages.launch
        messages.launch = lambda transfer: (launched.append(transfer.number), launch(transfer))[1]
        train(job, made, parallel, optimizer)
        parallel.drain()
        launched.clear()
        parallel.drain()
        again, state = [*launched], parallel.state_dict()
        gradients = [u for u, s in enumerate(parallel._engine.storages) if s.gradient is not None]
    return differing(state, wanted) + again + gradients


@on_two()
def buffers_are_rank_zeros() -> list[str]:
    job = Job("resnet", steps=2)
    with parallel_for(job, how("dp")) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        parallel.drain()
        mine = {name: b.clone() for name, b in made.model.named_buffers()}
        theirs: list[Any] = [mine]
        dist.broadcast_object_list(theirs, src=0)
        return [name for name in mine if not torch.equal(mine[name], theirs[0][name])]


test_state_is_that_of_the_plain_model = on_two.as_test()


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
    plan = mdcs.make_plan(mdcs.Job(box[0], cross_iteration=False), RandomMix(seed=0), SCHEDULERS["priority"](block_mib=0.004))
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
