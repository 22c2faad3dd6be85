"""mdcs: memory-aware communication scheduling for sharded data-parallel training.

Profile a model, plan a sharding strategy and a communication schedule under one byte budget, run the plan::

    with mdcs.parallelize(model, optimizer, budget="75%"):  # of what DistributedDataParallel needs
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

Or one by one::

    units = mdcs.partition(model, mdcs.ByClass(("GPT2Block",)))
    plan = mdcs.autoplan(model, optimizer, units, lambda: loss_of(model, batch), budget=2 * 2**30)
    with mdcs.parallelize(model, optimizer, plan, units) as parallel:
        …
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mdcs.plan.job import Job
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message
from mdcs.planner.batch import BatchScaling, fastest_batch, largest_batch
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import floor_bytes, make_plan
from mdcs.profile.link import Collectives, Kind, Link
from mdcs.profile.schema import Profile
from mdcs.simulator.simulate import replay

if TYPE_CHECKING:
    from mdcs.api.offline import autoplan, autoprofile
    from mdcs.api.session import Session, resume
    from mdcs.api.start import parallelize
    from mdcs.checkpoint.dcp_shards import read_checkpoint
    from mdcs.checkpoint.directory import CheckpointError
    from mdcs.emulation import Emulation
    from mdcs.model.optimizers import WithAverage
    from mdcs.model.units import ByClass, ByLeaf, BySize, ModelUnit, UnsupportedModel, partition
    from mdcs.runtime.errors import RunError
    from mdcs.runtime.gradient_scaling import LossScale

# What needs torch is imported on first use: planning and analysis start without it.
_LAZY = {
    **dict.fromkeys(("autoplan", "autoprofile"), "mdcs.api.offline"),
    **dict.fromkeys(("Session", "resume"), "mdcs.api.session"),
    "parallelize": "mdcs.api.start",
    "CheckpointError": "mdcs.checkpoint.directory",
    "read_checkpoint": "mdcs.checkpoint.dcp_shards",
    "RunError": "mdcs.runtime.errors",
    "Emulation": "mdcs.emulation",
    "LossScale": "mdcs.runtime.gradient_scaling",
    "WithAverage": "mdcs.model.optimizers",
    **dict.fromkeys(("ByClass", "ByLeaf", "BySize", "ModelUnit", "UnsupportedModel", "partition"), "mdcs.model.units"),
}

__version__ = "0.1.0"
__all__ = [
    "BatchScaling", "ByClass", "ByLeaf", "BySize", "CheckpointError", "Collectives", "Emulation", "InfeasibleBudget",
    "Job", "Kind", "Link", "LossScale", "Message", "ModelUnit", "Plan", "PlanError", "Profile", "RunError", "Session",
    "Strategy", "UnsupportedModel", "WithAverage", "autoplan", "autoprofile", "fastest_batch", "floor_bytes",
    "largest_batch", "make_plan", "parallelize", "partition", "read_checkpoint", "replay", "resume",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
