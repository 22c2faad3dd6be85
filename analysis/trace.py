"""Timelines in the trace event format of Chrome and Perfetto, and rows for intervals that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdcs.telemetry.timeline import LANES, PREDICTED_RANK, Interval, Lane, Timeline

LANE_WORDS: dict[Lane, str] = {"compute": "compute", "message": "messages", "update": "updates"}
_THREADS_PER_LANE = 100


def sublanes(intervals: Sequence[Interval]) -> tuple[int, ...]:
    """Return one row per interval, in the order of `intervals`, so that no two intervals of a row overlap.

    Each interval gets the lowest free row (from 0): messages in flight together get different rows.
    """
    row_ends: list[float] = []
    rows = [0] * len(intervals)
    for index in sorted(range(len(intervals)), key=lambda i: (intervals[i].start, intervals[i].end)):
        interval = intervals[index]
        row = next((r for r, end in enumerate(row_ends) if end <= interval.start), len(row_ends))
        if row == len(row_ends):
            row_ends.append(interval.end)
        else:
            row_ends[row] = interval.end
        rows[index] = row
    return tuple(rows)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in the trace event format of Chrome and Perfetto (https://ui.perfetto.dev opens it).

    One process per rank, with threads for compute, messages and updates: complete ("X") events in microseconds. Memory
    is counter ("C") events of the first rank. Messages in flight together get threads "messages 2", "messages 3" …,
    because complete events of one thread must nest.
    """
    events: list[dict[str, Any]] = []
    for entry in timeline.ranks:
        pid = _process(entry.rank)
        events.append(_metadata("process_name", pid, 0, name=entry.label))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for lane_index, lane in enumerate(LANES):
            intervals = entry.lane(lane)
            rows = sublanes(intervals)
            first_tid = 1 + lane_index * _THREADS_PER_LANE
            for row in range(max(rows, default=0) + 1):
                name = LANE_WORDS[lane] if row == 0 else f"{LANE_WORDS[lane]} {row + 1}"
                events.append(_metadata("thread_name", pid, first_tid + row, name=name))
                events.append(_metadata("thread_sort_index", pid, first_tid + row, sort_index=first_tid + row))
            events += [
                {
                    "ph": "X", "name": interval.name, "cat": interval.kind, "pid": pid, "tid": first_tid + row,
                    "ts": interval.start * 1e6, "dur": interval.duration_s * 1e6,
                    "args": {"unit": interval.unit, "kind": interval.kind, "bytes": interval.bytes},
                }
                for interval, row in zip(intervals, rows, strict=True)
            ]  # fmt: skip
    events.extend(_memory_counters(timeline))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"period_s": timeline.period_s}}


def _process(rank: int) -> int:
    """Return the process id of a rank. Ids start at 1 (the prediction): trace viewers treat process 0 differently."""
    return rank - PREDICTED_RANK + 1


def _metadata(event: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def _memory_counters(timeline: Timeline) -> list[dict[str, Any]]:
    """Counters at the start of each slot, as the first rank computed it; none of slots that it did not record.

    A unit that is used several times has slots of one name, which are taken in order.
    """
    if not timeline.ranks:
        return []
    starts: dict[str, list[float]] = {}
    for interval in reversed(timeline.ranks[0].lane("compute")):
        starts.setdefault(interval.name, []).append(interval.start)
    placed = [(slot, starts[slot.slot].pop()) for slot in timeline.memory if starts.get(slot.slot)]
    return [
        {"ph": "C", "name": f"memory, {source} (bytes)", "pid": _process(timeline.ranks[0].rank), "ts": start * 1e6,
         "args": {category: size for category, size in sizes.items() if category != "total"}}
        for source in ("predicted", "measured")
        for slot, start in placed
        if (sizes := getattr(slot, source))
    ]  # fmt: skip
