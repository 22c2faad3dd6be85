"""Two nodes of two ranks: what is sharded within a node trains like DDP, holds what the ledger says, and is saved once.

The ranks share this machine; the profile says that each two of them share a host.
"""

from __future__ import annotations

import pytest

from mdcs.profile.algorithms import Collectives
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, compare

ROUNDING = 1e-9


@pytest.mark.parametrize(
    ("strategy", "scheduler"), [("hsdp", "wfbp"), ("hfsdp", "priority"), ("hfsdp", "fusion"), ("random", "random"), ("greedy", "dear")]
)
def test_trains_like_ddp(four: Ranks, strategy, scheduler):
    how = How(strategy, scheduler, budget=1.3 if strategy == "greedy" else None, seed=3, per_node=2)
    results = four.run(compare, Job("tied", 2, double=True, steps=6), how)
    for result in results:
        assert result["losses"] <= ROUNDING and result["weights"] <= ROUNDING, result
        assert {"RS_N", "AG_F_N"} <= set(result["kinds"])
