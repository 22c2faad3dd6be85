"""The start of a model that does not fit whole: a plan before anything has run, and the profile of the steps under it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mdcs.model.optimizers import Optimizers, Updates
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile
from mdcs.profiler.autoprofile import link_of_rings, used_outside, with_link
from mdcs.profiler.consensus import merge_profiles, on_rank_zero, phase
from mdcs.profiler.link_timing import measure_link
from mdcs.profiler.memory_bounds import require_model_fits, whole_bytes
from mdcs.profiler.model_profile import assembled
from mdcs.profiler.running_steps import RunningSteps, recorder_of
from mdcs.runtime.communicator import backend_of
from mdcs.runtime.engine import Engine
from mdcs.runtime.validation import RunOptions
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.memory_meter import current_meter

STEPS = 2
"""Steps that are measured: the first is watched, the second is timed."""


def must_shard(units: Sequence[ModelUnit], optimizers: Optimizers, limit: int | None) -> tuple[bool, str]:
    """Return whether the first step must be sharded, and why, in words ("" where there is nothing to decide).

    It must where the model has no memory yet, and where parameters, gradients and optimizer state are more than ``limit`` bytes
    and there are ranks to share them. Activations come on top, and are not known yet.
    """
    if any(p.is_meta for unit in units for _, p in unit.parameters):
        return True, "the model is on the meta device: it is sharded from the start"
    if limit is None:
        return False, ""
    size, world = whole_bytes(units, optimizers), dist.get_world_size() if dist.is_initialized() else 1
    said = f"parameters, gradients and optimizer state take {size / MIB:.1f} MiB of a budget of {limit / MIB:.1f} MiB"
    sharded = size > limit and world > 1
    return sharded, f"{said}: {'sharded from the start' if sharded else 'whole in the first step'}"


def why_not_measured(options: RunOptions, group: dist.ProcessGroup | None, plan: Plan, is_sharded: bool) -> str:
    """Return why :meth:`mdcs.Parallel.replan` cannot measure a run with this plan; "" if it can. ``is_sharded``: in pieces."""
    what = ""
    if options.emulate is not None or group is not None or plan.profile.master_bytes:
        what = "a run with emulate=, group= or master_dtype="
    elif is_sharded and plan.recompute:
        what = "what a model computes again that does not fit whole"
    return f"cannot measure {what}: close(), make a plan with mdcs.autoplan, and parallelize() with it" if what else ""


def plan_of_nothing(
    units: list[ModelUnit], optimizers: Optimizers, limit: int | None, *, micro_steps: int, cross_iteration: bool,
    device: torch.device,
) -> Plan:  # fmt: skip
    """Return a plan of the fewest bytes for a model that has not run: slots in the order of the units, all of no time.

    What the steps do otherwise is a departure. Raises InfeasibleBudget. Collective.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if limit is not None:
        require_model_fits(units, optimizers.members, limit, world, None)
    backend = backend_of(None, device) if world > 1 else ""
    profile = assembled(
        units, Updates(optimizers), recorder_of(units, current_meter(device), device), device, world=world,
        link=Link.uniform(1.0, 50.0), collectives=Collectives.default(backend) if backend else Collectives(),
    )  # fmt: skip
    job = Job(merge_profiles(profile), micro_steps, cross_iteration)
    return on_rank_zero(lambda: make_plan(job, Uniform("fsdp"), Sequential(), budget=limit))


def profile_of(steps: RunningSteps, engine: Engine, budget: int | str | None) -> Profile:
    """Return the profile of what ``steps`` has recorded of this run, with the measured link. Collective.

    ``budget``: that of :func:`mdcs.autoprofile`.
    """
    phase("measuring the link")
    link = measure_link(steps.device)
    profile = merge_profiles(with_link(steps.profile(engine.plan.job.profile, engine.updates.updates), link))
    job = dataclasses.replace(engine.plan.job, profile=profile, recompute=())
    if rings := link_of_rings(job, Budget.of(budget), steps.device):
        profile = with_link(profile, rings)
    if line := used_outside(profile):
        phase(line)
    return profile
