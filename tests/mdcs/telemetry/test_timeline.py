"""Interval arithmetic against a brute-force grid, and the timeline's file format."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.cost import StepTimes
from mdcs.telemetry.timeline import Interval, Timeline, intersection, length, step_times, union
from tests.mdcs.telemetry.timelines import two_ranks

GRID = 60

# Ends on whole numbers, so that the half-way points 0.5, 1.5 … of a unit grid measure every length exactly.
spans = st.lists(st.tuples(st.integers(0, GRID), st.integers(0, GRID)).map(lambda p: (float(min(p)), float(max(p)))), max_size=12)


def covered(spans_, point):
    return any(start <= point < end for start, end in spans_)


def grid_length(*sets):
    return sum(all(covered(s, x + 0.5) for s in sets) for x in range(GRID))


def compute(start, end, name="slot"):
    return Interval("compute", name, "F", "unit", start, end)


def message(start, end, name="message", size=0):
    return Interval("message", name, "AR", "unit", start, end, size)


@given(spans)
def test_a_union_is_disjoint_ordered_and_as_long_as_the_grid_says(a):
    merged = union(a)
    assert length(a) == grid_length(a)
    assert all(left[1] < right[0] for left, right in pairwise(merged))
    assert all(covered(a, x + 0.5) == covered(merged, x + 0.5) for x in range(GRID))
    assert union(merged) == merged


@given(spans, spans)
def test_an_intersection_is_what_the_grid_finds_in_both(a, b):
    assert length(intersection(a, b)) == grid_length(a, b)
    assert intersection(a, b) == intersection(b, a)
    assert length(intersection(a, b)) + length([*a, *b]) == length(a) + length(b)


@given(spans, spans, st.integers(0, GRID), st.integers(0, GRID))
def test_step_times_are_what_the_grid_finds_inside_the_step(computing, sending, x, y):
    begin, end = float(min(x, y)), float(max(x, y))
    intervals = [compute(*s) for s in computing] + [message(*s) for s in sending]
    step = [(begin, end)]
    times = step_times(intervals, begin, end)
    assert times.step_s == end - begin
    assert times.compute_s == grid_length(computing, step)
    assert times.communication_s == grid_length(sending, step)
    assert times.overlap_s == grid_length(computing, sending, step)
    assert times.stalled_s == times.step_s - times.compute_s
    assert times.exposed_s == times.communication_s - times.overlap_s
    idle = grid_length(step) - grid_length([*computing, *sending], step)
    assert times.idle_s == idle
    expected = times.overlap_s / times.communication_s if times.communication_s else 0.0
    assert times.overlap_ratio == expected


def test_a_step_by_hand():
    # compute  0====4   6=======10
    # messages   2=====6=7
    # update               (7–8: no part of either)
    # of the 2 s in which nothing computes, messages run in all
    times = step_times(
        [compute(0, 4), compute(6, 10), message(2, 6), message(5, 7), Interval("update", "u", "update", "u", 7, 8)], 0, 10
    )
    assert times == StepTimes.of(step_s=10, compute_s=8, communication_s=5, overlap_s=3)
    assert (times.exposed_s, times.stalled_s, times.idle_s, times.overlap_ratio) == (2, 2, 0, pytest.approx(0.6))


def test_a_step_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="before it begins"):
        step_times([], 1, 0)


@pytest.fixture
def timeline():
    return two_ranks()


def test_a_timeline_survives_the_disk(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_the_file_has_the_documented_keys(timeline):
    data = json.loads(timeline.to_json())
    assert set(data) == {"schema", "period_s", "slots", "ranks", "memory"}
    assert data["schema"] == 1
    assert data["ranks"][0]["intervals"][2] == {
        "lane": "message", "name": "RS 1", "kind": "RS", "unit": "block.1", "start": 0.5, "end": 0.7, "bytes": 4096,
    }  # fmt: skip
    assert data["memory"][0] == {"slot": "B1", "predicted": {"parameters": 10, "gradients": 20}, "measured": None}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "not a timeline"),
        ('{"schema": 1}', "'period_s'"),
        ('{"schema": 2, "period_s": 1, "slots": [], "ranks": []}', "schema 2"),
        ('{"schema": 1, "period_s": -1, "slots": [], "ranks": []}', "period"),
        ('{"schema": 1, "period_s": 1, "slots": [], "ranks": [{"rank": 0, "intervals": [{"x": 1}]}]}', "not a timeline"),
        ('{"schema": 1, "period_s": 1', "delimiter"),
    ],
)
def test_what_is_no_timeline_is_refused_with_the_reason(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        Timeline.from_json(text)


def test_step_times_of_a_rank(timeline):
    times = timeline.times_of(0)
    assert times.communication_s == pytest.approx(0.4)
    assert times.overlap_s == pytest.approx(0.3)
    with pytest.raises(KeyError, match="rank 7"):
        timeline.times_of(7)
