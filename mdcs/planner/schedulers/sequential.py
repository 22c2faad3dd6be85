"""The schedule without overlap: compute waits for every message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential


@dataclass(frozen=True)
class Sequential:
    """Sends every message when it is ready (reductions) or needed (gathers)."""

    name: ClassVar[str] = "sequential"

    def schedule(self, mix: Mix) -> Plan:
        """Return the sequential schedule (:func:`mdcs.plan.mix.sequential`).

        It also decides whether strategies fit a budget.
        """
        return sequential(mix)
