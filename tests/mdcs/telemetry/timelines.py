"""A timeline for tests of the format and of its pictures."""

from __future__ import annotations

from mdcs.telemetry.timeline import Interval, RankTimeline, SlotMemory, Timeline


def two_ranks() -> Timeline:
    """One period of a block on two ranks, the second of which has sent nothing."""
    rank_0 = (
        Interval("compute", "B1", "B", "block.1", 0.0, 0.5),
        Interval("compute", "F1", "F", "block.1", 0.5, 0.8),
        Interval("message", "RS 1", "RS", "block.1", 0.5, 0.7, 4096),
        Interval("message", "AG 1", "AG_F", "block.1", 0.6, 0.9, 4096),
        Interval("update", "update 1", "update", "block.1", 0.7, 0.75),
    )
    return Timeline(
        period_s=1.0,
        slots=("B1", "F1"),
        ranks=(RankTimeline(0, rank_0), RankTimeline(1, rank_0[:2])),
        memory=(SlotMemory("B1", {"parameters": 10, "gradients": 20}, None), SlotMemory("F1", {"parameters": 10})),
    )
