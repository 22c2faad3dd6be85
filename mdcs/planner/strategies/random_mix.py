"""A random strategy per unit, seeded, always within the budget: the baseline every planner must beat."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.strategy import choices
from mdcs.planner.interfaces import Choice
from mdcs.planner.judge import Judge


@dataclass(frozen=True)
class RandomMix(Checked):
    """A draw per unit; the same for the same ``seed``."""

    name: ClassVar[str] = "random"

    seed: int = option(0, "seed of the draw", at_least=0)

    def choose(self, judge: Judge) -> Choice:
        """Draw every unit; while the mix is too large, make one more random unit fsdp, or what the floor's mix has where all fsdp
        does not fit. Raises InfeasibleBudget.
        """
        smallest = judge.starts()[-1]
        rng = random.Random(self.seed)
        mix = [rng.choice(choices(judge.profile)) for _ in judge.profile.units]
        order = [u for u, s in enumerate(mix) if s is not smallest[u]]
        rng.shuffle(order)
        while not judge.fits(mix):
            unit = order.pop()
            mix[unit] = smallest[unit]
        return Choice(tuple(mix))
