"""The memory-aware ILP schedule of a strategy mix: maximal overlap within the bytes that are left.

The slot model (:mod:`mdcs.planner.ilp.slot_model`) with the strategies fixed: every operation is sent once, reductions before the
gathers that follow them, memory per slot within the budget, as little exposed as possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.planner.ilp.slot_planner import SlotPlanner
from mdcs.planner.judge import Judge


@dataclass(frozen=True)
class MemoryAware(SlotPlanner):
    """Plans with the budget of the mix."""

    name: ClassVar[str] = "memory_aware"

    def schedule(self, mix: Mix) -> Plan:
        """The best schedule found, the heuristics' among them. Raises PlanError if there is none within the mix's budget."""
        return self.solved(Judge(mix.job, mix.budget), self.name, mix.strategies)
