"""The cost model, by hand: a link of 2 ns per byte and 1 ms per message, two ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.cost import TIMES, CostModel, Prediction, StepTimes
from mdcs.plan.period import Strategy
from mdcs.plan.schedule import MessageSeconds
from mdcs.profile.link import Contention, Kind
from mdcs.profile.schema import Optimizer, read
from tests.mdcs.profiles import chain, link

MB = 10**6
ADAM = Optimizer("adam", 2, seconds_per_element=1e-8, seconds_per_run=1e-3)
PROFILE = chain(MB, link=link(2e-9, 1e-3), optimizer=ADAM, copy_seconds_per_byte=1e-9)


def test_a_reduce_scatter_is_sent_and_updates_its_part() -> None:
    cost = CostModel(PROFILE).message(Kind.RS, ((0, MB),))
    # Half of 4 MB is sent; this rank updates half of the elements.
    assert cost == pytest.approx(MessageSeconds(1e-3, 0.0, 4e-3, 0.0, 5e-3 + 1e-3, 4e-3, 0.0))


def test_a_fused_message_is_packed_and_unpacked() -> None:
    model = CostModel(PROFILE)
    assert model.message(Kind.RS, ((0, MB // 2),) * 2).copy == pytest.approx(8e-3)
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


# ---- parts of a step


@given(st.lists(st.floats(0, 10), min_size=4, max_size=4))
def test_a_step_is_computing_exposed_messages_and_idling(parts: list[float]) -> None:
    computing, both, exposed, idle = parts
    times = StepTimes.of(computing + both + exposed + idle, computing + both, both + exposed, both)
    assert times.compute_s is not None and times.exposed_s is not None and times.idle_s is not None
    assert times.compute_s + times.exposed_s + times.idle_s == pytest.approx(times.step_s)
    assert times.stalled_s == pytest.approx(times.exposed_s + times.idle_s)
    assert times.idle_s >= 0 and times.exposed_s >= 0


def test_what_is_not_known_leaves_unknown_what_follows_from_it() -> None:
    assert set(asdict(StepTimes.of(1.0)).values()) == {1.0, None}
    waits = StepTimes.of(1.0, compute_s=0.75)
    assert (waits.stalled_s, waits.exposed_s, waits.idle_s, waits.overlap_ratio) == (0.25, None, None, None)
    messages = StepTimes.of(1.0, communication_s=0.5, overlap_s=0.25)
    assert (messages.stalled_s, messages.exposed_s, messages.idle_s, messages.overlap_ratio) == (None, 0.25, None, 0.5)


def test_sums_that_differ_in_the_last_bit_are_not_negative() -> None:
    times = StepTimes.of(0.3, compute_s=0.1 + 0.2, communication_s=0.1, overlap_s=0.1)
    assert (times.stalled_s, times.exposed_s, times.idle_s, times.overlap_ratio) == (0, 0, 0, 1)


def test_times_come_back_from_a_file() -> None:
    prediction = Prediction.of(2.0, 1.5, 1.0, 0.5, peak_bytes=7, memory={"total": 7})
    again = read(Prediction, json.loads(json.dumps(asdict(prediction))))
    assert again == prediction and again != replace(prediction, step_s=3.0)
    assert tuple(asdict(prediction)) == (*TIMES, "peak_bytes", "memory")
