"""No overlap: compute waits for every message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential


@dataclass(frozen=True)
class Sequential:
    """Every message at the moment it is ready (reductions) or needed (gathers)."""

    name: ClassVar[str] = "sequential"

    def schedule(self, mix: Mix) -> Plan:
        """The schedule by which budgets judge strategies (:func:`mdcs.plan.mix.sequential`)."""
        return sequential(mix)
