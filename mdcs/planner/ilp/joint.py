"""Strategies and schedule in one integer program under the whole budget (:mod:`mdcs.planner.ilp.slot_model`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import option
from mdcs.plan.messages import Plan
from mdcs.planner.ilp.slot_planner import SlotPlanner
from mdcs.planner.judge import Judge


@dataclass(frozen=True)
class Joint(SlotPlanner):
    """Strategies and schedule at once, under the whole budget.

    ``trials`` is for whoever has ranks (:mod:`mdcs.calibrate.trials`): the plan alone is the same.
    """

    name: ClassVar[str] = "joint"
    decides_schedule: ClassVar[bool] = True

    trials: int | None = option(
        None, "so many plans, heuristics' too, run before training, and the fastest is kept; null: 3 in a long run", at_least=1
    )

    def plan(self, judge: Judge) -> Plan:
        """The whole plan within ``judge.budget``; raises InfeasibleBudget."""
        judge.starts()
        return self.solved(judge, self.name)
