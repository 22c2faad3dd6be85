"""The schedule without overlap: compute waits for every message. It decides whether strategies fit a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy_assignment import StrategyAssignment


def sequential(mix: StrategyAssignment) -> Plan:
    """Return the sequential schedule. A reduction is sent when it is ready, a gather when it is needed."""
    messages = []
    # Reductions come first, so that gradients are freed before the next unit is gathered.
    for op in sorted(mix.ops, key=lambda op: op.kind.is_gather):
        slot = mix.period.window(op)[1 if op.kind.is_gather else 0]
        messages.append(Message(op.kind, ((op.unit, 0),), slot, blocking=True, micro=op.micro))
    return mix.plan("sequential", mix.unpartitioned_blocks(), messages)


@dataclass(frozen=True)
class Sequential:
    """The scheduler of :func:`sequential`."""

    name: ClassVar[str] = "sequential"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the sequential schedule."""
        return sequential(mix)
