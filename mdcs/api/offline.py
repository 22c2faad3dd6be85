"""Profiles and plans before a loop: the stages of a loop's first steps, run with a step that is given."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.api.loop_plan import Choice, Planning, must_shard, require_measured, say_refusals_once
from mdcs.api.session import Session
from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers, Optimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import JointPlanner, Scheduler, StrategyPlanner
from mdcs.planner.recompute import AUTO, KEEP, Planned, RecomputeRule, recompute_named
from mdcs.profile.link import Collectives, Link
from mdcs.profile.schema import Profile
from mdcs.profiler.consensus import all_gather_object, barrier, on_all_ranks, phase
from mdcs.profiler.measurement import Measurement, profiling_bytes, warn_profiling_memory
from mdcs.profiler.model_profile import refuse_meta
from mdcs.profiler.model_snapshot import preserve_model
from mdcs.profiler.stages import Ran, Stage, Trial, chosen, take_turns, with_trials
from mdcs.runtime.communicator import backend_of
from mdcs.runtime.engine import Engine, Trained
from mdcs.runtime.executor import with_index
from mdcs.runtime.validation import RunOptions
from mdcs.sizes import Budget
from mdcs.telemetry.memory_meter import Meter, current_meter

STEPS = 8
"""Steps of a trial, per plan."""
T = TypeVar("T")


def autoprofile(
    model: nn.Module,
    optimizer: GivenOptimizers,
    units: list[ModelUnit],
    step: Callable[..., Tensor],
    *,
    batches: Sequence[Any] | None = None,
    link: Link | None = None,
    depth: int = 2,
    algorithm: str | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    iterations: int = 1,
    about: dict[str, str] | None = None,
    emulate: Emulation | None = None,
    budget: Budget | int | str | None = None,
    progress: bool = True,
    recompute: bool | None = False,
    job: Callable[[Profile], Job] = Job,
) -> Profile:
    """Return the profile of this job, the same on all ranks. Collective: call it on every rank.

    The model trains for some steps, as a loop's first steps do (:func:`mdcs.parallelize`): slots and bytes are measured
    under a provisional plan, then the costs of messages under a few plans that tell them apart.
    :attr:`mdcs.Profile.calibration_runs` says how well the profile predicts plans that it was not fitted to. Afterwards
    model, optimizer and random state are as before; gradients are gone.

    - ``step``: runs one forward pass on a typical batch and returns the loss. With ``batches`` it is given the batch.
    - ``batches``: example batches of several sizes, as many on every rank: memory is that of the largest, by slot, and
      time the mean.
    - ``link``: an emulated link; None: the real one, whose costs are measured.
    - ``depth``: messages in flight. On NCCL it is one.
    - ``algorithm``: a family of collective algorithms; None: the backend's (:meth:`mdcs.Collectives.default`).
    - ``master_dtype``, ``grad_dtype``: in mixed precision, types of the copy that the optimizer updates, and in which
      gradients are summed; None: the parameters' type.
    - ``iterations``: timed steps under each plan. ``about``: stored in the profile.
    - ``emulate``: that of :func:`mdcs.parallelize`.
    - ``budget``: bytes per rank, or a text such as "40GiB" or "75% of ddp" (:class:`mdcs.sizes.Budget`). A budget that
      no plan can keep is refused as soon as that is known. While the model is measured its weights are kept beside, so
      that the budget may be exceeded: a warning says so.
    - ``recompute``: measure recomputation, too (:attr:`mdcs.Profile.recompute`), of the largest batch. None: only where
      no plan keeps the budget without. ``job``: makes the job that is planned under the budget.
    - ``progress``: whether rank 0 logs a line for each phase, or writes it to stderr (:mod:`mdcs.profiler.consensus`).

    What one rank raises alone the others hear of at once: they raise RunError with its words, or with the rank that was
    killed. Raises ValueError for a family that the backend does not have, for ``iterations`` and ``depth`` below 1, and
    for a type that is neither the parameters' nor a wider float; UnsupportedModel for a parameter on the meta device;
    InfeasibleBudget, see above; and what :func:`mdcs.parallelize` raises.
    """
    refuse_meta(model)
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")
    wanted, device = Budget.of(budget), units[0].parameters[0][1].device
    optimizers, steps = Optimizers(optimizer), steps_of(step, batches)
    backend = backend_of(None, device)
    measuring = Measurement(
        units, optimizers, device, wanted, AUTO if recompute is None else Planned() if recompute else KEEP,
        sharded=must_shard(units, optimizers, wanted.size)[0], job=job, iterations=iterations, link=link,
        collectives=None if algorithm is None else Collectives(algorithm, backend), depth=depth, emulate=emulate,
        master_dtype=master_dtype, grad_dtype=grad_dtype, batches=len(steps), about=about,
    )  # fmt: skip

    def stages() -> Generator[Stage, Ran, Profile]:
        return (yield from measuring.profile(measuring.provisional(measuring.unmeasured())))

    with on_all_ranks(tells=progress):
        if len(set(all_gather_object(len(steps)))) > 1:
            raise ValueError("ranks were given different numbers of batches")
        if wanted.size is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            warn_profiling_memory(profiling_bytes(units), wanted.size)
        return rehearse(stages(), model, optimizer, units, steps, emulate=emulate)


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
    seconds: float = Planning.seconds,
    progress: bool = True,
) -> Plan:
    """Return a plan for training ``model`` within ``budget`` per rank. Collective: call it on every rank.

    ``budget`` is in bytes or in words (:class:`mdcs.sizes.Budget`): a size such as ``"40GiB"``, a part such as
    ``"75% of ddp"`` of what data parallelism without sharding (DDP) needs, or ``"floor+10%"``, above the smallest
    possible; None is no limit. The profile is that of :func:`mdcs.autoprofile`, or ``profile``, one of an equal job,
    the same on every rank; without ranks :func:`mdcs.make_plan` plans alike. ``step`` runs one forward pass on a
    typical batch and returns the loss. With ``batches``, examples of the sizes that the loop draws, ``step`` is given
    the batch: the plan has room for the largest, and its time is that of the mix.

    ``strategy`` and ``scheduler`` are planners or their names (:mod:`mdcs.planner.pipeline`); the scheduler is priority
    unless one is given, and none for a strategy that decides the schedule. ``recompute`` (auto, none, all, selective,
    random, planned, or a rule) says which units recompute their activations (:mod:`mdcs.planner.recompute`); with auto
    none does unless no other plan keeps the budget, and one line says what that frees and costs. ``schedule_share`` is
    that of :func:`mdcs.make_plan`; ``micro_steps``, ``cross_iteration`` and ``reserve`` (bytes) are those of
    :class:`mdcs.Job`. ``master_dtype`` and ``grad_dtype`` are for mixed precision, as in :func:`mdcs.autoprofile`. With
    ``trials`` above 1 so many plans that differ (:func:`mdcs.planner.trials.proposals`) run for a few steps each, and
    the fastest is returned. Where memory cannot be measured (:func:`mdcs.telemetry.memory_meter.unmeasured`), a budget
    in bytes does not count activations, with a warning, and a part is refused. ``seconds``: time limit of planners that
    are named, not given. With ``progress`` rank 0 logs a line for each phase; without handlers for logging it writes
    them to stderr, with a bar on a terminal. A budget that no plan can keep is refused as soon as that is known.

    Raises ValueError for an unknown name and for ``seconds`` that are not above 0, what :func:`mdcs.autoprofile`
    raises, and on every rank what planning raises on rank 0: InfeasibleBudget, with the smallest feasible budget in
    bytes, where none fits. Where one rank raises alone, or is killed, the others raise RunError with its words.
    """
    say_refusals_once()
    wanted = Budget.of(budget)
    rule = recompute_named(recompute) if isinstance(recompute, str) else recompute
    planning = Planning(wanted, rule, strategy, scheduler, schedule_share, trials, seconds)
    if wanted.size is not None and reserve >= wanted.size:
        raise ValueError(f"reserve must be below the budget of {wanted.size} bytes, got {reserve}")
    job_of = functools.partial(Job, micro_steps=micro_steps, cross_iteration=cross_iteration, reserve=reserve)
    device = units[0].parameters[0][1].device
    with on_all_ranks(tells=progress):
        if profile is None:
            require_measured(wanted, device)
            profile = autoprofile(
                model, optimizer, units, step, batches=batches, master_dtype=master_dtype, grad_dtype=grad_dtype,
                budget=wanted, progress=progress, job=job_of, recompute=None if rule == AUTO else rule != KEEP,
            )  # fmt: skip
        plans = planning.begin(job_of(profile), device).result()
        return fastest(plans, model, units, steps_of(step, batches)[0], optimizer)[0]


def fastest(
    plans: Sequence[Plan], model: nn.Module, units: list[ModelUnit], step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
) -> tuple[Plan, tuple[Trial, ...]]:  # fmt: skip
    """Return the plan that is fastest when it runs, and all trials. Collective, with the same plans. The plan's outcome
    lists the trials. Model, optimizer and random state are as before; gradients are gone. ``step`` runs the forward
    pass of a micro-step and returns the loss. One plan is returned without trials, and so is the first one in a world
    of one.
    """
    if len(plans) < 2 or plans[0].world == 1:
        return plans[0], ()
    phase("trying plans", STEPS * sum(plan.prediction.step_s for plan in plans if plan.prediction is not None))
    trials = rehearse(take_turns(plans, STEPS * len(plans)), model, optimizer, units, [step])
    return with_trials(chosen(trials), trials), trials


def steps_of(step: Callable[..., Tensor], batches: Sequence[Any] | None) -> list[Callable[[], Tensor]]:
    """Return a step for each batch; without ``batches`` the one step. Raises ValueError for none."""
    if batches is not None and not len(batches):
        raise ValueError("batches must have at least one batch")
    return [step] if batches is None else [functools.partial(step, batch) for batch in batches]


def rehearse(
    stages: Generator[Stage, Ran, T], model: nn.Module, optimizer: GivenOptimizers, units: list[ModelUnit],
    steps: Sequence[Callable[[], Tensor]], *, emulate: Emulation | None = None,
) -> T:  # fmt: skip
    """Train through the ``stages`` with ``steps``, one for each example batch; return what they return. Collective.
    Model, optimizer and random state are as before in the end, without gradients.
    """
    optimizers, meter = Optimizers(optimizer), current_meter(units[0].parameters[0][1].device)
    barrier()
    try:
        with (
            warnings.catch_warnings(), preserve_model(model, meter), _preserve_weights(model, meter),
            _preserve_optimizers(optimizers, meter),
        ):  # fmt: skip
            # The model's own weights are kept beside the plan's buffers.
            warnings.filterwarnings("ignore", r"rank \d+, step \d+: .* above the budget")
            return _trained(stages, Trained(model, optimizers, units), steps, emulate)
    finally:
        gc.collect()  # the run's parts hold each other, and buffers


def _trained(
    stages: Generator[Stage, Ran, T], trained: Trained, steps: Sequence[Callable[[], Tensor]], emulate: Emulation | None
) -> T:
    device = with_index(trained.units[0].parameters[0][1].device)
    # Buffers are restored: each rank's own may change, whatever the run's option will be.
    options = RunOptions(emulate=emulate, broadcast_buffers=False, device=device)
    choice = Choice(stages)
    session = Session(Engine(trained, choice.plan, options), trained.units, choice)
    try:
        while choice.stage is not None:
            for _ in range(session.plan.micro_steps):
                loss = steps[choice.stage.batch]() / session.plan.micro_steps  # alive until the next, as in a loop
                loss.backward()
            session.step()
    except BaseException as error:
        session.__exit__(type(error), error)
        raise
    finally:
        session.close(whole=False)
        for storage in session._engine.storages:
            storage.guard.open()
    return choice.result


@contextlib.contextmanager
def _preserve_weights(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Restore the parameters, without gradients. Copies of a GPU's are kept on the host."""
    weights = [(p, p.device, p.data if p.device.type == "cpu" else p.data.cpu()) for p in model.parameters()]
    for *_, data in weights:
        meter.retag(data, "parameters")  # not activations
    try:
        yield
    finally:
        for p, device, data in weights:
            p.data, p.grad = data.to(device), None


@contextlib.contextmanager
def _preserve_optimizers(optimizers: Optimizers, meter: Meter) -> Iterator[None]:
    """Run updates that start without state, then restore the optimizers' state, options and attributes (counts)."""
    before = [(each, dict(vars(each)), [dict(group) for group in each.param_groups]) for each in optimizers.members]
    for value in (v for of in optimizers.state.values() for v in of.values() if isinstance(v, Tensor)):
        meter.retag(value, "optimizer")  # of training so far: not activations
    for each in optimizers.members:
        each.state = defaultdict(dict)
    try:
        yield
    finally:
        for each, attributes, groups in before:
            vars(each).update(attributes)
            for group, options in zip(each.param_groups, groups, strict=True):
                group.clear()
                group.update(options)
