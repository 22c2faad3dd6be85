"""Plans of units whose parameters are updated as wholes, by hand: one owner each, shares padded to the largest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.cost import CostModel
from mdcs.plan.job import Job
from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.validity import PlanError
from mdcs.planner.schedulers.random_order import RandomOrder
from mdcs.planner.schedulers.sequential import sequential
from mdcs.profile.layout import Layout, Section, WholeParameter, assign_owners
from mdcs.profile.link import Kind
from mdcs.profile.schema import Optimizer, Profile
from tests.mdcs.profiles import ADAM, chain

MATRICES = tuple(WholeParameter(n, state=4 * n, scratch=10 * n, seconds=n / 8) for n in (24, 8, 40, 32))


def profile_of(world: int = 2) -> Profile:
    """Unit a: four matrices of Muon and 16 elements of Adam."""
    plain = chain(120, 8, world=world, optimizer=Optimizer("muon"), more_optimizers=(ADAM,))
    a, b = plain.units
    section = replace(Section(8, 4, 4), optimizer=1)
    a = replace(a, segments=(104, 16), sections=(Section(104, 4, 4, parameters=MATRICES), replace(section, numel=16)))
    return replace(plain, units=(a, replace(b, sections=(section,))))


def plan_of(*strategies: str, world: int = 2) -> Plan:
    return sequential(StrategyAssignment(Job(profile_of(world)), tuple(map(Strategy, strategies))))


def test_the_largest_go_first_to_the_rank_that_has_the_least():
    # 40 and 8 on rank 0, 32 and 24 on rank 1: shares of 56.
    assert assign_owners((24, 8, 40, 32), 2) == ((56 + 32, 40, 0, 56), 56)
    assert assign_owners((24, 8, 40, 32), 1) == ((72, 96, 0, 40), 104)
    layout = Layout(profile_of().units[0].sections, 2)
    assert layout.sizes == (112, 16)
    owned = layout.sections[0].owned(2, 2)
    assert [[p.numel for p in own] for own in owned] == [[8, 40], [24, 32]]
    # Four ranks in nodes of two: a rank of a node has the parameters of two neighbours.
    assert [[p.numel for p in own] for own in layout.sections[0].owned(4, 2)] == [[40, 32], [24, 8]]


def test_state_scratch_and_seconds_are_those_of_the_rank_with_the_most():
    plan = plan_of("dp", "fsdp")
    assert Ledger(plan).at_rest["optimizer"] == 4 * 104 + (16 * 8 + 4) + (4 * 8 + 4)
    sharded = plan_of("fsdp", "fsdp")
    assert Ledger(sharded).at_rest["optimizer"] == 4 * 56 + (8 * 8 + 4) + (4 * 8 + 4)
    assert {Ledger(sharded, rank).at_rest["optimizer"] for rank in (0, 1)} == {4 * 56 + 68 + 36}
    assert Ledger(sharded).scratch[0, 0] == Ledger(plan).scratch[0, 0] == 400
    cost, (whole, flat) = CostModel(plan.profile), plan.profile.units[0].sections
    assert cost.section_update_s(Kind.AR, whole, 112) == 104 / 8
    assert cost.section_update_s(Kind.RS, whole, 112) == 56 / 8
    assert cost.section_update_s(Kind.AG_F, whole, 112) == cost.section_update_s(Kind.RS, flat, 16) == 0
    updates = zip(sharded.messages, sharded.seconds.update, strict=True)
    assert [update for m, update in updates if (0, 0) in m.parts and m.kind is Kind.RS] == [56 / 8]


def test_whole_parameters_are_one_block_and_go_alone():
    plan = plan_of("fsdp", "dp")
    assert plan.blocks == ((112, 16), (8,))
    assert all((0, 0) not in m.parts or len(m.parts) == 1 for m in plan.messages)
    assert StrategyAssignment(plan.job, plan.strategies).partition(16)[0][0] == 112
    assert all(RandomOrder(seed, max_blocks=5).schedule(StrategyAssignment(plan.job, plan.strategies)) for seed in range(20))
    with pytest.raises(PlanError, match="cut a section of parameters that are updated as wholes"):
        replace(plan, blocks=((56, 56, 16), (8,)))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_section_has_the_elements_of_its_parameters():
    with pytest.raises(ValueError, match="a section's parameters must have its 100 elements"):
        Section(100, 4, 4, parameters=MATRICES)
