"""Two nodes of two ranks: what is sharded within a node trains like DDP, holds what the ledger says, and is saved once.

The ranks share this machine; the profile says that each two of them share a host.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import mdcs
from mdcs.profile.link import Collectives
from mdcs.profiler.consensus import ranks_per_node
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_checkpointing import other_start
from tests.mdcs.runtime.test_loops import one_step
from tests.mdcs.runtime.test_memory import exact_peaks
from tests.mdcs.runtime.test_optimizer_state import differences
from tests.mdcs.runtime.training import How, Job, compare, differing, parallel_for, train

RING, NATIVE = Collectives("ring"), Collectives("native")


TWICE = Job("tied", 2, double=True, steps=6)


@pytest.mark.parametrize(
    ("job", "how"),
    few([
        (Job("tied", double=True, steps=4), How("hsdp", "fusion", per_node=2)),
        (TWICE, How("hsdp_no_reshard", "wfbp", per_node=2, collectives=RING)),
        (TWICE, How("random", "random", seed=3, per_node=2, collectives=NATIVE)),
        (TWICE, How("hsdp", "partitioning", per_node=2, collectives=RING)),
        (Job("tied", clip_norm=0.1, double=True, steps=6), How("random", "wfbp", seed=3, per_node=2)),  # its norm
    ]),
)  # fmt: skip
def test_trains_like_ddp(nodes: Ranks, job, how):
    for result in nodes.run(compare, job, how):
        assert result["losses"] <= 1e-9 and result["weights"] <= 1e-9, result
        assert {"RS_N", "AG_F_N"} <= set(result["kinds"])


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
        exact_peaks(rank)
        exact_peaks(rank, "planned")


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


def seen(by_rank: list[str]) -> list[int]:
    found = []
    for told in by_rank:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LOCAL_WORLD_SIZE", raising=False)
            if told:
                patch.setenv("LOCAL_WORLD_SIZE", told[dist.get_rank()])
            found.append(ranks_per_node())
    return found


def test_ranks_learn_who_shares_a_host(nodes: Ranks):
    assert nodes.run(seen, ["2222", "4444", "1111", "3331", ""]) == [[2, 0, 0, 0, 0]] * 4
