"""Strategies and schedule in one integer program under the whole budget (:mod:`mdcs.planner.ilp.slot_model`)."""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan.messages import Plan
from mdcs.planner.judge import Judge, SlotPlanner


@dataclass(frozen=True)
class Joint(SlotPlanner):
    def plan(self, judge: Judge) -> Plan:
        """The whole plan within ``judge.budget``; raises InfeasibleBudget."""
        judge.require_floor()
        return self.solved(judge, "joint")
