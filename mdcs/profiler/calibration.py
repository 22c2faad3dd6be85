"""Plans whose steps tell the costs of messages apart (:mod:`mdcs.profiler.cost_fit`), and runs of them."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.registry import Scheduler, StrategyPlanner
from mdcs.planner.schedulers import Dear, Partitioning, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.schema import Profile
from mdcs.profiler.autotune import run_periods
from mdcs.profiler.consensus import all_gather_object
from mdcs.profiler.cost_fit import Run, fit_costs
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PeriodTrace

_APART = 4
"""At equal bytes, plans with many messages have at least so many times as many as plans with few."""
_SMALLEST_MIB = 0.25  # units are not cut into smaller blocks
PLANS, PERIODS, _MOST_ROUNDS = 5, 2, 3
STEPS = PLANS * (2 + PERIODS)
"""Steps of one round of :func:`measure_contention`: each plan has a warm-up, and a last period that is cut short."""


def calibration_plans(job: Job | Profile, budget: int | None = None) -> list[Plan]:
    """Return a few plans under which a run's first steps determine the costs of messages.

    They have every collective that a plan of the job can have. At equal bytes some have :data:`_APART` times as many
    messages as others: messages of whole units, fused if units are small, beside blocks. Messages overlap with all of
    compute, with some and with little of it.

    ``budget``: bytes per rank. A strategy that does not keep it is replaced by a mix that does. Raises
    InfeasibleBudget.
    """
    job = Job.of(job)
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


def measure_contention(
    profile: Profile,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
    *,
    seconds: float = 12.0,
    emulate: Emulation | None = None,
    budget: int | None = None,
) -> Profile:
    """Return the profile with its costs fitted to the calibration plans, on a CPU. Collective, with equal profiles.

    Plans take turns: a shared machine is faster in one minute than in the next. Rounds end when ``seconds`` are over;
    one round runs in any case. The model is not changed.

    - ``step``, ``optimizer``: those of :func:`mdcs.profiler.model_profile.measure_profile`.
    - ``emulate``: that of :func:`mdcs.parallelize`.
    - ``budget``: bytes per rank that the plans keep.

    Rank 0 warns of predictions that are more than half off. Raises InfeasibleBudget where no plan fits.
    """
    if profile.world == 1 or units[0].parameters[0][1].device.type != "cpu":
        return profile
    until = time.monotonic() + seconds
    plans = calibration_plans(profile, budget)
    traces: list[list[PeriodTrace]] = [[] for _ in plans]
    for _ in range(_MOST_ROUNDS):
        for plan, of_plan in zip(plans, traces, strict=True):
            own = run_periods(plan, model, units, step, optimizer, PERIODS, emulate=emulate)[1]
            of_plan += [trace for of_rank in all_gather_object(own) for trace in of_rank]
        if any(all_gather_object(time.monotonic() > until)):
            break
    found = fit_costs(profile, [Run(plan, of_plan) for plan, of_plan in zip(plans, traces, strict=True)])
    if found.reliability_warning and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(found.reliability_warning, stacklevel=3)
    return found
