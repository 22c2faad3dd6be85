"""Plans of units of two types, by hand: blocks end where sections do, messages have one width, and the ledger adds both up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.job import Job
from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.validity import PlanError
from mdcs.planner.schedulers.sequential import sequential
from mdcs.profile.layout import Section
from mdcs.profile.link import Kind
from tests.mdcs.profiles import ADAM, chain

AR, RS, AG_F, AG_B, *_ = Kind


def plan_of(*strategies: str) -> Plan:
    """Unit a: 5 narrow elements with masters and 3 wide ones; unit b, if any: 8 narrow ones. Two ranks."""
    plain = chain(*[8] * len(strategies), optimizer=ADAM, param_bytes=2, grad_bytes=2, master_bytes=4)
    a, *others = plain.units
    a = replace(a, segments=(5, 3), sections=(Section(5, 2, 2, 4), Section(3, 4, 4)))
    return sequential(StrategyAssignment(Job(replace(plain, units=(a, *others))), tuple(map(Strategy, strategies))))


def test_a_whole_unit_is_a_message_per_width() -> None:
    plan = plan_of("dp", "zero2")
    assert plan.blocks == ((6, 4), (8,))
    assert [(m.kind, m.parts, plan.width(m), plan.payload(m)) for m in plan.messages] == [
        (RS, ((1, 0),), 2, 16), (AR, ((0, 0),), 2, 12), (AR, ((0, 1),), 4, 16), (AG_F, ((1, 0),), 2, 16),
    ]  # fmt: skip
    assert StrategyAssignment(plan.job, plan.strategies).partition(64) == ((6, 4), (8,))
    assert Plan.from_json(plan.to_json()) == plan


def test_blocks_and_messages_of_two_widths_are_refused() -> None:
    plan = plan_of("dp", "zero2")
    with pytest.raises(PlanError, match=r"unit a: blocks \(10,\) must be cut where its sections end, at \(6, 10\)"):
        replace(plan, blocks=((10,), (8,)))
    first, *rest = plan.messages
    both = Message(AR, ((0, 0), (0, 1)), plan.messages[1].slot, blocking=True)
    with pytest.raises(PlanError, match=r"message 1 \(AR of a, a\): carries elements of several widths"):
        replace(plan, messages=(first, both, rest[-1]))


@pytest.mark.parametrize(
    ("strategy", "parameters", "optimizer"),
    [
        # State: two moments of 4 bytes for each element, and a counter of 4 bytes for each of the two blocks.
        ("dp", 6 * 2 + 4 * 4, 6 * 4 + (6 + 4) * 8 + 2 * 4),
        ("zero2", 6 * 2 + 4 * 4, 3 * 4 + (3 + 2) * 8 + 2 * 4),
        ("sdp", 2 * 4, 3 * 4 + (3 + 2) * 8 + 2 * 4),  # of the narrow ones the masters are all there is
    ],
)
def test_what_is_at_rest(strategy: str, parameters: int, optimizer: int) -> None:
    ledger = Ledger(plan_of(strategy))
    assert ledger.at_rest == {"parameters": parameters, "optimizer": optimizer}
