"""The plan that is made in the training loop: of its first step, or of steps under a provisional plan."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.api.autoplan import SECONDS, autoplan
from mdcs.model.optimizers import Optimizers, Updates, by_optimizer
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import lacks_recomputation, make_plan
from mdcs.planner.recompute import AUTO, KEEP, RecomputeRule
from mdcs.planner.schedulers import Sequential
from mdcs.planner.strategies import Uniform
from mdcs.profile import cache
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile
from mdcs.profiler.autoprofile import link_of_rings, needs_rings, used_outside, with_link
from mdcs.profiler.consensus import merge_profiles, on_all_ranks, on_rank_zero, phase
from mdcs.profiler.first_step import FirstStep
from mdcs.profiler.job_identity import key_of_job
from mdcs.profiler.link_timing import measure_link
from mdcs.profiler.memory_bounds import require_model_fits, whole_bytes
from mdcs.profiler.model_profile import assembled
from mdcs.profiler.progress import tell
from mdcs.profiler.running_steps import RunningSteps, without_passes
from mdcs.runtime.communicator import backend_of
from mdcs.runtime.engine import Engine, Trained
from mdcs.runtime.errors import RunError
from mdcs.runtime.validation import RunOptions
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.memory_meter import current_meter

logger = logging.getLogger(__name__)

STEPS = 2
"""Steps that are measured under a provisional plan: the first is watched, the second is timed."""


def must_shard(units: Sequence[ModelUnit], optimizers: Optimizers, limit: int | None) -> tuple[bool, str]:
    """Return whether the first step must be sharded, and why, in words ("" where there is nothing to decide).

    True for a model on the meta device, or if parameters, gradients and optimizer state take more than ``limit`` bytes
    and there are ranks to share them. Activations are not counted: they are unknown before the first step.
    """
    if any(p.is_meta for unit in units for _, p in unit.parameters):
        return True, "the model is on the meta device: it is sharded from the start"
    if limit is None:
        return False, ""
    size, world = whole_bytes(units, optimizers), dist.get_world_size() if dist.is_initialized() else 1
    said = f"parameters, gradients and optimizer state take {size / MIB:.1f} MiB of a budget of {limit / MIB:.1f} MiB"
    sharded = size > limit and world > 1
    return sharded, f"{said}: {'sharded from the start' if sharded else 'whole in the first step'}"


@dataclass(frozen=True)
class LoopPlan:
    """How the plan of a loop is made. :func:`mdcs.parallelize` describes the options.

    - ``cross_iteration``: whether updates may run in the next iteration.
    - ``micro_steps``: backward passes of a step; None: as many as the first step has.
    - ``folder``: the folder of kept profiles; None: none is kept or used.
    """

    units: list[ModelUnit]
    budget: Budget
    recompute: RecomputeRule
    cross_iteration: bool
    seconds: float = SECONDS
    progress: bool = True
    micro_steps: int | None = None
    folder: Path | None = None

    def begin(self, model: nn.Module, optimizers: Optimizers, options: RunOptions) -> Engine:
        """Return a run under a provisional plan. Raises InfeasibleBudget. Collective."""
        device = self.units[0].parameters[0][1].device
        with on_all_ranks(tells=self.progress):
            plan = self.provisional(optimizers, options.device if device.type == "meta" else device)
        return Engine(Trained(model, optimizers, self.units), plan, options)

    def provisional(self, optimizers: Optimizers, device: torch.device) -> Plan:
        """Return a plan of the fewest bytes for a model that has not run: slots in the order of the units, all of no
        time.

        Whatever the steps do otherwise is a departure. Raises InfeasibleBudget. Collective.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.budget.size is not None:
            require_model_fits(self.units, optimizers.members, self.budget.size, world, None)
        backend = backend_of(None, device) if world > 1 else ""
        updates = Updates(optimizers)
        units = by_optimizer(self.units, updates)
        profile = assembled(
            units, updates, without_passes(units, current_meter(device), device), device,
            world=world, link=Link.uniform(1.0, 50.0),
            collectives=Collectives.default(backend) if backend else Collectives(),
        )  # fmt: skip
        job = Job(merge_profiles(profile), self.micro_steps or 1, self.cross_iteration)
        return on_rank_zero(lambda: make_plan(job, Uniform("fsdp"), Sequential(), budget=self.budget.size))

    def of_recorded(self, engine: Engine, steps: RunningSteps) -> Plan:
        """Plan with the profile of the ``steps`` that ``engine`` has run. Collective."""
        torch.compiler.reset()  # what was compiled while operators were watched
        with torch.enable_grad(), on_all_ranks(tells=self.progress):
            profile = self._profile(engine, steps)
            return self._make(engine.model, engine.optimizers, _no_step, engine.plan.micro_steps, profile)

    def of_first_step(self, first: FirstStep) -> Plan:
        """Plan with the profile of an earlier start, if it has kept one, else with one that is measured, and kept.
        Collective.

        Raises RunError if the step had another number of backward passes than ``micro_steps``.
        """
        model, optimizers = first.model, first.optimizers
        if self.micro_steps not in (None, first.micro_steps):
            raise RunError(
                f"rank {first.rank}: the first step had {first.micro_steps} backward passes, and parallelize was given "
                f"micro_steps={self.micro_steps}"
            )
        torch.compiler.reset()  # what was compiled in the first step has no units' hooks in it, and looks for none
        make = functools.partial(self._make, model, optimizers, first.again, first.micro_steps)
        with torch.enable_grad():
            if self.folder is None:
                return make(None)
            others = "" if self.recompute in (KEEP, AUTO) else "; recomputation"
            path = self.folder / f"{key_of_job(model, self.units, optimizers, first.in_words() + others)}.json"
            known = on_rank_zero(lambda: self._sufficient(cache.read(path), first.micro_steps))
            if known is not None and first.rank == 0 and self.progress:
                tell(f"profile of an earlier start: {path}", logger)
            plan = make(known)
            if known is None and first.rank == 0:
                cache.keep(plan.job.profile, path)
            return plan

    def _make(
        self, model: nn.Module, optimizers: Optimizers, step: Callable[[], Tensor], micro_steps: int,
        profile: Profile | None,
    ) -> Plan:  # fmt: skip
        return autoplan(
            model, optimizers.members, self.units, step, budget=self.budget, recompute=self.recompute,
            micro_steps=micro_steps, cross_iteration=self.cross_iteration, profile=profile, seconds=self.seconds,
            progress=self.progress,
        )  # fmt: skip

    def _sufficient(self, known: Profile | None, micro_steps: int) -> Profile | None:
        """Return the profile unless the budget needs rings, or recomputation, of which it knows nothing."""
        if known is None:
            return None
        job, device = Job(known, micro_steps, self.cross_iteration), self.units[0].parameters[0][1].device
        if needs_rings(job, self.budget, device) or self.recompute == AUTO and lacks_recomputation(job, self.budget):
            return None
        return known

    def _profile(self, engine: Engine, steps: RunningSteps) -> Profile:
        """Return the profile of what ``steps`` has recorded of this run, with the measured link. Collective."""
        phase("measuring the link")
        link = measure_link(steps.device)
        profile = merge_profiles(with_link(steps.profile(engine.plan.job.profile, engine.updates.updates), link))
        job = dataclasses.replace(engine.plan.job, profile=profile, recompute=())
        if rings := link_of_rings(job, self.budget, steps.device):
            profile = with_link(profile, rings)
        if line := used_outside(profile):
            phase(line)
        return profile


def _no_step() -> Tensor:
    raise AssertionError("the profile is known")
