"""A random strategy per unit, seeded, always within the budget. The baseline that every planner must beat."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.strategy import choices
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision


@dataclass(frozen=True)
class RandomMix(Checked):
    """Draws a strategy per unit. The same ``seed`` gives the same mix."""

    name: ClassVar[str] = "random"

    seed: int = option(0, "seed of the draw", at_least=0)

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return a random mix that fits.

        While the mix is too large, one more random unit becomes fsdp, or takes its strategy in the leanest mix if all
        fsdp does not fit. Raises InfeasibleBudget.
        """
        smallest = problem.starts()[-1]
        rng = random.Random(self.seed)
        mix = [rng.choice(choices(problem.profile)) for _ in problem.profile.units]
        order = [u for u, s in enumerate(mix) if s is not smallest[u]]
        rng.shuffle(order)
        while not problem.fits(mix):
            unit = order.pop()
            mix[unit] = smallest[unit]
        return StrategyDecision(tuple(mix))
