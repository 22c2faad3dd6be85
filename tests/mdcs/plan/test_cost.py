"""The cost model, by hand: a link of 2 ns per byte and 1 ms per message, two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.cost import Cost, CostModel
from mdcs.plan.strategy import Strategy
from mdcs.profile.link import Contention, Kind
from mdcs.profile.schema import Optimizer
from tests.mdcs.profiles import chain, link

MB = 10**6
ADAM = Optimizer("adam", 2, seconds_per_element=1e-8, seconds_per_run=1e-3)
PROFILE = chain(MB, link=link(2e-9, 1e-3), optimizer=ADAM, copy_seconds_per_byte=1e-9)


def test_a_reduce_scatter_is_sent_and_updates_its_part() -> None:
    cost = CostModel(PROFILE).message(Kind.RS, ((0, MB),))
    # Half of 4 MB is sent; this rank updates half of the elements.
    assert cost == pytest.approx(Cost(1e-3, 0.0, 4e-3, 0.0, 5e-3 + 1e-3, 4e-3, 0.0))


def test_a_fused_message_is_packed_and_unpacked() -> None:
    model = CostModel(PROFILE)
    assert model.copy_s(4 * MB, 2) == pytest.approx(8e-3) and model.copy_s(4 * MB, 1) == 0
    assert model.update_s(Kind.RS, [(0, MB // 2)] * 2) == pytest.approx(5e-3 + 2e-3)


def test_an_all_reduce_updates_all_and_a_gather_nothing() -> None:
    model = CostModel(PROFILE)
    assert model.update_s(Kind.AR, [(0, MB)]) == pytest.approx(10e-3 + 1e-3)
    assert model.update_s(Kind.AG_F, [(0, MB)]) == model.update_s(Kind.AG_B, [(0, MB)]) == 0


def test_a_message_beside_computing_takes_at_least_what_was_measured() -> None:
    slow = replace(PROFILE, contention=Contention(message_seconds=5e-3, seconds_per_byte=1e-9))
    beside, waited_for = (CostModel(slow).message(Kind.AG_F, ((0, MB),), blocking=b) for b in (False, True))
    assert (beside.transfer, beside.idle) == pytest.approx((5e-3 + 2e-3, 4e-3))
    assert waited_for.transfer == waited_for.idle == pytest.approx(4e-3)


@pytest.mark.parametrize(("gap_ms", "transfer_ms"), [(0, 7), (2, 5), (3, 4), (9, 4)])
def test_the_gap_is_in_what_a_message_takes_beside_computing(gap_ms: int, transfer_ms: int) -> None:
    contention = Contention(message_seconds=5e-3, seconds_per_byte=1e-9)  # 7 ms for 2 MB
    slow = replace(PROFILE, link=link(2e-9, 1e-3, gap=gap_ms * 1e-3), contention=contention)
    cost = CostModel(slow).message(Kind.AG_F, ((0, MB),))
    assert (cost.gap, cost.transfer) == pytest.approx((gap_ms * 1e-3, transfer_ms * 1e-3))


def test_what_computing_loses() -> None:
    contention = Contention(compute_per_message=1e-3, compute_per_byte=1e-9, compute_per_work=1.0)
    model = CostModel(replace(PROFILE, contention=contention))
    assert model.lost_s(MB, 0.5) == pytest.approx(1e-3 + 1e-3 + 0.5)


@pytest.mark.parametrize(
    ("strategy", "milliseconds"),
    [
        ("dp", 1 + 8 + 11),  # an all-reduce of 2 · 4 MB / 2, an update of all
        ("zero2", (1 + 4 + 6) + (1 + 4)),
        ("sdp", (1 + 4 + 6) + 3 * (1 + 4)),  # gathered in each of three micro-steps
        ("fsdp", (1 + 4 + 6) + 3 * 2 * (1 + 4)),
    ],
)
def test_a_unit_takes_its_messages_and_its_update(strategy: str, milliseconds: float) -> None:
    assert CostModel(PROFILE).unit_s(0, Strategy(strategy), micro_steps=3) == pytest.approx(milliseconds * 1e-3)


def test_extra_communication_is_beyond_all_dp() -> None:
    model = CostModel(PROFILE)
    assert model.extra_communication_s({"AR": 4 * MB}) == 0
    assert model.extra_communication_s({"RS": 2 * MB, "AG_F": 2 * MB, "AG_B": 2 * MB}) == pytest.approx(4e-3)
