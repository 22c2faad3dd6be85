"""The planners of mdcs by name, with their defaults: for :func:`mdcs.autoplan`, and for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mdcs.plan.strategy import RENAMED, Strategy
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.memory_aware import MemoryAware
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.interfaces import JointPlanner, Scheduler, StrategyPlanner
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.schedulers.fusion import Fusion, MgWfbp
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.schedulers.random_order import RandomOrder
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.schedulers.wfbp import Partitioning, Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.random_mix import RandomMix
from mdcs.planner.strategies.uniform import Uniform

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


def strategy_named(name: str) -> StrategyPlanner | JointPlanner:
    """Return the strategy planner of this name, with its defaults.

    Raises ValueError, which lists the names, for an unknown name.
    """
    name = str(Strategy(name)) if name in RENAMED else name
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]()


def scheduler_named(name: str) -> Scheduler:
    """Return the scheduler of this name, with its defaults.

    Raises ValueError, which lists the names, for an unknown name.
    """
    if name not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {name!r}: {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]()
