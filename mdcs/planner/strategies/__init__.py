"""Strategy planners: a profile and bytes in, a strategy per unit out, judged with the sequential schedule.

Add one by writing a frozen dataclass with ``choose(profile, judge)`` and naming it here.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mdcs.plan.messages import Plan, Strategy
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.judge import InfeasibleBudget, Judge
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.random_mix import RandomMix
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.contents import Profile


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
