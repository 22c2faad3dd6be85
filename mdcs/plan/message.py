"""A message of a plan: one collective on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdcs.plan.period import Period
from mdcs.profile.link import Kind


@dataclass(frozen=True)
class Message:
    """One collective on the wire.

    - ``kind``: the collective.
    - ``parts``: (unit, block) pairs. All elements have one width. A fused message carries several units, a partitioned
      one a block of a unit.
    - ``slot``: index into the period. The message may start when compute arrives there. A reduction may start earlier if
      its gradients are ready (:mod:`mdcs.plan.gradient_readiness`).
    - ``blocking``: compute waits at the slot until the message is done, before anything else is issued.
    - ``micro``: the micro-step whose slots use the message.
    """

    kind: Kind
    parts: tuple[tuple[int, int], ...]
    slot: int
    blocking: bool = False
    micro: int = 0


def windows(period: Period, messages: Sequence[Message]) -> tuple[tuple[int, int], ...]:
    """Return for each message the first slot at which it can be issued, and the slot that needs it (both unrolled)."""
    of, out = period.windows, []
    for m in messages:
        spans = [of[m.kind, u, m.micro] for u, _ in m.parts]
        out.append(spans[0] if len(spans) == 1 else (max(first for first, _ in spans), min(last for _, last in spans)))
    return tuple(out)
