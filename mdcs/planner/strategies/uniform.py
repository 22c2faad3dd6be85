"""One strategy for all units."""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.options import Checked, option
from mdcs.plan.strategy import Strategy
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision


@dataclass(frozen=True)
class Uniform(Checked):
    """All units have the strategy ``each``."""

    each: str = option("fsdp", "the strategy of all units", choices=tuple(map(str, Strategy)))

    @property
    def name(self) -> str:
        """Name of the strategy."""
        return self.each

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return the mix. Raises InfeasibleBudget, with the bytes that the mix needs, if it does not fit."""
        mix = (Strategy(self.each),) * len(problem.profile.units)
        problem.require(mix, f"strategy {self.each}")
        return StrategyDecision(mix)
