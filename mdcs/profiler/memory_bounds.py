"""Bytes that are known before a plan is made: those that every plan needs, and those that measuring the model holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from mdcs.model.optimizers import GivenOptimizers, Optimizers, Updates
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import floor_bytes, unsharded_bytes
from mdcs.planner.recompute import Planned
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB, Budget


def min_peak_bytes(
    units: Sequence[ModelUnit], optimizer: GivenOptimizers, world: int, master_dtype: torch.dtype | None = None
) -> int:
    """Return a lower bound of any plan's peak on some of ``world`` ranks, without activations.

    Every unit and its optimizer state in shards of 1/world, and the largest unit whole, as it is while it computes.
    """
    updates = Updates(Optimizers(optimizer))
    rest = largest = 0.0
    for unit in units:
        whole = 0
        for _, p in unit.parameters:
            own = p.element_size() if master_dtype is None else max(p.element_size(), master_dtype.itemsize)
            layout = updates.layout_of(p)  # state of whole parameters may be smaller than they are
            kept = own * (1 + (0 if layout.whole else layout.tensors(own))) if unit.trainable else p.element_size()
            rest += p.numel() * kept / world
            whole += p.numel() * p.element_size()
        largest = max(largest, whole * (1 - 1 / world))
    return math.floor(rest + largest)


def whole_bytes(units: Sequence[ModelUnit], optimizers: Optimizers) -> int:
    """Return what a first step holds without shards: parameters, gradients, optimizer state, and one averaged gradient.
    """
    updates, largest = Updates(optimizers), 0
    size: float = 0
    for unit in units:
        for _, p in unit.parameters:
            own = p.numel() * p.element_size()
            size += own
            if unit.trainable:
                size += own + p.numel() * p.element_size() * updates.layout_of(p).tensors(p.element_size())
                largest = max(largest, own)
    return math.ceil(size) + largest


def profiling_bytes(units: Sequence[ModelUnit], profile: Profile | None = None) -> int:
    """Return what measuring a model holds at least: parameters whole, the largest gradient, and activations once known.
    """
    parameters = [(p.numel() * p.element_size(), unit.trainable) for unit in units for _, p in unit.parameters]
    gradient = max((size for size, trainable in parameters if trainable), default=0)
    activations = max((slot.peak for slot in profile.slots), default=0) if profile is not None else 0
    return sum(size for size, _ in parameters) + gradient + activations


def require_model_fits(
    units: Sequence[ModelUnit], optimizer: GivenOptimizers, budget: int, world: int, master_dtype: torch.dtype | None
) -> None:
    """Raise InfeasibleBudget for a budget that no plan can keep, whatever the activations are."""
    least = min_peak_bytes(units, optimizer, world, master_dtype)
    if budget <= least:
        error = InfeasibleBudget(budget, least, "the model (parameters and optimizer state alone)", is_bound=True)
        raise error.in_words_of(Budget(budget), lambda: 0)


def require_floor(job: Job, asked: Budget, limit: int) -> None:
    """Raise InfeasibleBudget if no plan of the job keeps ``limit`` bytes, also with the recomputation that the profile
    knows.

    ``asked``: the budget of so many bytes, in whose words this is said.
    """
    if limit >= (floor := floor_bytes(job)) or limit >= (recomputed := floor_bytes(job, Planned())):
        return
    error = InfeasibleBudget(limit, floor, "the model", recomputed=recomputed if recomputed < floor else None)
    raise error.in_words_of(asked, lambda: unsharded_bytes(job))


_MUCH = 1.25


def warn_padding(profile: Profile) -> None:
    """Warn of the unit that is padded most because ranks own whole parameters, if that is much of the model."""
    plain = [layout.numel * layout.param_width for layout in profile.layouts]
    padded = [layout.param_bytes for layout in profile.layouts]
    if sum(padded) - sum(plain) < max(MIB, (_MUCH - 1) * sum(plain)):
        return
    most = max(range(len(plain)), key=lambda u: padded[u] - plain[u])
    warnings.warn(
        f"{profile.units[most].name}: parameters are updated whole, each by one of {profile.world} ranks, so "
        f"{plain[most] / MIB:.1f} MiB take {padded[most] / MIB:.1f} in messages and buffers "
        f"({sum(plain) / MIB:.1f} and {sum(padded) / MIB:.1f} in all): "
        "larger units have less padding, and an elementwise optimizer for its largest parameter none",
        stacklevel=4,
    )


def warn_profiling_memory(size: int, budget: int) -> None:
    """Warn that measuring holds ``size`` bytes, if they are above the budget."""
    if size > budget:
        warnings.warn(
            f"measuring the model holds it whole: {size / MIB:.1f} MiB per rank or more, above the budget of "
            f"{budget / MIB:.1f} MiB, which the plan will keep. Where there is no room, plan with a profile from a "
            f"larger machine (mdcs.make_plan)",
            stacklevel=4,
        )
