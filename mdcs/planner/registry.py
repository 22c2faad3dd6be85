"""Planners: what each is, and those of mdcs by name with their defaults.

A planner is any object with the methods below. One that a config can choose is a frozen dataclass whose fields are
options (:mod:`mdcs.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeGuard, TypeVar

from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision
from mdcs.planner.ilp.joint import Joint, MemoryAware
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import (
    Dear,
    Fusion,
    MgWfbp,
    Partitioning,
    RandomOrder,
    Sequential,
    StrategyAssignment,
    Wfbp,
)
from mdcs.planner.strategies import Greedy, RandomMix, Uniform

_T = TypeVar("_T")


class _Named(Protocol):
    @property
    def name(self) -> str:
        """Name in tables."""
        ...


class StrategyPlanner(_Named, Protocol):
    """Chooses strategies, judged with the sequential schedule."""

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return a mix that fits the problem's budget. Raises InfeasibleBudget, with the smallest feasible budget."""
        ...


class JointPlanner(_Named, Protocol):
    """Chooses strategies and schedule together. It takes no scheduler, and divides the budget itself."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Return a plan within the problem's budget. Raises InfeasibleBudget."""
        ...


class Scheduler(_Named, Protocol):
    """Turns a mix into messages."""

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return a plan for the mix, within ``mix.budget`` or not: :mod:`mdcs.planner.budget_repair` fits it
        afterwards.
        """
        ...


STRATEGIES: dict[str, Callable[[], StrategyPlanner | JointPlanner]] = {
    **{str(strategy): partial(Uniform, str(strategy)) for strategy in Strategy},
    "random": RandomMix,
    "greedy": Greedy,
    "ilp": Ilp,
    "joint": Joint,
}

SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "sequential": Sequential,
    "wfbp": Wfbp,
    "fusion": Fusion,
    "mg_wfbp": MgWfbp,
    "partitioning": Partitioning,
    "priority": Priority,
    "dear": Dear,
    "random": RandomOrder,
    "memory_aware": MemoryAware,
}


def decides_schedule(strategy: StrategyPlanner | JointPlanner) -> TypeGuard[JointPlanner]:
    """Return whether the planner needs no scheduler."""
    return hasattr(strategy, "plan")


def strategy_named(name: str) -> StrategyPlanner | JointPlanner:
    """Return the strategy planner of this name. Raises ValueError, which lists the names, for an unknown name."""
    return _named("strategy", STRATEGIES, name)


def scheduler_named(name: str) -> Scheduler:
    """Return the scheduler of this name. Raises ValueError, which lists the names, for an unknown name."""
    return _named("scheduler", SCHEDULERS, name)


def _named(what: str, table: Mapping[str, Callable[[], _T]], name: str) -> _T:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: {', '.join(table)}")
    return table[name]()
