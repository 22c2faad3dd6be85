"""Profile a model, plan on rank 0 and hand every rank the same plan: the short way to :func:`mdcs.parallelize`."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.model.optimizers import GivenOptimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.ilp.solver import Solving
from mdcs.planner.pipeline import limit_of, make_plan, unsharded_bytes
from mdcs.planner.priority import Priority
from mdcs.planner.recompute import AUTO, KEEP, RecomputeRule, in_words, recompute_named
from mdcs.planner.registry import (
    JointPlanner,
    Scheduler,
    StrategyPlanner,
    decides_schedule,
    scheduler_named,
    strategy_named,
)
from mdcs.planner.trials import proposals
from mdcs.profile.schema import Profile
from mdcs.profiler.autoprofile import autoprofile, end_of, steps_of
from mdcs.profiler.autotune import cost_s, fastest
from mdcs.profiler.consensus import on_all_ranks, on_rank_zero, phase
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.memory_meter import unmeasured

SECONDS = 30.0
"""Default time budget of a profile and a plan."""
T = TypeVar("T")


def require_measured(budget: Budget, device: torch.device) -> None:
    """Raise ValueError for a budget that depends on activations where memory cannot be measured."""
    if budget.is_limit and budget.size is None and (why := unmeasured(device)):
        raise ValueError(
            f"a budget of {budget} depends on the bytes of activations: {why}, or give the budget in bytes"
        )


def autoplan(
    model: nn.Module,
    optimizer: GivenOptimizers,
    units: list[ModelUnit],
    step: Callable[..., Tensor],
    *,
    batches: Sequence[Any] | None = None,
    strategy: str | StrategyPlanner | JointPlanner = "greedy",
    scheduler: str | Scheduler | None = None,
    budget: Budget | int | str | None = None,
    schedule_share: float | None = None,
    recompute: str | RecomputeRule = "auto",
    micro_steps: int = 1,
    cross_iteration: bool = True,
    reserve: int = 0,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    profile: Profile | None = None,
    trials: int = 1,
    seconds: float = SECONDS,
    progress: bool = True,
) -> Plan:
    """Return a plan for training ``model`` within ``budget`` per rank. Collective: call it on every rank.

    ``budget`` is in bytes or in words (:class:`mdcs.sizes.Budget`): a size such as ``"40GiB"``, a part such as
    ``"75% of ddp"`` of what data parallelism without sharding (DDP) needs, or ``"floor+10%"``, above the smallest
    possible; None is no limit. The profile is that of :func:`mdcs.autoprofile`, or ``profile``, one of an equal job,
    the same on every rank; without ranks
    :func:`mdcs.make_plan` plans alike.
    ``step`` runs one forward pass on a typical batch and returns the loss. With ``batches``, examples of the sizes that
    the loop draws, ``step`` is given the batch: the plan has room for the largest, and its time is that of the mix.

    ``strategy`` and ``scheduler`` are planners or their names (:mod:`mdcs.planner.registry`); the scheduler is priority
    unless one is given, and none for a strategy that decides the schedule. ``recompute`` (auto, none, all, selective,
    random, planned, or a rule) says which units recompute their activations (:mod:`mdcs.planner.recompute`); with auto
    none does unless no other plan keeps the budget, and one line says what that frees and costs. ``schedule_share`` is
    that of :func:`mdcs.make_plan`; ``micro_steps``, ``cross_iteration`` and ``reserve`` (bytes) are those of
    :class:`mdcs.Job`. ``master_dtype`` and ``grad_dtype`` are for mixed precision, as in
    :func:`mdcs.profiler.model_profile.measure_profile`. With ``trials`` above 1 so many plans that differ
    (:func:`mdcs.planner.trials.proposals`) run for a few steps each, and the fastest is returned
    (:func:`mdcs.profiler.autotune.fastest`). Where memory cannot be measured
    (:func:`mdcs.telemetry.memory_meter.unmeasured`), a budget in bytes does not count activations, with a warning, and
    a part is refused.

    ``seconds`` is the time budget: half of it is for the profile (:func:`mdcs.autoprofile`), and planners that are
    named, not given, have what is left, at least a third. A step that takes seconds, and trials, make it longer. With
    ``progress`` rank 0 logs a line for each phase; without handlers for logging it writes them to stderr, with a bar on
    a terminal. A budget that no plan can keep is refused as soon as that is known.

    Raises ValueError for an unknown name and for ``seconds`` that are not above 0, UnsupportedModel as
    :func:`mdcs.profiler.model_profile.measure_profile` does, and on every rank what planning raises on rank 0:
    InfeasibleBudget, with the smallest feasible budget in bytes, where none fits. Where one rank raises
    alone, or is killed, the others raise RunError with its words.
    """
    say_refusals_once()
    planner = strategy_named(strategy) if isinstance(strategy, str) else strategy
    schedule = scheduler_named(scheduler) if isinstance(scheduler, str) else scheduler
    rule = recompute_named(recompute) if isinstance(recompute, str) else recompute
    if schedule is None and not decides_schedule(planner):
        schedule = Priority()
    wanted, until = Budget.of(budget), end_of(seconds)
    if wanted.size is not None and reserve >= wanted.size:
        raise ValueError(f"reserve must be below the budget of {wanted.size} bytes, got {reserve}")
    job_of = functools.partial(Job, micro_steps=micro_steps, cross_iteration=cross_iteration, reserve=reserve)
    with on_all_ranks(tells=progress):
        if profile is None:
            require_measured(wanted, units[0].parameters[0][1].device)
            profile = autoprofile(
                model, optimizer, units, step, batches=batches, master_dtype=master_dtype, grad_dtype=grad_dtype,
                budget=wanted, seconds=seconds / 2, progress=progress, job=job_of,
                recompute=None if rule == AUTO else rule != KEEP,
            )  # fmt: skip
        if wanted.is_limit and not any(slot.peak for slot in profile.slots):
            why = unmeasured(units[0].parameters[0][1].device) or "the profile has not measured them"
            warnings.warn(f"activations count as 0 bytes of the budget: {why}", stacklevel=2)
        job = job_of(profile)
        limit = limit_of(wanted, job, rule)
        left = max(seconds / 3, until - time.monotonic())
        both = isinstance(planner, Solving) and isinstance(schedule, Solving)
        if isinstance(strategy, str):
            planner = _within(left / (1 + both), planner)
        if isinstance(scheduler, str):
            schedule = _within(left / (1 + both), schedule)
        solves = isinstance(planner, Solving) or isinstance(schedule, Solving)
        phase(f"planning{_within_words(wanted, limit)}", left if solves else None)

        def planned() -> list[Plan]:
            try:
                plan = make_plan(job, planner, schedule, budget=limit, schedule_share=schedule_share, recompute=rule)
            except InfeasibleBudget as error:
                raise error.in_words_of(wanted, lambda: unsharded_bytes(job)) from None
            return proposals(plan, trials, recompute=rule, seconds=left / 3)

        plans = on_rank_zero(planned)
        if rule == AUTO and (line := in_words(plans[0])):
            phase(line)
        if len(plans) > 1:
            phase("trying plans", cost_s(plans))
        return fastest(plans, model, units, steps_of(step, batches)[0], optimizer)[0]


def say_refusals_once() -> None:
    """Let an uncaught InfeasibleBudget, which all ranks raise, be one line of rank 0 instead of a traceback of each."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, InfeasibleBudget):
            before(kind, error, trace)
        elif not dist.is_initialized() or dist.get_rank() == 0:
            print(f"mdcs: {error}", file=sys.stderr, flush=True)

    sys.excepthook = hook


def _within_words(budget: Budget, limit: int | None) -> str:
    if limit is None:
        return ""
    return f" within {limit / MIB:.1f} MiB" + (f" ({budget})" if budget.size is None else "")


def _within(seconds: float, planner: T) -> T:
    """Return the planner with this time limit, if it uses a solver."""
    return dataclasses.replace(planner, seconds=seconds) if isinstance(planner, Solving) else planner
