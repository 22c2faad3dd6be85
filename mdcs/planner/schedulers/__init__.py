"""Communication schedulers: a strategy mix in, an ordered list of messages out.

A scheduler proposes; :func:`mdcs.planner.fit.fit` then delays or splits what does not fit the bytes
that the schedule may use. Add one by writing a frozen dataclass with ``schedule(mix) -> Plan`` and naming it here.
"""

from __future__ import annotations

from typing import Protocol

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.planner.ilp.memory_aware import MemoryAware
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.schedulers.fusion import Fusion, MgWfbp
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.schedulers.random_order import RandomOrder
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.schedulers.wfbp import Partitioning, Wfbp


class Scheduler(Protocol):
    def schedule(self, mix: Mix) -> Plan:
        """Messages for the mix; ``mix.budget`` may be ignored."""
        ...


SCHEDULERS: dict[str, type[Scheduler]] = {
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

__all__ = ["SCHEDULERS", "Mix", "Priority", "Scheduler"]
