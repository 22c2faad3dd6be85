"""Stages in which a run is measured while it trains, each of a few steps under one plan, up to a profile; and the bytes
that are known before a plan is made.

A loop runs the stages with its own steps (:mod:`mdcs.api.session`), and ``mdcs.autoprofile`` with the step it is given.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch

from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers, Optimizers, Updates, by_optimizer
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import floor_bytes, lacks_recomputation, limit_of, make_plan, unsharded_bytes
from mdcs.planner.recompute import AUTO, KEEP, Planned, RecomputeRule
from mdcs.planner.schedulers import Sequential, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.link import Collectives, Kind, Link
from mdcs.profile.recompute import FULL, REASONS, SELECTIVE, RecomputeOption
from mdcs.profile.schema import Profile
from mdcs.profiler.consensus import all_gather_object, is_rank_zero, on_rank_zero, phase, ranks_per_node, world_size
from mdcs.profiler.cost_fit import Run, calibration_plans, fit_costs, run_name
from mdcs.profiler.merging import largest, merge_profiles, mix, order, typical, with_slots_of
from mdcs.profiler.model_profile import unmeasured_profile
from mdcs.profiler.running_steps import RunningSteps, estimated, reasons_against, recompute_options, with_recomputation
from mdcs.profiler.slot_recorder import SlotRecorder
from mdcs.profiler.stages import Ran, Stage, TimedSteps
from mdcs.runtime.communicator import backend_of
from mdcs.runtime.engine import Engine
from mdcs.sizes import MIB, Budget


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
        world = world_size() if self.emulate is None else self.emulate.world
        if self.budget.size is not None:
            least = min_peak_bytes(self.units, self.optimizers.members, world, self.master_dtype)
            if self.budget.size <= least:
                what = "the model (parameters and optimizer state alone)"
                error = InfeasibleBudget(self.budget.size, least, what, is_bound=True)
                raise error.in_words_of(self.budget, lambda: 0)
        updates = Updates(self.optimizers)
        units = by_optimizer(self.units, updates)
        collectives = self.collectives or Collectives.default(backend_of(None, self.device) if world > 1 else "gloo")
        depth = collectives.in_flight(self.depth) or self.depth
        return merge_profiles(
            unmeasured_profile(
                units, updates, self.device, world=world, link=self.link or likely_link(ranks_per_node(), depth),
                collectives=collectives, master_dtype=self.master_dtype, grad_dtype=self.grad_dtype, about=self.about,
            )  # fmt: skip
        )

    def provisional(self, profile: Profile, recompute: tuple[str, ...] = ()) -> Plan:
        """Return a plan of the fewest bytes, or of no shards. Collective.

        Whatever the steps do otherwise is a departure. Raises InfeasibleBudget for a model that has not run.
        """
        strategy, job = Uniform("fsdp" if self.sharded else "dp"), replace(self.job(profile), recompute=recompute)
        limit = self.budget.size if self.sharded and not recompute else None
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
        if is_rank_zero():
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
        """Return a profile of slots and bytes for each batch, and the run if its plan tells the costs of messages."""
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
            own.append(ran.heard.profile(plan.job.profile))
        profiles = [*map(merge_profiles, own)]
        job = self.job(mix(profiles))
        needed = self.recompute == AUTO and on_rank_zero(lambda: lacks_recomputation(job, self.budget))
        if needed or self.recompute not in (AUTO, KEEP):
            phase("measuring the model in steps that recompute activations")
            most = largest(profiles)
            base = heard[most].recorder
            profiles[most] = yield from self._recomputing(ran.engine, base, own[most], profiles[most], most)
        return profiles, [_run(ran)] if tells and order(plan.profile) == order(profiles[0]) else []

    def _recomputing(
        self, engine: Engine, base: SlotRecorder, own: Profile, profile: Profile, batch: int
    ) -> Generator[Stage, Ran, Profile]:
        """Return the profile of a batch with what recomputation frees and costs. ``base``, ``own``: of this rank."""
        units, options = engine.units, list[RecomputeOption]()
        reasons = reasons_against(engine.model, units, base)
        able = [u for u, reason in enumerate(reasons) if not reason]
        # the same on all ranks: those that took another branch may know of more units
        agreed = sorted(set(able).intersection(*all_gather_object(able)))
        for choice in (FULL, SELECTIVE):
            assumed, recompute = with_recomputation(profile, dict.fromkeys(agreed, choice == SELECTIVE))
            plan = self.provisional(assumed, recompute)
            ran = yield Stage(plan, self._steps, functools.partial(RunningSteps, like=base), batch=batch)
            assert isinstance(ran.heard, RunningSteps)
            again = ran.heard.recorder
            if not all(all_gather_object(bool(again.seconds))):
                # some rank has run other slots than before: it would have to be compared with itself
                outputs = {u: max(of.get(u, 0) for of in all_gather_object(base.outputs)) for u in agreed}
                return replace(profile, recompute=estimated(profile, agreed, outputs))
            options += recompute_options(base, again, able, choice)
        having = {option.unit for option in options}
        kept = [f"{unit.name}: {reasons[u] or 'frees nothing'}" for u, unit in enumerate(units) if u not in having]
        about = own.about | ({REASONS: "; ".join(kept)} if kept else {})
        return merge_profiles(replace(own, recompute=tuple(options), about=about))

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
    return replace(link, alpha=alpha, beta=beta, gap=gap, per_node=per_node)


def used_outside(profile: Profile) -> str:
    """Return one line about units that a step uses outside of their modules' forward; "" for none."""
    found = [(u.name, own.param_bytes) for u, own in zip(profile.units, profile.layouts, strict=True) if u.aliased]
    if not found:
        return ""
    names = ", ".join([name for name, _ in found][:3]) + f" and {len(found) - 3} more" * (len(found) > 3)
    return (
        f"used outside of their modules' forward: {names}. They are whole from their first to their last use in a "
        f"step, {sum(size for _, size in found) / MIB:.3g} MiB"
    )


