"""One collective on the wire, as a plan has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdcs.plan.period import Period
from mdcs.profile.link import Kind


@dataclass(frozen=True)
class Message:
    """One collective on the wire: ``kind`` and its ``parts`` as (unit, block) pairs, whose elements have one width.

    Several units make a fused message, a block of a unit a partitioned one. It may start once compute has
    arrived at ``slot`` (an index into the period), a reduction before that if its gradients are there (:mod:`mdcs.plan.early`);
    with ``blocking`` compute waits there until it is done, before anything else is issued.
    ``micro`` is the micro-step whose slots the message serves.
    """

    kind: Kind
    parts: tuple[tuple[int, int], ...]
    slot: int
    blocking: bool = False
    micro: int = 0


def windows(period: Period, messages: Sequence[Message]) -> tuple[tuple[int, int], ...]:
    """For each message the first slot at which it can be issued, and the slot that needs it (both unrolled)."""
    of, out = period.windows, []
    for m in messages:
        spans = [of[m.kind, u, m.micro] for u, _ in m.parts]
        out.append(spans[0] if len(spans) == 1 else (max(first for first, _ in spans), min(last for _, last in spans)))
    return tuple(out)
