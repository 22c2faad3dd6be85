"""Strategy planners: a profile and bytes in, a strategy per unit out, judged with the sequential schedule.

Add one by writing a frozen dataclass with ``choose(profile, judge)`` and naming it here.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mdcs.plan import Plan, Strategy
from mdcs.profile import Profile
from mdcs.strategies.base import InfeasibleBudget, Judge
from mdcs.strategies.greedy import Greedy
from mdcs.strategies.ilp import Ilp
from mdcs.strategies.joint import Joint
from mdcs.strategies.random_mix import RandomMix
from mdcs.strategies.uniform import Uniform


class StrategyPlanner(Protocol):
    def choose(self, profile: Profile, judge: Judge) -> tuple[Strategy, ...]:
        """A strategy per unit that fits; raises InfeasibleBudget."""
        ...


@runtime_checkable
class JointPlanner(Protocol):
    def plan(self, judge: Judge) -> Plan:
        """Strategies and messages within the judge's budget; raises InfeasibleBudget."""
        ...


STRATEGIES: dict[str, type[StrategyPlanner] | type[JointPlanner]] = {
    "uniform": Uniform, "random": RandomMix, "greedy": Greedy, "ilp": Ilp, "joint": Joint,
}  # fmt: skip

__all__ = ["STRATEGIES", "Ilp", "InfeasibleBudget", "JointPlanner", "Judge", "StrategyPlanner"]
