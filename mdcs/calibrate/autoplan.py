"""Profile a model, plan on rank 0 and hand every rank the same plan: the short way to :func:`mdcs.parallelize`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.calibrate.agreement import agree, on_rank_zero
from mdcs.calibrate.link_timing import measure_link
from mdcs.calibrate.slots import measure_profile
from mdcs.model.units import ModelUnit
from mdcs.plan.messages import Plan
from mdcs.planner.make import make_plan
from mdcs.planner.schedulers import SCHEDULERS
from mdcs.planner.strategies import STRATEGIES
from mdcs.planner.strategies.uniform import Uniform


def autoplan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: list[ModelUnit],
    step: Callable[[], Tensor],
    *,
    strategy: str = "greedy",
    scheduler: str = "priority",
    budget: int | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    **options: Any,
) -> Plan:
    """A plan for training ``model`` within ``budget`` bytes per rank; collective: call it on every rank.

    ``step`` runs one forward pass on a typical batch and returns the loss. ``strategy`` is dp, zero1, sdp, fsdp or
    a name in ``STRATEGIES``, ``scheduler`` one in ``SCHEDULERS`` (:mod:`mdcs.planner`); ``options``
    are :func:`mdcs.planner.make.make_plan`'s. ``master_dtype`` and ``grad_dtype`` are for mixed precision, as in
    :func:`mdcs.calibrate.slots.measure_profile`. On CPU, activations are measured in processes that are started with
    :func:`mdcs.measure.memory.preload_env`; elsewhere a budget does not count them, with a warning.
    """
    if strategy not in STRATEGIES and strategy not in ("dp", "zero1", "sdp", "fsdp"):
        raise ValueError(f"unknown strategy {strategy!r}: dp, zero1, sdp, fsdp, {', '.join(sorted(STRATEGIES))}")
    if scheduler not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {scheduler!r}: {', '.join(sorted(SCHEDULERS))}")
    planner = STRATEGIES[strategy]() if strategy in STRATEGIES else Uniform(strategy)
    world = dist.get_world_size() if dist.is_initialized() else 1
    link, collectives, _ = measure_link(units[0].parameters[0][1].device)
    profile = measure_profile(
        model, units, step, optimizer, world=world, link=link, collectives=collectives,
        master_dtype=master_dtype, grad_dtype=grad_dtype,
    )  # fmt: skip
    profile = agree(profile)
    if budget is not None and not any(slot.peak for slot in profile.slots):
        warnings.warn(
            "activations are not measured in this process, and count as 0 bytes of the budget: start it with "
            "LD_PRELOAD=$(python -m mdcs.measure.memory)",
            stacklevel=2,
        )
    return on_rank_zero(lambda: make_plan(profile, planner, SCHEDULERS[scheduler](), budget=budget, **options))
