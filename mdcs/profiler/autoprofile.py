"""Measure all that planning reads, on all ranks at once: the one way to a profile, of the library and of its programs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.planner.pipeline import floor_bytes, lacks_recomputation, limit_of
from mdcs.planner.recompute import Planned
from mdcs.profile.link import Collectives
from mdcs.profile.schema import Profile
from mdcs.profiler.batch_mix import largest, mix, total_s, typical, with_slots_of
from mdcs.profiler.calibration import STEPS, measure_contention
from mdcs.profiler.consensus import (
    all_gather_object,
    barrier,
    merge_profiles,
    on_all_ranks,
    on_rank_zero,
    phase,
    rank_zeros_random_state,
)  # fmt: skip
from mdcs.profiler.interference import measure_interference
from mdcs.profiler.link_timing import MeasuredLink, measure_link
from mdcs.profiler.memory_bounds import (
    profiling_bytes,
    require_floor,
    require_model_fits,
    warn_padding,
    warn_profiling_memory,
)
from mdcs.profiler.model_profile import measure_profile, refuse_meta
from mdcs.sizes import MIB, Budget

SECONDS = 16.0
"""Default time budget of a profile."""
_LINK, _MODEL = 0.2, 0.25  # of the time budget; the rest is for the contention


def end_of(seconds: float) -> float:
    """Return the time of :func:`time.monotonic` at which a budget of ``seconds`` ends. Raises ValueError for none."""
    if not seconds > 0:
        raise ValueError(f"seconds must be > 0, got {seconds!r}")
    return time.monotonic() + seconds


def autoprofile(
    model: nn.Module,
    optimizer: GivenOptimizers,
    units: list[ModelUnit],
    step: Callable[..., Tensor],
    *,
    batches: Sequence[Any] | None = None,
    link: MeasuredLink | None = None,
    depth: int | None = 2,
    algorithm: str | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    iterations: int = 3,
    about: dict[str, str] | None = None,
    emulate: Emulation | None = None,
    budget: Budget | int | str | None = None,
    seconds: float = SECONDS,
    progress: bool = True,
    recompute: bool | None = False,
    job: Callable[[Profile], Job] = Job,
) -> Profile:
    """Return the profile of this job, the same on all ranks. Collective: call it on every rank.

    1. The link is measured, or taken from ``link``.
    2. Slots and updates are measured in some steps of the model alone.
    3. On a GPU, steps beside messages give the interference. On a CPU, a few plans run for some steps each, to which
       the costs of messages are fitted; :attr:`mdcs.Profile.calibration_runs` says how well the profile predicts them.

    Model and optimizer are not changed.

    - ``step``: runs one forward pass on a typical batch and returns the loss. With ``batches`` it is given the batch.
    - ``batches``: example batches of several sizes, as many on every rank: memory is that of the largest, by slot, and
      time the mean.
    - ``depth``: messages in flight. None: as many as are best. On NCCL it is one.
    - ``algorithm``: name of a family of collective algorithms. None: the fastest, or on a CPU rings where the budget
      has no room for the buffers of the fastest; the link is then measured again.
    - ``master_dtype``, ``grad_dtype``, ``about``: those of :func:`mdcs.measure_profile`.
    - ``iterations``: the most steps of the second phase.
    - ``emulate``: that of :func:`mdcs.parallelize`.
    - ``budget``: bytes per rank, or a text such as "40GiB" or "75% of ddp" (:class:`mdcs.sizes.Budget`). The plans of
      the third phase keep it, and a budget that no plan can keep is refused as soon as that is known. The model itself
      is measured whole: a warning says how much that holds, if it is more.
    - ``seconds``: time budget of the phases. They measure more often while it lasts, and each thing once in any case.
    - ``recompute``: measure recomputation, too (:attr:`mdcs.Profile.recompute`): three times as many steps of the
      second phase. A budget is refused if no plan with recomputation can keep it. Of several batches that of the
      largest is measured. None: only where no plan keeps the budget without; the second phase then runs once more.
    - ``job``: makes the job that is planned under the budget.
    - ``progress``: whether rank 0 logs a line for each phase, or writes it to stderr (:mod:`mdcs.profiler.progress`).

    What one rank raises alone the others hear of at once: they raise RunError with its words, or with the rank that was
    killed. Raises ValueError for a family that the backend does not have, for ``seconds`` that are not above 0, and
    what
    :func:`mdcs.measure_profile` and :func:`mdcs.parallelize` raise: an optimizer that has state already is refused
    here. Raises InfeasibleBudget, see above.
    """
    wanted, until = Budget.of(budget), end_of(seconds)
    device, is_free = units[0].parameters[0][1].device, link is None and algorithm is None
    refuse_meta(model)  # before the link, whose backend has no such device
    steps = steps_of(step, batches)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    world, is_first = emulate.world if emulate else processes, not dist.is_initialized() or dist.get_rank() == 0
    with on_all_ranks(tells=progress):
        known = profiling_bytes(units)
        if wanted.size is not None:
            require_model_fits(units, optimizer, wanted.size, world, master_dtype)
            if is_first:
                warn_profiling_memory(known, wanted.size)
        if link is None:
            phase("measuring the link", _LINK * seconds)
        on = link or measure_link(device, depth=depth, algorithm=algorithm)
        if processes > 1:
            barrier()  # so that all compute side by side, as in training
        if len(set(all_gather_object(len(steps)))) > 1:
            raise ValueError("ranks were given different numbers of batches")
        phase("measuring the model", _MODEL * seconds)
        with rank_zeros_random_state(device):

            def measured_with(each: Callable[[], Tensor], recompute: bool) -> Profile:
                own = measure_profile(
                    model, units, each, optimizer, world=world, link=on.link, iterations=iterations, about=about,
                    master_dtype=master_dtype, grad_dtype=grad_dtype, seconds=_MODEL * seconds / len(steps),
                    recompute=recompute, agree=lambda enough: any(all_gather_object(enough)),
                )  # fmt: skip
                return merge_profiles(with_link(own, on))

            profiles = [measured_with(each, bool(recompute) and len(steps) == 1) for each in steps]
            if recompute and len(steps) > 1:
                most = largest(profiles)
                profiles[most] = measured_with(steps[most], recompute=True)
        if is_free and (rings := link_of_rings(job(mix(profiles)), wanted, device, depth)):
            on = rings
            profiles = [with_link(each, rings) for each in profiles]
        if recompute is None and on_rank_zero(lambda: lacks_recomputation(job(mix(profiles)), wanted)):
            phase("no plan keeps the budget without recomputation: measuring it", 3 * _MODEL * seconds)
            recompute, most = True, largest(profiles)
            with rank_zeros_random_state(device):
                profiles[most] = measured_with(steps[most], recompute=True)
        profile, middle = mix(profiles), typical(profiles)
        if is_first:
            warn_padding(profile)
        if line := used_outside(profile):
            phase(line)
        limit = limit_of(wanted, job(profile))
        if limit is not None:
            on_rank_zero(partial(require_floor, job(profile), wanted, limit))
            if is_first and known <= limit:
                warn_profiling_memory(profiling_bytes(units, profile), limit)
            limit -= job(profile).reserve
            limit = max(limit, floor_bytes(profile)) if recompute else limit  # the plans below keep all activations
        left = max(0.0, until - time.monotonic())
        phase(
            "running a few plans to see what compute and messages cost each other", max(left, STEPS * total_s(profile))
        )
        measured = measure_interference(profiles[middle], model, steps[middle], emulate=emulate)
        measured = measure_contention(
            measured,
            model,
            units,
            steps[middle],
            optimizer,
            seconds=left,
            emulate=emulate,
            budget=limit,
        )
        return with_slots_of(measured, profiles[middle], profile)


def steps_of(step: Callable[..., Tensor], batches: Sequence[Any] | None) -> list[Callable[[], Tensor]]:
    """Return a step for each batch; without ``batches`` the one step. Raises ValueError for none."""
    if batches is not None and not len(batches):
        raise ValueError("batches must have at least one batch")
    return [step] if batches is None else [partial(step, batch) for batch in batches]


def needs_rings(job: Job, budget: Budget, device: torch.device) -> bool:
    """Return whether no plan keeps the budget with gloo's own collectives, and rings, which copy less, need fewer
    bytes."""
    if job.profile.collectives != Collectives("native") or device.type != "cpu":
        return False
    limit = limit_of(budget, job)
    if limit is None or limit >= (floor := floor_bytes(job, Planned())):
        return False
    rings = dataclasses.replace(job.profile, collectives=Collectives("ring"))
    return floor_bytes(dataclasses.replace(job, profile=rings), Planned()) < floor


def link_of_rings(
    job: Job, budget: Budget, device: torch.device, depth: int | None = 2
) -> MeasuredLink | None:
    """Return the link measured with rings if the budget needs them (:func:`needs_rings`), else None. Collective."""
    if not on_rank_zero(lambda: needs_rings(job, budget, device)):
        return None
    phase("measuring the link with rings: native collectives need more than the budget")
    return measure_link(device, depth=depth, algorithm="ring")


def with_link(profile: Profile, link: MeasuredLink) -> Profile:
    """Return the profile with this link, its collectives and their spread."""
    return dataclasses.replace(
        profile, link=link.link, collectives=link.collectives, spread=profile.spread | link.spread
    )


def used_outside(profile: Profile) -> str:
    """Return one line about units that a step uses outside of their modules' forward, and what that costs; "" for none.
    """
    found = [
        (unit.name, layout.param_bytes)
        for unit, layout in zip(profile.units, profile.layouts, strict=True)
        if unit.aliased
    ]
    if not found:
        return ""
    names = ", ".join([name for name, _ in found][:3]) + f" and {len(found) - 3} more" * (len(found) > 3)
    return (
        f"used outside of their modules' forward: {names}. They are whole from their first to their last use in a "
        f"step, {sum(size for _, size in found) / MIB:.3g} MiB"
    )
