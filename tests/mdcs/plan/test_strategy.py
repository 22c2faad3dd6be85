"""Strategies within nodes, by hand: what they hold, send and take; and that without nodes nothing has changed."""

from __future__ import annotations

import pytest

from mdcs.plan.cost import CostModel
from mdcs.plan.ledger import Ledger
from mdcs.plan.period import Strategy, choices
from mdcs.plan.plan import PlanError
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import StrategyAssignment
from mdcs.planner.strategies import Greedy
from mdcs.profile.link import Collectives, Kind
from tests.mdcs.profiles import ADAM, Job, chain, in_nodes, link, planned

# Two nodes of two ranks; a byte takes 1/16 s across, a tenth of that within.
PROFILE = chain(8, 16, 8, world=4, optimizer=ADAM, link=in_nodes(link(1 / 16), 4, 2, 0.1))


@pytest.mark.parametrize(("strategy", "like"), [("hsdp_no_reshard", "sdp"), ("hsdp", "fsdp")])
def test_at_rest_a_rank_holds_what_it_would_in_a_world_of_its_node(strategy: str, like: str) -> None:
    within, alone = planned(PROFILE, strategy), planned(chain(8, 16, 8, world=2, optimizer=ADAM), like)
    assert Ledger(within).at_rest == Ledger(alone).at_rest
    for rank in range(4):
        assert within.runs(1, 0, rank) == alone.runs(1, 0, rank % 2)
        assert Ledger(within, rank).rest_bytes == Ledger(alone, rank % 2).rest_bytes


def test_a_reduction_goes_through_the_node_and_then_across() -> None:
    # Of 64 bytes half is sent within; of the shard of 32 an all-reduce of two ranks sends 32 across.
    assert PROFILE.wire(Kind.RS_N, 64) == 32 + 32 and PROFILE.wire(Kind.AG_F_N, 64) == 32
    cost = CostModel(PROFILE).message(Kind.RS_N, ((0, 16),))
    assert cost.transfer == pytest.approx(32 * 0.1 / 16 + 32 / 16)


def test_one_buffer_serves_both_collectives_of_a_reduction() -> None:
    assert [Collectives(name).buffer(Kind.RS_N, 64, 8, 2) for name in ("native", "ring")] == [0, 32]
    assert [Collectives(name).buffer(Kind.AG_F_N, 64, 8, 2) for name in ("native", "ring")] == [64, 0]


def test_planners_choose_among_what_there_is() -> None:
    assert set(choices(PROFILE)) == set(Strategy)
    for planner in (Greedy(), Ilp(seconds=2.0)):  # bytes are dear across, and latency nothing: two reductions of halves win
        assert planner.choose(PlanningProblem(Job(PROFILE), None)).strategies == (Strategy.hsdp_no_reshard,) * 3
    assert Strategy.hsdp_no_reshard in make_plan(PROFILE, Joint(seconds=2.0)).strategies
    alone = chain(8, 16, world=4)
    assert not any(k.in_node for k in choices(alone))
    with pytest.raises(PlanError, match="hsdp shards within a node"):
        StrategyAssignment(Job(alone), (Strategy.hsdp, Strategy.hsdp))


@pytest.mark.parametrize(("strategy", "kept"), [("fsdp", "sdp"), ("sdp", "sdp"), ("hsdp", "hsdp_no_reshard"), ("dp", "dp")])
def test_a_unit_that_is_not_resharded(strategy: str, kept: str) -> None:
    assert Strategy(strategy).without_reshard is Strategy(kept)
