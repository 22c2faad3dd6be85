"""Two nodes of two ranks: what is sharded within a node trains like DDP, holds what the ledger says, and is saved once.

The ranks share this machine; the profile says that each two of them share a host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mdcs
from mdcs.calibrate.link_timing import measure_link, ranks_per_node
from mdcs.measure.memory import preload_env
from mdcs.plan.ledger import CATEGORIES
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, compare, distance, parallel_for, reference, train

ROUNDING = 1e-9
BUFFERS = tuple(c for c in CATEGORIES if c != "activations")
RING = Collectives("ring", "ring", "ring")
TREE = Collectives("reduce_broadcast", "native", "native")


def agrees(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["losses"] <= ROUNDING and result["weights"] <= ROUNDING, result
        assert {"RS_N", "AG_F_N"} <= set(result["kinds"])


def test_trains_like_ddp(nodes: Ranks):
    agrees(nodes.run(compare, Job("tied", double=True, steps=4), How("hfsdp", "fusion", per_node=2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "scheduler", "collectives"),
    [("hsdp", "wfbp", Collectives()), ("random", "random", RING), ("random", "priority", TREE), ("greedy", "dear", RING)],
)
def test_so_does_every_mix(nodes: Ranks, strategy, scheduler, collectives):
    agrees(nodes.run(compare, Job("tied", 2, double=True, steps=6), How(strategy, scheduler, seed=3, per_node=2, collectives=collectives)))


@pytest.mark.slow
def test_a_norm_counts_every_shard_once(nodes: Ranks):
    job = Job("tied", clip_norm=0.1, double=True, steps=6)
    agrees(nodes.run(compare, job, How("random", "wfbp", seed=3, per_node=2)))


# ---- bytes


def held(strategy: str, collectives: Collectives) -> dict[str, Any]:
    job, how = Job("gpt2", steps=3), How(strategy, "sequential", per_node=2, collectives=collectives)
    with parallel_for(job, how) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        parallel.drain()
        return {**parallel.memory(), "planned": parallel.plan.prediction.memory}


@pytest.fixture(scope="module")
def counted() -> Iterator[Ranks]:
    """Four ranks whose tensor memory is counted."""
    ranks = Ranks(4, preload_env(os.environ))
    yield ranks
    ranks.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "collectives"), [("hsdp", Collectives()), ("hfsdp", TREE), ("hfsdp", RING)])
def test_the_ledger_is_right_to_the_byte(counted: Ranks, strategy, collectives):
    for rank in counted.run(held, strategy, collectives):
        assert {c: rank["predicted"][c] for c in BUFFERS} == {c: rank["measured"][c] for c in BUFFERS}
        assert {c: rank["planned"][c] for c in BUFFERS} == {c: rank["predicted"][c] for c in BUFFERS}


# ---- what is saved


def saved(root: str) -> tuple[float, list[dict[str, Any]]]:
    """Four steps with another plan in the middle, against DDP's; and this rank's part of the sharded state."""
    job = Job("tied", double=True, steps=4)
    with parallel_for(replace(job), How("hfsdp", "wfbp", per_node=2)) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer, 2)
        parallel.checkpoint(root).wait()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, parallel.sharded_state_dict())
        assert distance(mdcs.merge_shards(parts), parallel.state_dict()) == 0
        train_from(job, made, parallel, optimizer, 2)
        straight = parallel.state_dict()
    with parallel_for(job, How("fsdp", "wfbp")) as (made, parallel, optimizer):
        assert mdcs.resume(parallel, root) is not None
        train_from(job, made, parallel, optimizer, 2)
        return distance(parallel.state_dict(), straight), distance(straight, reference(job).state)
