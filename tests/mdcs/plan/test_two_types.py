"""Plans of units of two types around one module, by hand: messages have one type, and the ledger adds both up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.job import Job
from mdcs.plan.ledger import Ledger
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message
from mdcs.planner.schedulers import Fusion, StrategyAssignment, sequential
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile
from tests.mdcs.profiles import ADAM, chain

AR, RS, AG_F, AG_B, *_ = Kind


def profile_of(*more: int) -> Profile:
    """Module a has 5 narrow elements with masters, and 3 wide ones; module b, if any, 8 narrow ones. Two ranks."""
    plain = chain(5, *more, optimizer=ADAM, types=("bfloat16", "", "float32"))
    a, *others = plain.units
    wide = replace(a, name="a[float32]", segments=(3,), dtype="float32", master_dtype="")
    return replace(plain, units=(a, *others, wide))


def plan_of(*strategies: str) -> Plan:
    job = Job(profile_of(*[8] * (len(strategies) - 2)))
    return sequential(StrategyAssignment(job, tuple(map(Strategy, strategies))))


def test_each_type_has_messages_of_its_own() -> None:
    plan = plan_of("dp", "zero2", "dp")
    assert plan.blocks == ((6,), (8,), (4,))
    assert [(m.kind, m.parts, plan.width(m), plan.payload(m)) for m in plan.messages] == [
        (RS, ((1, 0),), 2, 16), (AR, ((0, 0),), 2, 12), (AR, ((2, 0),), 4, 16), (AG_F, ((1, 0),), 2, 16),
    ]  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan
    fused = Fusion(1.0).schedule(StrategyAssignment(plan.job, (Strategy.dp,) * 3))
    assert {m.parts for m in fused.messages} == {((1, 0), (0, 0)), ((2, 0),)}


def test_a_message_of_two_types_is_refused() -> None:
    plan = plan_of("dp", "zero2", "dp")
    first, *rest = plan.messages
    both = Message(AR, ((0, 0), (2, 0)), plan.messages[1].slot, blocking=True)
    with pytest.raises(PlanError, match=r"message 1 \(AR of a, a\[float32\]\): carries elements of several types"):
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
    ledger = Ledger(plan_of(strategy, strategy))
    assert ledger.at_rest == {"parameters": parameters, "optimizer": optimizer}
