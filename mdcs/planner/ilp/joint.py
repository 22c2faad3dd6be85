"""Strategies and schedule in one integer program under the whole budget (:mod:`mdcs.planner.ilp.slot_model`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import option
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.slot_planner import SlotPlanner


@dataclass(frozen=True)
class Joint(SlotPlanner):
    """Strategies and schedule in one program, under the whole budget.

    ``trials`` is read by code that has ranks to run plans (:mod:`mdcs.profiler.autotune`). It does not change the plan.
    """

    name: ClassVar[str] = "joint"

    trials: int | None = option(
        None,
        "so many plans, heuristics' too, run before training, and the fastest is kept; null: 3 in a long run",
        at_least=1,
    )

    def plan(self, problem: PlanningProblem) -> Plan:
        """Return a plan within ``problem.budget``. Raises InfeasibleBudget.

        Where recomputation is open but not needed, the plan without it comes first. The rest goes on from it, in half
        as many seconds, so the result is never slower.
        """
        problem.starts()
        kept = dataclasses.replace(problem, job=dataclasses.replace(problem.job, recompute=()), recomputes=False)
        if not problem.recomputes or problem.budget is None or kept.floor > problem.budget:
            return self.solved(problem, self.name)
        first = self.solved(kept, self.name)
        return dataclasses.replace(self, seconds=self.seconds / 2).solved(problem, self.name, start=first)
