"""Interfaces of strategy planners and schedulers. Any object with these methods is one.

A planner that a config can choose is a frozen dataclass whose fields are options (:mod:`mdcs.options`). A YAML file
names it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeGuard

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.plan.strategy import Strategy
from mdcs.planner.judge import Judge


class Choice(NamedTuple):
    """A strategy per unit. ``outcome``: status of the solver, empty if no solver was used."""

    strategies: tuple[Strategy, ...]
    outcome: str = ""


class StrategyPlanner(Protocol):
    """Chooses strategies, judged with the sequential schedule."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    def choose(self, judge: Judge) -> Choice:
        """Return a mix that fits the judge's budget.

        Raises InfeasibleBudget, with the smallest feasible budget, if there is none.
        """
        ...


class JointPlanner(Protocol):
    """Chooses strategies and schedule together. It takes no scheduler, and divides the budget itself."""

    @property
    def decides_schedule(self) -> bool:
        """True. Other strategy planners do not have this attribute."""
        ...

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    def plan(self, judge: Judge) -> Plan:
        """Return a plan within the judge's budget. Raises InfeasibleBudget."""
        ...


class Scheduler(Protocol):
    """Turns a mix into messages."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    def schedule(self, mix: Mix) -> Plan:
        """Return a plan for the mix.

        The scheduler may ignore ``mix.budget``: :func:`mdcs.planner.fit.fit` later delays and splits messages that do
        not fit.
        """
        ...


def decides_schedule(strategy: StrategyPlanner | JointPlanner) -> TypeGuard[JointPlanner]:
    """Whether the planner needs no scheduler."""
    return bool(getattr(strategy, "decides_schedule", False))
