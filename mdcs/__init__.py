"""mdcs: memory-aware communication scheduling for sharded data-parallel training.

Profile a model, plan a sharding strategy and a communication schedule under one byte budget, run the plan::

    units = mdcs.partition(model, mdcs.ByClass(("GPT2Block",)))
    plan = mdcs.autoplan(model, optimizer, units, lambda: loss_of(model, batch), budget=2 * 2**30)
    with mdcs.parallelize(model, optimizer, plan, units) as parallel:
        for batch in loader:
            loss_of(model, batch).backward()
            parallel.step()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mdcs.collectives import Collectives
from mdcs.link import Kind, Link
from mdcs.plan import Message, Plan, PlanError, Strategy
from mdcs.planner import floor_bytes, make_plan
from mdcs.profile import Profile
from mdcs.simulator import replay
from mdcs.strategies import InfeasibleBudget

if TYPE_CHECKING:
    from mdcs.agreement import autoplan
    from mdcs.measure.profiler import measure_profile
    from mdcs.runtime.api import Parallel, parallelize
    from mdcs.runtime.dispatcher import RunError
    from mdcs.runtime.emulation import Emulation
    from mdcs.runtime.scaling import LossScale
    from mdcs.runtime.state import merge_shards
    from mdcs.units import ByClass, ByLeaf, BySize, ModelUnit, UnsupportedModel, partition

# What needs torch is imported on first use: planning and analysis start without it.
_LAZY = {
    "autoplan": "mdcs.agreement",
    "measure_profile": "mdcs.measure.profiler",
    "Parallel": "mdcs.runtime.api",
    "parallelize": "mdcs.runtime.api",
    "RunError": "mdcs.runtime.dispatcher",
    "Emulation": "mdcs.runtime.emulation",
    "LossScale": "mdcs.runtime.scaling",
    "merge_shards": "mdcs.runtime.state",
    **dict.fromkeys(("ByClass", "ByLeaf", "BySize", "ModelUnit", "UnsupportedModel", "partition"), "mdcs.units"),
}

__version__ = "0.1.0"
__all__ = [
    "ByClass", "ByLeaf", "BySize", "Collectives", "Emulation", "InfeasibleBudget", "Kind", "Link", "LossScale", "Message",
    "ModelUnit", "Parallel", "Plan", "PlanError", "Profile", "RunError", "Strategy", "UnsupportedModel", "autoplan",
    "floor_bytes", "make_plan", "measure_profile", "merge_shards", "parallelize", "partition", "replay",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
