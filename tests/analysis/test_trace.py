"""The Chrome trace of a timeline, and rows for intervals that overlap."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.pictures.period import chrome_trace, sublanes
from mdcs.telemetry.timeline import PREDICTED_RANK, Interval, RankTimeline, Timeline, length
from tests.mdcs.telemetry.timelines import two_ranks

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=12)


@given(spans)
def test_sublanes_never_put_two_overlapping_messages_in_one_row(a):
    messages = [Interval("message", "message", "AR", "unit", float(start), float(end)) for start, end in a]
    rows = sublanes(messages)
    for row in set(rows):
        members = [m for m, r in zip(messages, rows, strict=True) if r == row]
        assert math.isclose(length(members), sum(m.duration_s for m in members))
    if all(end > start for start, end in a):
        assert len(set(rows)) == max((sum(start <= x < end for start, end in a) for x in range(60)), default=0)


@pytest.fixture
def timeline():
    return two_ranks()


def test_the_trace_has_a_process_per_rank_and_durations_in_microseconds(timeline):
    trace = chrome_trace(timeline)
    json.dumps(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1"]
    event = next(e for e in trace["traceEvents"] if e["name"] == "RS 1")
    assert (event["ph"], event["ts"], event["dur"]) == ("X", pytest.approx(5e5), pytest.approx(2e5))
    assert event["args"] == {"unit": "block.1", "kind": "RS", "bytes": 4096}
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 7


def test_messages_in_flight_together_get_threads_of_their_own(timeline):
    events = chrome_trace(timeline)["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "messages", "messages 2", "updates"} == set(threads.values())
    where = {e["name"]: threads[e["pid"], e["tid"]] for e in events if e["ph"] == "X"}
    assert (where["RS 1"], where["AG 1"]) == ("messages", "messages 2")


def test_memory_becomes_counters_at_the_start_of_each_slot_in_order(timeline):
    first, *others = timeline.ranks
    computes = [replace(i, name="F again") if i.lane == "compute" else i for i in first.intervals]
    memory = tuple(replace(slot, slot="F again") for slot in timeline.memory)
    counters = [e for e in chrome_trace(timeline)["traceEvents"] if e["ph"] == "C"]
    assert [(c["ts"], c["args"]) for c in counters] == [(0.0, {"parameters": 10, "gradients": 20}), (5e5, {"parameters": 10})]
    again = replace(timeline, ranks=(replace(first, intervals=tuple(computes)), *others), memory=memory)
    counters = [e for e in chrome_trace(again)["traceEvents"] if e["ph"] == "C"]
    assert [c["ts"] for c in counters] == [0.0, 5e5]


def test_the_prediction_is_named_and_no_process_is_zero(timeline):
    predicted = Timeline(1.0, timeline.slots, (RankTimeline(PREDICTED_RANK, timeline.ranks[0].intervals),))
    events = chrome_trace(predicted)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted"}
    assert all(e["pid"] > 0 for e in events)
