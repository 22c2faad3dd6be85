"""Plans of units whose parameters are updated as wholes, by hand: one owner each, shares padded to the largest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.cost import CostModel
from mdcs.plan.job import Job
from mdcs.plan.ledger import Ledger
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.schedulers import RandomOrder, StrategyAssignment, sequential
from mdcs.profile.layout import Layout, WholeParameter, assign_owners
from mdcs.profile.link import Kind
from mdcs.profile.schema import Optimizer, Profile
from tests.mdcs.profiles import ADAM, chain

MATRICES = tuple(WholeParameter(n, state=4 * n, scratch=10 * n, seconds=n / 8) for n in (24, 8, 40, 32))


def profile_of(world: int = 2) -> Profile:
    """Module a: four matrices of Muon, and 16 elements of Adam. Module b: 8 of Adam."""
    plain = chain(104, 8, world=world, optimizer=Optimizer("muon"), more_optimizers=(ADAM,))
    a, b = plain.units
    rest = replace(a, name="a[Adam]", segments=(16,), optimizer=1)
    return replace(plain, units=(replace(a, whole=MATRICES), replace(b, optimizer=1), rest))


def plan_of(*strategies: str, world: int = 2) -> Plan:
    a, b = map(Strategy, strategies)
    return sequential(StrategyAssignment(Job(profile_of(world)), (a, b, a)))


def test_the_largest_go_first_to_the_rank_that_has_the_least():
    # 40 and 8 on rank 0, 32 and 24 on rank 1: shares of 56.
    assert assign_owners((24, 8, 40, 32), 2) == ((56 + 32, 40, 0, 56), 56)
    assert assign_owners((24, 8, 40, 32), 1) == ((72, 96, 0, 40), 104)
    layout = Layout(104, 2, 4, 4, whole=MATRICES)
    assert layout.elements == 112
    assert [[p.numel for p in own] for own in layout.owned(2)] == [[8, 40], [24, 32]]
    # Four ranks in nodes of two: a rank of a node has the parameters of two neighbours.
    assert [[p.numel for p in own] for own in Layout(104, 4, 4, 4, whole=MATRICES).owned(2)] == [[40, 32], [24, 8]]


def test_state_scratch_and_seconds_are_those_of_the_rank_with_the_most():
    plan = plan_of("dp", "fsdp")
    assert Ledger(plan).at_rest["optimizer"] == 4 * 104 + (16 * 8 + 4) + (4 * 8 + 4)
    sharded = plan_of("fsdp", "fsdp")
    assert Ledger(sharded).at_rest["optimizer"] == 4 * 56 + (8 * 8 + 4) + (4 * 8 + 4)
    assert {Ledger(sharded, rank).at_rest["optimizer"] for rank in (0, 1)} == {4 * 56 + 68 + 36}
    assert Ledger(sharded).scratch[0, 0] == Ledger(plan).scratch[0, 0] == 400
    cost = CostModel(plan.profile)
    assert cost.update_s(Kind.AR, [(0, 112)]) == 104 / 8
    assert cost.update_s(Kind.RS, [(0, 112)]) == 56 / 8
    assert cost.update_s(Kind.AG_F, [(0, 112)]) == cost.update_s(Kind.RS, [(2, 16)]) == 0
    updates = zip(sharded.messages, sharded.seconds.update, strict=True)
    assert [update for m, update in updates if (0, 0) in m.parts and m.kind is Kind.RS] == [56 / 8]


def test_whole_parameters_are_one_block_and_go_alone():
    plan = plan_of("fsdp", "dp")
    mix = StrategyAssignment(plan.job, plan.strategies)
    assert plan.blocks == ((112,), (8,), (16,))
    assert mix.partition(16)[0] == (112,)
    assert plan.profile.by_type(Kind.RS, ((1, 0), (0, 0), (2, 0))) == [((1, 0), (2, 0)), ((0, 0),)]
    assert all(RandomOrder(seed, max_blocks=5).schedule(mix).blocks[0] == (112,) for seed in range(20))
    with pytest.raises(PlanError, match="cut parameters that are updated as wholes"):
        replace(plan, blocks=((56, 56), *plan.blocks[1:]))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_unit_has_the_elements_of_its_parameters():
    with pytest.raises(ValueError, match="whole parameters must have its 100 elements"):
        replace(profile_of().units[0], segments=(100,))
