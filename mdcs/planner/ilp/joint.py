"""Strategies and schedule in one integer program under the whole budget (:mod:`mdcs.planner.ilp.slot_model`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.messages import Plan
from mdcs.planner.ilp.slot_planner import SlotPlanner
from mdcs.planner.judge import Judge


@dataclass(frozen=True)
class Joint(SlotPlanner):
    """Strategies and schedule at once, under the whole budget."""

    name: ClassVar[str] = "joint"
    decides_schedule: ClassVar[bool] = True

    def plan(self, judge: Judge) -> Plan:
        """The whole plan within ``judge.budget``; raises InfeasibleBudget."""
        judge.require_floor()
        return self.solved(judge, self.name)
