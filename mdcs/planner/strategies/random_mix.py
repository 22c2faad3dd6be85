"""A random strategy per unit, seeded, always within the budget: the baseline every planner must beat."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mdcs.plan.messages import Strategy
from mdcs.planner.judge import Judge
from mdcs.profile.contents import Profile


@dataclass(frozen=True)
class RandomMix:
    seed: int = 0

    def choose(self, profile: Profile, judge: Judge) -> tuple[Strategy, ...]:
        """Draw every unit; while the mix is too large, make one more random unit fsdp."""
        judge.require_floor()
        rng = random.Random(self.seed)
        mix = [rng.choice(list(Strategy)) for _ in profile.units]
        order = [u for u, s in enumerate(mix) if s is not Strategy.fsdp]
        rng.shuffle(order)
        while not judge.fits(mix):
            mix[order.pop()] = Strategy.fsdp
        return tuple(mix)