# ---- bytes that every plan needs, and that measuring holds


def min_peak_bytes(
    units: Sequence[ModelUnit], optimizer: GivenOptimizers, world: int, master_dtype: torch.dtype | None = None
) -> int:
    """Return a lower bound of any plan's peak on some of ``world`` ranks, without activations: every unit and its
    optimizer state in shards of 1/world, and the largest unit whole, as it is while it computes.
    """
    updates = Updates(Optimizers(optimizer))
    rest = largest = 0.0
    for unit in units:
        for _, p in unit.parameters:
            own = p.element_size() if master_dtype is None else max(p.element_size(), master_dtype.itemsize)
            layout = updates.layout_of(p)  # state of whole parameters may be smaller than they are
            kept = own * (1 + (0 if layout.whole else layout.tensors(own))) if unit.trainable else p.element_size()
            rest += p.numel() * kept / world
        largest = max(largest, sum(p.nbytes for _, p in unit.parameters) * (1 - 1 / world))
    return math.floor(rest + largest)


def whole_bytes(units: Sequence[ModelUnit], optimizers: Optimizers) -> int:
    """Return what a first step holds without shards: parameters, gradients, optimizer state, one averaged gradient."""
    updates, trained = Updates(optimizers), [p for unit in units if unit.trainable for _, p in unit.parameters]
    more = sum(p.nbytes * (1 + updates.layout_of(p).tensors(p.element_size())) for p in trained)
    held = sum(p.nbytes for unit in units for _, p in unit.parameters)
    return math.ceil(held + more) + max((p.nbytes for p in trained), default=0)


def profiling_bytes(units: Sequence[ModelUnit]) -> int:
    """Return what measuring a model holds at least: parameters whole, and the largest gradient."""
    gradients = [p.nbytes for unit in units if unit.trainable for _, p in unit.parameters]
    return sum(p.nbytes for unit in units for _, p in unit.parameters) + max(gradients, default=0)


def require_floor(job: Job, asked: Budget, limit: int) -> None:
    """Raise InfeasibleBudget, in the words of the budget ``asked``, if no plan of the job keeps its ``limit`` of bytes,
    also with the recomputation that the profile knows.
    """
    if limit >= (floor := floor_bytes(job)) or limit >= (recomputed := floor_bytes(job, Planned())):
        return
    error = InfeasibleBudget(limit, floor, "the model", recomputed=recomputed if recomputed < floor else None)
    raise error.in_words_of(asked, lambda: unsharded_bytes(job))


def warn_padding(profile: Profile) -> None:
    """Warn of the unit that is padded most because ranks own whole parameters, if that is much of the model."""
    plain = [layout.numel * layout.param_width for layout in profile.layouts]
    padded = [layout.param_bytes for layout in profile.layouts]
    if sum(padded) - sum(plain) < max(MIB, sum(plain) / 4):
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
