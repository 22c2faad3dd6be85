"""``parallelize``: one call for a start, with a plan or with one that is made in the loop."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mdcs.api.loop_plan import TRIALS, Choice, LoopPlan, Planning, must_shard, require_measured, say_refusals_once
from mdcs.api.session import Session
from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers, Optimizers, Updates, without_ddp
from mdcs.model.units import ModelUnit, describe_units, partition
from mdcs.plan.plan import Plan
from mdcs.planner.recompute import AUTO, KEEP, RecomputeRule, recompute_named
from mdcs.profile import cache
from mdcs.profiler.consensus import tell
from mdcs.profiler.measurement import Measurement
from mdcs.runtime.engine import Engine, Trained
from mdcs.runtime.executor import with_index
from mdcs.runtime.gradient_scaling import LossScale
from mdcs.runtime.initialization import InitFunction
from mdcs.runtime.validation import RunOptions, refuse_parallelized
from mdcs.sizes import Budget

logger = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    optimizer: GivenOptimizers,
    plan: Plan | Choice | None = None,
    units: list[ModelUnit] | None = None,
    *,
    budget: int | str | None = None,
    over_budget: str = "warn",
    recompute: str | RecomputeRule = "auto",
    seconds: float = Planning.seconds,
    progress: bool = True,
    profiles: bool | str | Path = True,
    micro_steps: int | None = None,
    trials: int = TRIALS,
    replan: str | None = None,
    group: dist.ProcessGroup | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    loss_scale: LossScale | None = None,
    broadcast_buffers: bool | None = None,
    timeout_s: float = 300.0,
    emulate: Emulation | None = None,
    init: InitFunction | None = None,
    device: torch.device | str = "cpu",
) -> Session:
    """Train ``model`` in your own loop, within ``budget`` or as ``plan`` says.

    Call it on every rank after ``init_process_group``. Parameters are broadcast from rank 0. ``optimizer`` (or several,
    in a list, each with some of the parameters) keeps its options and learning-rate schedules; its updates run on
    shards, inside ``backward`` and the next forward. Messages have a process group of their own, so the loop may use
    ``group`` for its collectives; where ``group`` has some of the ranks only, the groups of messages stay open after
    ``close()``. ``model`` may be in DistributedDataParallel, which from then on only calls it, and both may come from
    ``accelerator.prepare``. Then::

        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()         # or parallel.step(), after plan.micro_steps backward passes

    - ``plan``: its hash is compared. A program may give its own :class:`mdcs.api.loop_plan.Choice` instead: the plans
      of its stages. None: the loop trains from its first step, under a plan that is made from bytes alone; its steps
      are measured, a few other plans run for some steps each, and the fastest is kept after about 20 steps
      (``parallel.is_choosing``, ``parallel.explain()``). Each of these steps trains as any other. In the first steps
      all units are whole on every rank, or all are sharded: the latter for a model on the meta device, and where
      parameters, gradients and optimizer state are more than the budget in bytes. A whole model may take more than
      the budget in the first three of them, while its activations are not known. All compiled code of the process is
      dropped once, and compiled anew when it is used.
    - ``units``: the units that the plan was made for. None: those of :func:`mdcs.partition`.
    - ``budget``, ``recompute``, ``seconds``, ``progress``: of :func:`mdcs.autoplan`, for a plan that is made here.
    - ``profiles``: the folder of kept profiles of first steps, by which a later start of an equal job plans in seconds,
      unless the model is sharded from the start. True: ``~/.cache/mdcs/profiles`` (``$MDCS_CACHE/profiles``). False:
      none is kept or used.
    - ``micro_steps``: backward passes of a step. None: the first step counts them, and its messages wait for its end; 1
      where the model is sharded from the start. A given plan has them.
    - ``trials``: plans that may take turns before one is chosen; 1: the planner's runs without a trial.
    - ``replan``: "auto" chooses anew when steps take 10 % more or less than the chosen plan's first ones, in the median
      of 50: another network, another batch. None: never.
    - ``over_budget``: "warn" warns once of steps that take more than the budget, of larger batches for example; "raise"
      ends the run on every rank at one. On CPU bytes are known where memory is measured (:func:`mdcs.autoplan`).
    - ``clip_norm``: clips the global gradient norm. Clipping is a barrier: the plan must have cross_iteration off.
    - ``clip_value``: clips every element of the gradients to [-clip_value, clip_value]. No barrier.
    - ``loss_scale``: dynamic loss scale for float16, also a barrier. Call ``parallel.scaled(loss).backward()`` then, or
      let ``parallel.scaler`` take the place of a GradScaler.
    - ``broadcast_buffers``: True broadcasts rank 0's buffers after every step, as DDP does; False leaves each rank its
      own. None broadcasts them when training pauses, and refuses a model whose forward changes buffers other than
      BatchNorm's.
    - ``timeout_s``: bounds every wait (seconds).
    - ``emulate``: this one process is a rank of the plan's world, on its emulated link (:mod:`mdcs.emulation`).
    - ``init``: initialises a module's own parameters and buffers on the meta device; None: ``reset_parameters()``.
    - ``device``: where parameters and buffers from the meta device are made, unit by unit.

    Masters, where the plan's profile has them, start as the model's parameters. docs/loops.md says what a loop may do
    with model and optimizer during the run. Raises PlanError (it names ranks with another plan), ValueError for a plan
    that does not fit the model and for a parameter that would not be trained, and RunError, naming rank, step and
    message, for later failures. The first step raises what :func:`mdcs.autoplan` raises.
    """
    wanted = Budget.of(budget)
    say_refusals_once()
    rule = recompute_named(recompute) if isinstance(recompute, str) else recompute
    model, optimizers = without_ddp(model), Optimizers(optimizer)
    refuse_parallelized(model)
    units = partition(model) if units is None else units
    options = RunOptions(
        clip_norm=clip_norm, clip_value=clip_value, loss_scale=loss_scale, broadcast_buffers=broadcast_buffers,
        timeout_s=timeout_s, emulate=emulate, init=init, device=with_index(device), over_budget=over_budget,
    )  # fmt: skip
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if micro_steps is not None and micro_steps < 1:
        raise ValueError(f"micro_steps must be >= 1, got {micro_steps}")
    if replan not in (None, "auto"):
        raise ValueError(f'replan must be "auto" or None, got {replan!r}')
    if plan is not None:
        if wanted.is_limit:
            raise ValueError("the plan has a budget already: give plan= or budget=")
        for name, is_given in (("recompute", rule not in (AUTO, KEEP)), ("micro_steps", micro_steps is not None)):
            if is_given:
                raise ValueError(f"{name}= is for a plan that is made here: mdcs.autoplan({name}=)")
        choice = plan if isinstance(plan, Choice) else None
        plan = plan.plan if isinstance(plan, Choice) else plan
        run = Engine(Trained(model, optimizers, units), plan, options, group)
        return Session(run, units, choice, was_in_pieces=is_meta)
    for given, name in ((group, "group"), (emulate, "emulate"), (None if is_meta else init, "init")):
        if given is not None:
            raise ValueError(f"{name}= needs a plan, made before the loop: mdcs.autoplan")
    sharded, why = must_shard(units, optimizers, wanted.size)
    own = units[0].parameters[0][1].device
    on = options.device if own.type == "meta" else own
    require_measured(wanted, on)
    Updates(optimizers)  # refuses one that cannot run on shards before it has made a step
    making = LoopPlan(
        Measurement(units, optimizers, on, wanted, rule, sharded),
        Planning(wanted, rule, trials=trials, seconds=seconds),
        cross_iteration=not options.needs_norm, micro_steps=micro_steps, replans=replan == "auto",
        folder=None if profiles is False else cache.cache_folder() if profiles is True else Path(profiles),
    )  # fmt: skip
    if progress and (not dist.is_initialized() or dist.get_rank() == 0):
        for line in (describe_units([(u.name, u.modules) for u in units]), why):
            if line:
                tell(line, logger)
    choice = Choice(making.stages(), making.trials, tells=progress)
    run = Engine(Trained(model, optimizers, units), choice.plan, options)
    return Session(run, units, choice, was_in_pieces=sharded)
