"""Plans whose steps tell the costs of messages apart (:mod:`mdcs.profiler.cost_fit`)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.job import Job
from mdcs.plan.period import Op, Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem, StrategyDecision
from mdcs.planner.pipeline import make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.registry import Scheduler, StrategyPlanner
from mdcs.planner.schedulers import Partitioning, StrategyAssignment, Wfbp, buckets, fuse
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.sizes import MIB

_APART = 4
"""Units that are cut have at least so many messages."""
_FUSED = 2
"""Fused messages have about so many units."""
_SMALLEST_MIB = 0.25  # units are not cut into smaller blocks


@dataclass(frozen=True)
class _Halves:
    """Two of four units are not sharded, and two are in their updates."""

    name: ClassVar[str] = "halves"

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        units = range(len(problem.profile.units))
        decision = StrategyDecision(tuple(Strategy.dp if u % 4 < 2 else Strategy.zero2 for u in units))
        problem.require(decision.strategies, f"strategies {self.name}")
        return decision


@dataclass(frozen=True)
class _HalfCut(Partitioning):
    """Cuts every second unit, and sends messages when they are ready."""

    def partition(self, mix: StrategyAssignment) -> tuple[tuple[int, ...], ...]:
        cut, whole = super().partition(mix), mix.unpartitioned_blocks()
        return tuple((cut if u % 2 else whole)[u] for u in range(len(cut)))


@dataclass(frozen=True)
class _HalfFused:
    """Fuses neighbours into messages of ``bucket_mib``, every second of which is sent as its parts instead."""

    bucket_mib: float
    name: ClassVar[str] = "fusion"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        def groups(stream: list[Op]) -> list[list[Op]]:
            fused = enumerate(buckets(mix, stream, self.bucket_mib))
            return [part for i, group in fused for part in ([[op] for op in group] if i % 2 else [group])]

        return fuse(mix, self.name, groups)


def calibration_plans(job: Job, budget: int | None = None) -> list[Plan]:
    """Return the plans under which a run's first steps determine the costs of messages.

    The first has every operation, but for those within nodes, and long and short messages of each: of whole units and
    of blocks of others, or if units are small of several fused and of others alone. The last is what greedy makes of
    these costs.

    ``budget``: bytes per rank. Strategies that do not keep it are replaced by a mix that does. Raises InfeasibleBudget.
    """
    unit, block = statistics.median(layout.param_bytes for layout in job.profile.layouts) / MIB, job.profile.block / MIB
    is_large = unit >= _APART * _SMALLEST_MIB
    mixed: Scheduler = _HalfCut(min(block, unit / _APART)) if is_large else _HalfFused(_FUSED * unit)
    wanted: list[tuple[StrategyPlanner, Scheduler]] = [(_Halves(), mixed), (Greedy(), Priority())]
    if job.profile.per_node:
        wanted.insert(1, (Uniform("hsdp"), Wfbp()))
    found: dict[str, Plan] = {}
    for strategy, scheduler in wanted:
        plan = _plan(job, strategy, scheduler, budget)
        found.setdefault(plan.execution_hash, plan)
    return [*found.values()]


def _plan(job: Job, strategy: StrategyPlanner, scheduler: Scheduler, budget: int | None) -> Plan:
    try:
        return make_plan(job, strategy, scheduler, budget=budget)
    except InfeasibleBudget:
        return make_plan(job, Greedy(), scheduler, budget=budget)
