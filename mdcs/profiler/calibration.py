"""Plans whose steps tell the costs of messages apart (:mod:`mdcs.profiler.cost_fit`)."""

from __future__ import annotations

import statistics

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.registry import Scheduler, StrategyPlanner
from mdcs.planner.schedulers import Dear, Partitioning, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.sizes import MIB

_APART = 4
"""At equal bytes, plans with many messages have at least so many times as many as plans with few."""
_SMALLEST_MIB = 0.25  # units are not cut into smaller blocks


def calibration_plans(job: Job, budget: int | None = None) -> list[Plan]:
    """Return a few plans under which a run's first steps determine the costs of messages.

    They have every collective that a plan of the job can have. At equal bytes some have :data:`_APART` times as many
    messages as others: messages of whole units, fused if units are small, beside blocks. Messages overlap with all of
    compute, with some and with little of it.

    ``budget``: bytes per rank. A strategy that does not keep it is replaced by a mix that does. Raises
    InfeasibleBudget.
    """
    unit, block = statistics.median(layout.param_bytes for layout in job.profile.layouts) / MIB, job.profile.block / MIB
    is_large = unit >= _APART * _SMALLEST_MIB
    few = Dear(bucket_mib=None if is_large else _APART * unit)
    many = min(block, unit / _APART) if is_large else unit
    wanted: list[tuple[str, Scheduler]] = [
        ("zero2", Priority(block_mib=many)),
        ("dp", few if few.bucket_mib else Wfbp()),
        ("zero2", few),
        ("dp", Partitioning(block_mib=many)),
        ("hsdp" if job.profile.per_node else "fsdp", Wfbp()),
    ]
    found: dict[str, Plan] = {}
    for strategy, scheduler in wanted:
        plan = _plan(job, strategy, scheduler, budget)
        found.setdefault(plan.execution_hash, plan)
    return [*found.values()]


def _plan(job: Job, strategy: str, scheduler: Scheduler, budget: int | None) -> Plan:
    planners: list[StrategyPlanner] = [Uniform(strategy), Greedy()]
    try:
        return make_plan(job, planners[0], scheduler, budget=budget)
    except InfeasibleBudget:
        return make_plan(job, planners[1], scheduler, budget=budget)
