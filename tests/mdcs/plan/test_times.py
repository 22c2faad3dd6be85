"""Where a step's time goes: what follows from what is known."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.times import TIMES, Prediction, StepTimes


def test_a_step_by_hand() -> None:
    times = StepTimes.of(10, compute_s=6, communication_s=5, overlap_s=2)
    assert (times.exposed_s, times.stalled_s, times.idle_s, times.overlap_ratio) == (3, 4, 1, 0.4)


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
    again = Prediction.from_dict(json.loads(json.dumps(asdict(prediction))))
    assert again == prediction and again != replace(prediction, step_s=3.0)
    assert tuple(asdict(prediction)) == (*TIMES, "peak_bytes", "memory")


def test_what_must_be_known_is_asked_for() -> None:
    with pytest.raises(TypeError, match="step_s"):
        StepTimes.from_dict({"compute_s": 1.0})
    with pytest.raises(TypeError, match="peak_bytes"):
        Prediction.from_dict({"step_s": 1.0, "memory": {}})
