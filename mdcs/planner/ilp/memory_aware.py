"""The memory-aware ILP schedule of a strategy mix: most overlap within the remaining bytes.

It is the slot model (:mod:`mdcs.planner.ilp.slot_model`) with fixed strategies. Every operation is sent once,
reductions come before the gathers that follow them, the memory of each slot stays within the budget, and exposed
communication is minimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.plan import Plan
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.slot_planner import SlotPlanner


@dataclass(frozen=True)
class MemoryAware(SlotPlanner):
    """Plans with the budget of the mix."""

    name: ClassVar[str] = "memory_aware"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the best schedule found, the heuristics' included.

        Raises PlanError if none is within the mix's budget.
        """
        return self.solved(PlanningProblem(mix.job, mix.budget), self.name, mix.strategies)
