"""What a strategy planner and a scheduler are. Anything with these methods is one, wherever it is defined.

To be chosen in a config it is a frozen dataclass whose fields are options (:mod:`mdcs.options`), and a YAML file names it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeGuard

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.plan.strategy import Strategy
from mdcs.planner.judge import Judge


class Choice(NamedTuple):
    """A strategy per unit, and what became of a solver's work if one was asked."""

    strategies: tuple[Strategy, ...]
    outcome: str = ""


class StrategyPlanner(Protocol):
    """Chooses strategies, judged with the sequential schedule."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def choose(self, judge: Judge) -> Choice:
        """A mix that fits the judge's budget. Raises InfeasibleBudget, with the smallest feasible one, if there is none."""
        ...


class JointPlanner(Protocol):
    """Decides strategies and schedule together, so it takes no scheduler, and divides the budget itself."""

    @property
    def decides_schedule(self) -> bool:
        """True, which tells it from other strategies."""
        ...

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def plan(self, judge: Judge) -> Plan:
        """Strategies and messages within the judge's budget. Raises InfeasibleBudget."""
        ...


class Scheduler(Protocol):
    """Turns a mix into messages."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def schedule(self, mix: Mix) -> Plan:
        """Messages for the mix. ``mix.budget`` may be ignored: what does not fit is delayed and split afterwards
        (:func:`mdcs.planner.fit.fit`).
        """
        ...


def decides_schedule(strategy: StrategyPlanner | JointPlanner) -> TypeGuard[JointPlanner]:
    """Whether the planner needs no scheduler."""
    return bool(getattr(strategy, "decides_schedule", False))
