"""Timelines: intervals of compute, messages and updates on one clock, and the step times that follow from them.

A timeline holds one recorded period: of each rank, measured (`timeline.json`), or of the replay
(`predicted_timeline.json`, rank `PREDICTED_RANK`). The same code draws and compares both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, get_args

from mdcs.plan.cost import StepTimes
from mdcs.profile.schema import read

SCHEMA = 1
PREDICTED_RANK = -1

Lane = Literal["compute", "message", "update"]
LANES: tuple[Lane, ...] = get_args(Lane)

Span = tuple[float, float]
"""(start, end) in seconds."""


class PeriodTrace(NamedTuple):
    """Times of everything in one period of one rank, in seconds from the begin of the period's first slot.

    - ``period_s``: until the first slot of the next period begins. ``slots``: compute in each slot.
    - ``messages``: each message of the plan on the link, which may end after the period. ``done``: when each is
      unpacked and its update has run. ``host_s``: the host enqueued them, where it runs ahead of a device.
    """

    period_s: float
    slots: tuple[Span, ...]
    messages: tuple[Span, ...]
    done: tuple[float, ...]
    host_s: float = 0.0


@dataclass(frozen=True)
class Interval:
    """One piece of work on one rank: a slot (`kind` F or B), a message (its kind) or an update (update), with its
    begin and end in seconds on the rank's clock, and the payload in bytes that a message moves.
    """

    lane: Lane
    name: str
    kind: str
    unit: str
    start: float
    end: float
    bytes: int = 0

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


# --- interval arithmetic


def union(intervals: Iterable[Interval | Span]) -> tuple[Span, ...]:
    """Return the disjoint spans covered by `intervals`, in order. Touching spans are merged, empty ones dropped."""
    merged: list[Span] = []
    reached = -math.inf
    for start, end in sorted([(i.start, i.end) if isinstance(i, Interval) else i for i in intervals]):
        if end <= start:
            continue
        if start > reached:
            merged.append((start, end))
        elif end > reached:
            merged[-1] = merged[-1][0], end
        reached = max(reached, end)
    return tuple(merged)


def length(intervals: Iterable[Interval | Span]) -> float:
    """Return the seconds covered by `intervals`; a moment covered twice counts once."""
    return math.fsum(end - start for start, end in union(intervals))


def intersection(a: Iterable[Interval | Span], b: Iterable[Interval | Span]) -> tuple[Span, ...]:
    """Return the disjoint spans covered by both `a` and `b`."""
    return overlaps(union(a), union(b))


def overlaps(left: Sequence[Span], right: Sequence[Span]) -> tuple[Span, ...]:
    """Return the disjoint spans covered by both `left` and `right`, which are results of :func:`union`."""
    common: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def times_of(step_s: float, compute: Iterable[Span], messages: Iterable[Span]) -> StepTimes:
    """Return the times of a step of ``step_s`` seconds whose compute and messages ran in these spans."""
    computing, sending = union(compute), union(messages)
    spans = computing, sending, overlaps(computing, sending)
    return StepTimes.of(step_s, *(math.fsum([end - start for start, end in each]) for each in spans))


def step_times(intervals: Sequence[Interval], begin: float, end: float) -> StepTimes:
    """Measure the step from `begin` to `end` (seconds); work outside of it belongs to the neighbouring steps. Raises
    ValueError when the step ends before it begins.
    """
    if end < begin:
        raise ValueError(f"the step ends at {end}, before it begins at {begin}")
    inside = {lane: [(max(begin, i.start), min(end, i.end)) for i in intervals if i.lane == lane] for lane in LANES}
    return times_of(end - begin, inside["compute"], inside["message"])


# --- the recorded period


@dataclass(frozen=True)
class RankTimeline:
    """The intervals of one rank; `rank` is `PREDICTED_RANK` for a simulated one."""

    rank: int
    intervals: tuple[Interval, ...]

    def lane(self, lane: Lane) -> tuple[Interval, ...]:
        """Return the intervals of one lane, by start."""
        return tuple(sorted((i for i in self.intervals if i.lane == lane), key=lambda i: (i.start, i.end)))

    @property
    def label(self) -> str:
        """Label for pictures and tables: "predicted", or "rank 0"."""
        return "predicted" if self.rank == PREDICTED_RANK else f"rank {self.rank}"


@dataclass(frozen=True)
class SlotMemory:
    """Peak bytes by category in one slot, per rank, and `total`, the highest sum; `measured` is None without
    measurements.
    """

    slot: str
    predicted: Mapping[str, int]
    measured: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Timeline:
    """One period: names of the slots in order, the intervals of every rank, in seconds from the start of the first
    backward slot, and the memory of every slot (may be empty).

    Raises ValueError for another schema, a period that is negative or not finite, and a rank named twice.
    """

    period_s: float
    slots: tuple[str, ...]
    ranks: tuple[RankTimeline, ...]
    memory: tuple[SlotMemory, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"timeline has schema {self.schema}, this version reads schema {SCHEMA}")
        if not (math.isfinite(self.period_s) and self.period_s >= 0):
            raise ValueError(f"timeline has a period of {self.period_s} s")
        ranks = [r.rank for r in self.ranks]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"timeline names a rank twice: {ranks}")

    def times_of(self, rank: int) -> StepTimes:
        """Return the step times of one rank over the period. Raises KeyError for a rank that is not in the timeline."""
        for entry in self.ranks:
            if entry.rank == rank:
                return step_times(entry.intervals, 0.0, self.period_s)
        raise KeyError(f"rank {rank} is not in the timeline, which has {[r.rank for r in self.ranks]}")

    def to_json(self) -> str:
        """Return the text of timeline.json."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read the text of timeline.json. Raises ValueError for anything that is not a timeline of this schema."""
        try:
            return read(cls, json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a timeline: {error}") from error
