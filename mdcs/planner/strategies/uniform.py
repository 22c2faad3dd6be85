"""Every unit the same."""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan.messages import Strategy
from mdcs.planner.judge import Judge
from mdcs.profile.contents import Profile


@dataclass(frozen=True)
class Uniform:
    kind: str = "fsdp"

    def choose(self, profile: Profile, judge: Judge) -> tuple[Strategy, ...]:
        mix = (Strategy(self.kind),) * len(profile.units)
        judge.require(mix, f"strategy {self.kind}")
        return mix
