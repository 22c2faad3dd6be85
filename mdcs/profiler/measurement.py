"""Stages in which a run is measured while it trains, each of a few steps under one plan, up to a profile.

A loop runs the stages with its own steps (:mod:`mdcs.api.session`), and ``mdcs.autoprofile`` with the step it is given.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from mdcs.emulation import Emulation
from mdcs.model.optimizers import Optimizers, Updates, by_optimizer
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import floor_bytes, lacks_recomputation, limit_of, make_plan
from mdcs.planner.recompute import AUTO, KEEP, RecomputeRule
from mdcs.planner.schedulers import Sequential, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.link import Collectives, Kind, Link
from mdcs.profile.schema import Profile
from mdcs.profiler.batch_mix import largest, mix, typical, with_slots_of
from mdcs.profiler.calibration import calibration_plans
from mdcs.profiler.consensus import all_gather_object, merge_profiles, on_rank_zero, phase
from mdcs.profiler.cost_fit import Run, fit_costs, run_name
from mdcs.profiler.memory_bounds import require_floor, require_model_fits, warn_padding
from mdcs.profiler.model_profile import assembled
from mdcs.profiler.recompute_profile import estimated, recomputation, with_recomputation
from mdcs.profiler.running_steps import RunningSteps, TimedSteps, without_passes
from mdcs.profiler.slot_recorder import SlotRecorder
from mdcs.profiler.timing import machine_id
from mdcs.runtime.communicator import backend_of
from mdcs.runtime.context import StepRecord
from mdcs.runtime.engine import Engine
from mdcs.sizes import MIB, Budget
from mdcs.telemetry.memory_meter import current_meter


class Listener(Protocol):
    """Measures steps of a run."""

    def end_step(self) -> None:
        """End a step."""

    def forget(self) -> None:
        """Forget the step under way, which the loop gives up."""

    def stop(self) -> None:
        """Listen no more."""


@dataclass(frozen=True)
class Stage:
    """So many ``steps`` of a run under one plan, with what ``listen`` makes.

    ``plan``: None: that of the stage before. ``chooses``: whether the plan may be another one after it. ``batch``:
    number of the example batch of the steps; a loop has its own. ``waits_for``: there are more steps until one rank
    says that this is done.
    """

    plan: Plan | None
    steps: int
    listen: Callable[[Engine], Listener]
    chooses: bool = True
    batch: int = 0
    waits_for: Callable[[], bool] | None = None

    def is_over(self, steps: int, engine: Engine, call: str) -> bool:
        """Return whether the stage ends after so many steps, for this ``call``. Collective."""
        if steps < self.steps or self.waits_for is None:
            return steps >= self.steps
        with engine.place.during(call):
            return any(done for (done,) in engine.groups.agree_on_call(call, self.waits_for()))


@dataclass(frozen=True)
class Ran:
    """A stage that is over: its run, between two steps, what has listened, and the records of its steps."""

    engine: Engine
    heard: Listener
    records: list[StepRecord]


@dataclass(frozen=True)
class Measurement:
    """Measurement of a run's first steps: what is measured, and under which plans.

    - ``device``: where the units compute. ``sharded``: whether the first steps are, because the model does not fit
      whole.
    - ``job``: makes the job that is planned from its profile.
    - ``recompute``: recomputation is measured where the budget needs it (AUTO), never (KEEP), or always.
    - ``iterations``: timed steps of each stage, besides the first.
    - ``link``, ``collectives``: None: those of the real link, which is measured, and the backend's default.
    - ``depth``: messages in flight. ``emulate``: that of :func:`mdcs.parallelize`.
    - ``master_dtype``: in mixed precision, type of the copy that the optimizer updates; None: the parameters' type.
    - ``grad_dtype``: type in which gradients are summed; None: the parameters' type.
    - ``batches``: number of example batches of other sizes.
    - ``about``: kept in the profile.
    """

    units: list[ModelUnit]
    optimizers: Optimizers
    device: torch.device
    budget: Budget = Budget.of(None)
    recompute: RecomputeRule = KEEP
    sharded: bool = False
    job: Callable[[Profile], Job] = Job
    iterations: int = 1
    link: Link | None = None
    collectives: Collectives | None = None
    depth: int = 2
    emulate: Emulation | None = None
    master_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    batches: int = 1
    about: dict[str, str] | None = None

    # -- the provisional plan

    def unmeasured(self) -> Profile:
        """Return a profile of a model that has not run: slots in the order of the units, all of no time. Collective.

        Raises InfeasibleBudget for a budget in bytes that is too small for the model alone.
        """
        processes = dist.get_world_size() if dist.is_initialized() else 1
        world = processes if self.emulate is None else self.emulate.world
        if self.budget.size is not None:
            require_model_fits(self.units, self.optimizers.members, self.budget.size, world, self.master_dtype)
        updates = Updates(self.optimizers)
        units = by_optimizer(self.units, updates)
        collectives = self.collectives or Collectives.default(backend_of(None, self.device) if world > 1 else "gloo")
        depth = collectives.in_flight(self.depth) or self.depth
        return merge_profiles(
            assembled(
                units, updates, without_passes(units, current_meter(self.device), self.device), self.device,
                world=world, link=self.link or likely_link(ranks_per_node() if processes > 1 else 0, depth),
                collectives=collectives, master_dtype=self.master_dtype, grad_dtype=self.grad_dtype, about=self.about,
            )  # fmt: skip
        )

    def provisional(self, profile: Profile, recompute: tuple[str, ...] = ()) -> Plan:
        """Return a plan of the fewest bytes, or of no shards. Collective.

        Whatever the steps do otherwise is a departure. Raises InfeasibleBudget for a model that has not run.
        """
        strategy, job = Uniform("fsdp" if self.sharded else "dp"), self.job(profile)
        limit = self.budget.size if self.sharded and not recompute else None
        job = dataclasses.replace(job, recompute=recompute)
        # What messages cost compute beside them is told apart later. They are kept apart from it where activations are
        # all that the run does not know of (CUDA), and where slots are compared with each other (recomputation).
        is_compared = self.recompute != KEEP and (self.recompute != AUTO or self.budget.is_limit)
        overlaps = self.device.type == "cpu" and not self.sharded and not is_compared
        return on_rank_zero(lambda: make_plan(job, strategy, Wfbp() if overlaps else Sequential(), budget=limit))

    # -- slots, bytes and costs

    def profile(self, plan: Plan) -> Generator[Stage, Ran, Profile]:
        """Return the profile of all ranks, measured from ``plan`` on, a provisional one.

        Slots and bytes are measured first, with recomputation where it is asked for or needed, then the costs of
        messages. Raises InfeasibleBudget as soon as it is known that no plan keeps the budget.
        """
        profiles, runs = yield from self._slots(plan)
        mixed, middle = mix(profiles), typical(profiles)
        if not dist.is_initialized() or dist.get_rank() == 0:
            warn_padding(mixed)
        if line := used_outside(mixed):
            phase(line)
        limit = limit_of(self.budget, self.job(mixed), self.recompute)
        if limit is not None:
            on_rank_zero(lambda: require_floor(self.job(mixed), self.budget, limit))
        torch.compiler.reset()  # what was compiled while operators were watched
        measured = yield from self.costs(profiles[middle], middle, runs)
        return measured if self.batches == 1 else with_slots_of(measured, profiles[middle], mixed)

    @property
    def _steps(self) -> int:
        """Steps of a stage: the first is watched operator by operator, the others are timed."""
        return 1 + self.iterations

    def _slots(self, plan: Plan) -> Generator[Stage, Ran, tuple[list[Profile], list[Run]]]:
        """Return a profile of slots and bytes for each batch, without measured costs of messages, and the run if its
        plan is one that tells them.
        """
        tells = self.batches == 1 and plan.world > 1 and plan.scheduler != Sequential.name
        steps = self._steps + tells  # a period begins in the first timed step, and ends in the one after it
        phase(f"measuring the model in {self.batches * steps} steps of training")
        own, heard = [], []
        if tells:
            plan = on_rank_zero(lambda: calibration_plans(plan.job)[0])
        for batch in range(self.batches):
            ran = yield Stage(plan, steps, RunningSteps, batch=batch)
            assert isinstance(ran.heard, RunningSteps)
            heard.append(ran.heard)
            own.append(ran.heard.profile(plan.job.profile, ran.engine.updates.updates))
        profiles = [*map(merge_profiles, own)]
        job = self.job(mix(profiles))
        needed = self.recompute == AUTO and on_rank_zero(lambda: lacks_recomputation(job, self.budget))
        if needed or self.recompute not in (AUTO, KEEP):
            phase("measuring the model in steps that recompute activations")
            most = largest(profiles)
            base = heard[most].recorder
            profiles[most] = yield from self._recomputing(ran.engine, base, own[most], profiles[most], most)
        before, now = ([(s.unit, s.phase) for s in each.slots] for each in (plan.profile, profiles[0]))
        return profiles, [_run(ran)] if tells and before == now else []

    def _recomputing(
        self, engine: Engine, base: SlotRecorder, own: Profile, profile: Profile, batch: int
    ) -> Generator[Stage, Ran, Profile]:
        """Return the profile of a batch with what recomputation frees and costs.

        ``base``, ``own``: what was recorded on this rank, and this rank's profile.
        """
        asked = recomputation(engine.model, engine.units, base)
        choice = next(asked)
        while True:
            # the same on all ranks: those that took another branch may know of more units
            of_ranks = all_gather_object(choice)
            agreed = {u: selective for u, selective in of_ranks[0].items() if all(u in other for other in of_ranks)}
            assumed, recompute = with_recomputation(profile, agreed)
            plan = self.provisional(assumed, recompute)
            ran = yield Stage(plan, self._steps, functools.partial(RunningSteps, like=base), batch=batch)
            assert isinstance(ran.heard, RunningSteps)
            again = ran.heard.recorder
            if not all(all_gather_object(bool(again.seconds))):
                # some rank has run other slots than before: it would have to be compared with itself
                outputs = {u: max(of.get(u, 0) for of in all_gather_object(base.outputs)) for u in agreed}
                return dataclasses.replace(profile, recompute=estimated(profile, [*agreed], outputs))
            try:
                choice = asked.send(again)
            except StopIteration as end:
                options, kept = end.value
                measured = dataclasses.replace(own, recompute=options, about=own.about | kept)
                return merge_profiles(measured)

    def costs(self, profile: Profile, batch: int = 0, runs: Sequence[Run] = ()) -> Generator[Stage, Ran, Profile]:
        """Return the profile with the costs of messages and of compute beside them, from ``runs`` under the first plans
        that tell them, and from steps under the others.
        """
        if profile.world == 1:
            return profile
        runs = [*runs]
        found = fit_costs(profile, runs)
        # the first plan tells how large blocks of the next one are
        while len(plans := on_rank_zero(functools.partial(self._calibration_plans, self.job(found)))) > len(runs):
            plan = plans[len(runs)]
            phase(f"measuring messages in {self._steps} steps under {run_name(plan)}")
            ran = yield Stage(plan, self._steps, TimedSteps, batch=batch)  # a period begins in the first of them
            runs.append(_run(ran))
            found = fit_costs(profile, runs)
        if found.reliability_warning and ran.engine.rank == 0:
            warnings.warn(found.reliability_warning, stacklevel=2)
        return found

    def _calibration_plans(self, job: Job) -> list[Plan]:
        """Return the calibration plans, with the recomputation that the budget needs."""
        limit = limit_of(self.budget, job, self.recompute)
        if limit is not None and limit < floor_bytes(job):
            job = make_plan(job, Greedy(), Sequential(), budget=limit, recompute=self.recompute).job
        return calibration_plans(job, limit)


def _run(ran: Ran) -> Run:
    """Return the periods of all ranks. Collective."""
    of_ranks = all_gather_object([*ran.engine.recorder.traces().values()])
    return Run(ran.engine.plan, [trace for of_rank in of_ranks for trace in of_rank])


def likely_link(per_node: int, depth: int) -> Link:
    """Return what is assumed of a link that is not measured: 1 Gbit/s and 50 µs, within nodes too."""
    link = Link.uniform(1.0, 50.0, depth)
    if not per_node:
        return link
    of_kind = [link.kinds.index(kind.plain) for kind in Kind]
    alpha, beta, gap = (tuple(costs[i] for i in of_kind) for costs in (link.alpha, link.beta, link.gap))
    return dataclasses.replace(link, alpha=alpha, beta=beta, gap=gap, per_node=per_node)


def ranks_per_node() -> int:
    """Return the ranks per host if several hosts have equally many (more than 1), in rank order; else 0. Collective.

    LOCAL_WORLD_SIZE of torchrun counts if all ranks have the same value; otherwise the machines of the ranks.
    """
    world, local = dist.get_world_size(), os.environ.get("LOCAL_WORLD_SIZE")
    seen = all_gather_object((local, machine_id()))
    if local is not None and {size for size, _ in seen} == {local}:
        count = int(local)
    else:
        hosts = [host for _, host in seen]
        runs = [len(list(same)) for _, same in itertools.groupby(hosts)]
        count = runs[0] if len(set(runs)) == 1 and len(runs) == len(set(hosts)) else 0
    return count if 1 < count < world and world % count == 0 else 0


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
