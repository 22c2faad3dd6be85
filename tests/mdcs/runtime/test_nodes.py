"""Two nodes of two ranks: what is sharded within a node trains like DDP, holds what the ledger says, and is saved once.

The ranks share this machine; the profile says that each two of them share a host.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import mdcs
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.profile.link import Collectives
from mdcs.profiler.measurement import ranks_per_node
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_checkpointing import other_start
from tests.mdcs.runtime.test_loops import one_step
from tests.mdcs.runtime.test_optimizer_state import differences
from tests.mdcs.runtime.training import How, Job, compare, differing, parallel_for, train

ROUNDING = 1e-9
BUFFERS = tuple(c for c in CATEGORIES if c != "activations")
RING, NATIVE = Collectives("ring"), Collectives("native")


def agrees(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["losses"] <= ROUNDING and result["weights"] <= ROUNDING, result
        assert {"RS_N", "AG_F_N"} <= set(result["kinds"])


def test_trains_like_ddp(nodes: Ranks):
    agrees(nodes.run(compare, Job("tied", double=True, steps=4), How("hsdp", "fusion", per_node=2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "scheduler", "collectives"),
    [("hsdp_no_reshard", "wfbp", RING), ("random", "random", NATIVE), ("hsdp", "partitioning", RING)],
)
def test_so_does_every_mix(nodes: Ranks, strategy, scheduler, collectives):
    how = How(strategy, scheduler, seed=3, per_node=2, collectives=collectives)
    agrees(nodes.run(compare, Job("tied", 2, double=True, steps=6), how))


@pytest.mark.slow
def test_a_norm_counts_every_shard_once(nodes: Ranks):
    job = Job("tied", clip_norm=0.1, double=True, steps=6)
    agrees(nodes.run(compare, job, How("random", "wfbp", seed=3, per_node=2)))


# ---- bytes


def held(strategy: str, collectives: Collectives) -> dict[str, Any]:
    job, how = Job("gpt2"), How(strategy, "sequential", per_node=2, collectives=collectives)
    with parallel_for(job, how) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer, 2)  # a first update makes its state
        parallel.reset_memory()
        train(job, made, parallel, optimizer, 2)
        parallel.drain()
        return {**parallel.memory(), "planned": parallel.plan.prediction.memory}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "collectives"), [("hsdp_no_reshard", RING), ("hsdp", NATIVE), ("hsdp", RING)])
def test_the_ledger_is_right_to_the_byte(nodes: Ranks, strategy, collectives):
    for rank in nodes.run(held, strategy, collectives):
        assert {c: rank["predicted"][c] for c in BUFFERS} == {c: rank["measured"][c] for c in BUFFERS}
        assert {c: rank["planned"][c] for c in BUFFERS} == {c: rank["predicted"][c] for c in BUFFERS}


# ---- what is saved


def saved(root: str) -> list[float]:
    """Differences of weights and optimizer state once another plan has gone on from the checkpoint."""
    job = Job("tied", double=True)
    with parallel_for(job, How("random", "random", seed=5, per_node=2)) as (made, parallel, _):
        assert {"hsdp_no_reshard", "hsdp"} <= {str(k) for k in parallel.plan.strategies}
        one_step(made, parallel)
        parallel.checkpoint(root)
        state, optimizer = parallel.state_dict(), parallel.optimizer_state_dict()
    with parallel_for(job, How("fsdp", "wfbp"), other_start(job)) as (_, parallel, _):
        resumed = mdcs.resume(parallel, root)
        assert resumed is not None and resumed.step == 1
        found = differing(parallel.state_dict(), state), differences(parallel.optimizer_state_dict(), optimizer)
    return [*found[0], *found[1]]


@pytest.mark.slow
def test_it_is_saved_whole_and_resumed_with_any_plan(nodes: Ranks, tmp_path):
    assert nodes.run(saved, str(tmp_path)) == [[]] * 4


# ---- where ranks are


def seen(told: dict[int, str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if dist.get_rank() in told:
            patch.setenv("LOCAL_WORLD_SIZE", told[dist.get_rank()])
        return ranks_per_node()


@pytest.mark.parametrize(
    ("told", "count"), [("2222", 2), ("4444", 0), ("1111", 0), ("3331", 0), ("", 0)], ids=lambda value: str(value) or "nothing"
)
def test_ranks_learn_who_shares_a_host(nodes: Ranks, told, count):
    assert nodes.run(seen, dict(enumerate(told))) == [count] * 4
