"""Refusals before step 1 of plans, jobs and models that do not fit. Every message says what to do instead."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from mdcs.emulation import Emulation
from mdcs.model.guard import GuardedParameter
from mdcs.model.optimizers import Optimizers, Updates, by_optimizer, in_flat_order
from mdcs.model.recompute import refuse_recomputation
from mdcs.model.units import ModelUnit, UnsupportedModel, dtype_name, refuse_shared_memory
from mdcs.plan.ledger import check
from mdcs.plan.plan import Plan, PlanError
from mdcs.profile.recompute import NONE
from mdcs.runtime import optimizer_state
from mdcs.runtime.communicator import ProcessGroups
from mdcs.runtime.errors import ErrorContext, ranks_in_words
from mdcs.runtime.gradient_scaling import LossScale
from mdcs.runtime.initialization import InitFunction, Initializer, check_buffers, layout
from mdcs.torch_compat import gradient_hooks, step_hooks

_UNITS_ANEW = "call mdcs.partition(model) again, and make a new plan"
_ANEW = "partition the model as it was then, or make a new plan (mdcs.autoplan)"


@dataclass(frozen=True)
class RunOptions:
    """The options of :func:`mdcs.parallelize`, which describes them."""

    clip_norm: float | None = None
    clip_value: float | None = None
    loss_scale: LossScale | None = None
    broadcast_buffers: bool | None = None
    timeout_s: float = 300.0
    emulate: Emulation | None = None
    init: InitFunction | None = None
    device: torch.device = torch.device("cpu")
    over_budget: str = "warn"

    def __post_init__(self) -> None:
        if self.over_budget not in ("warn", "raise"):
            raise ValueError(f'over_budget must be "warn" or "raise", got {self.over_budget!r}')

    @property
    def needs_norm(self) -> bool:
        """Return whether the gradients of all units are looked at before any update."""
        return self.clip_norm is not None or self.loss_scale is not None


# ---- before step 1


@dataclass
class ValidationResult:
    """Results of the checks, and the ``problem`` if there is one, which no rank raises before all ranks know of it.

    - ``units``: those of the plan, with their parameters in flat order.
    - ``untrained``: names of trainable parameters that are in no optimizer.
    - ``updates``: how parameters are updated; None if that is the problem. ``state``: histories of those that have one.
    """

    problem: Exception | None = None
    units: list[ModelUnit] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    updates: Updates | None = None
    state: dict[tuple[int, int], optimizer_state.History] = field(default_factory=dict)
    initialisation: Initializer | None = None


def validate(
    model: nn.Module, optimizers: Optimizers, plan: Plan, units: list[ModelUnit], options: RunOptions,
    *, processes: int, backend: str, device: torch.device, updates: Updates | None = None,
) -> ValidationResult:  # fmt: skip
    """Check plan, job and model on this rank. ``device``: of parameters, now or later. ``updates``: of a run before."""
    result = ValidationResult()
    try:
        _fits_processes(plan, processes, backend, options.emulate, device)
        _covers(model, units, optimizers)
        keeps_order(model, backend)
        check_buffers(model)
        result.updates = updates = updates or Updates(optimizers)
        units = by_optimizer(units, updates)
        _fits_job(plan, options, updates)
        check(plan)
        result.units = units = _match(plan, units, updates)
        refuse_recomputation(model, units, [u for u, choice in enumerate(plan.recompute) if choice != NONE])
        result.untrained = [
            name for unit in units if unit.trainable for name, p in unit.parameters if p not in updates.groups
        ]
        result.initialisation = Initializer(model, units, options.init, device)
        result.state = optimizer_state.histories([unit.parameters for unit in units], updates, optimizers.state)
    except Exception as e:  # told to the other ranks, which would wait for this one
        result.problem = e
    return result


def warn_untrained(names: Sequence[str]) -> None:
    """Warn of parameters that are in no optimizer, if there are some."""
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{names[0]}{others}: in no optimizer, so the plan reduces their gradients and does not train them: call "
            "requires_grad_(False) before partition() to save their messages",
            stacklevel=5,
        )


def _fits_processes(plan: Plan, processes: int, backend: str, emulate: Emulation | None, device: torch.device) -> None:
    """Raise PlanError unless each rank is a process of the plan's backend; an emulated world is one process."""
    problem, again, planned = "", "make a new plan", plan.profile.collectives
    if emulate is not None:
        if processes != 1:
            problem = f"an emulated world is one process, the process group has {processes}"
        elif emulate.world != plan.world:
            problem = f"the plan is for {plan.world} ranks, the emulated world has {emulate.world}"
        elif not plan.profile.link.emulated:
            problem = "an emulated world sends nothing: plan with an emulated link, mdcs.Link.uniform(…, emulated=True)"
        elif within := next((k for k in plan.strategies if k.in_node), None):
            problem = f"an emulated world has no nodes, and the plan shards within them ({within.value}): plan without"
    elif processes != plan.world:
        problem = f"the plan is for {plan.world} ranks, the process group has {processes}: start as many, or {again}"
    elif processes > 1 and backend != planned.backend:
        problem = f"the plan is for collectives of {planned.backend}, the process group is of {backend}: {again}"
    elif processes > 1 and planned.algorithm == "ring" and device.type != "cpu":
        problem = (
            "the plan sends in rings, which gloo has on CPUs only: on a GPU make a new plan, with "
            "Collectives('native', 'gloo')"
        )
    if problem:
        raise PlanError(problem)


def _fits_job(plan: Plan, options: RunOptions, updates: Updates) -> None:
    """Raise PlanError or ValueError if clipping, loss scale or optimizers are not those that the plan was made for."""
    for given, what in ((options.clip_norm, "clip_norm="), (options.loss_scale, "loss_scale=")):
        if given is not None and plan.cross_iteration:
            raise PlanError(
                f"{what} needs all gradients before the first update, and this plan updates earlier: make the plan "
                "with cross_iteration=False"
            )
    for name, limit in (("clip_norm", options.clip_norm), ("clip_value", options.clip_value)):
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} must be > 0, got {limit}")
    planned = plan.profile.optimizers[:-1]  # the last one is none
    if len(updates.parts) != len(planned):
        made_for = " and ".join(o.name for o in planned)
        passed = " and ".join(type(o).__name__ for o in updates.optimizers.members)
        raise ValueError(f"the plan was made for {made_for}, and you pass {passed}: {_another(made_for)}")
    for i, (part, theirs) in enumerate(zip(updates.parts, planned, strict=True)):
        units = zip(plan.profile.units, plan.profile.layouts, strict=True)
        widths = [layout.updated_width for unit, layout in units if unit.trainable and unit.optimizer == i]
        state = part.layout.tensors(min(widths)) if widths else theirs.state_tensors
        if not part.layout.whole and (state, part.layout.fixed) != (theirs.state_tensors, theirs.state_fixed):
            raise ValueError(
                f"the plan was made for {theirs.name} with {theirs.state_tensors:g} state tensors per parameter, and "
                f"you pass {type(part.optimizer).__name__} with {state:g}: "
                f"{_another(f'{theirs.name} with the same options')}"
            )
    for optimizer in updates.optimizers.members:
        if any(step_hooks(optimizer)):
            name = type(optimizer).__name__
            raise ValueError(f"{name} has hooks on step(), which is not called: call them after parallel.step()")


def _another(same: str) -> str:
    return f"pass {same}, or make a new plan (mdcs.autoplan)"


def refuse_parallelized(model: nn.Module) -> None:
    """Raise UnsupportedModel for a model that a run has."""
    for name, p in model.named_parameters():
        owners = [getattr(hook, "__module__", None) or "" for hook in gradient_hooks(p)]
        if issubclass(type(p), GuardedParameter) or any(owner.startswith("mdcs.") for owner in owners):
            raise UnsupportedModel(
                f"{name}: is parallelized already: close() that first, or build it anew if it is in pieces"
            )


def _covers(model: nn.Module, units: list[ModelUnit], optimizers: Optimizers) -> None:
    """Raise UnsupportedModel for a parameter that would not be trained, or not by this runtime alone."""
    refuse_parallelized(model)
    names = {p: name for name, p in model.named_parameters()}
    held = {p for unit in units for _, p in unit.parameters}
    trained = [p for group in optimizers.param_groups for p in group["params"]]
    for number, p in enumerate(trained):
        if p.requires_grad and p not in held and p.numel():  # one without elements needs no training
            name = names.get(p) or f"parameter {number} of the optimizer, of shape {tuple(p.shape)}"
            raise UnsupportedModel(
                f"{name}: is in the optimizer and in no unit, so it would never be trained: "
                f"{_UNITS_ANEW if p in names else 'pass the model that has it, or leave it out of the optimizer'}"
            )
    for name, p in model.named_parameters():
        if p not in held and p.numel():
            raise UnsupportedModel(f"{name}: is in no unit, so it was added after partition(): {_UNITS_ANEW}")
        if p in held and gradient_hooks(p):
            raise UnsupportedModel(
                f"{name}: has a hook for its accumulated gradient (register_post_accumulate_grad_hook), which mdcs "
                "takes: remove the hook"
            )
    refuse_shared_memory(model)  # again: the model may have changed since partition()


def keeps_order(model: nn.Module, backend: str) -> None:
    """Raise UnsupportedModel for a module whose forward has collectives that could mix with the plan's messages."""
    for name, module in model.named_modules() if backend == "nccl" else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedModel(
                f"{name}: SyncBatchNorm's collectives would come between the messages, on each rank elsewhere: use "
                "BatchNorm"
            )


def _match(plan: Plan, units: list[ModelUnit], updates: Updates) -> list[ModelUnit]:
    """Return the units with their parameters in flat order. Raises ValueError where plan and model differ."""
    if len(units) != len(plan.profile.units):
        raise ValueError(f"the plan has {len(plan.profile.units)} units, the model {len(units)}: {_ANEW}")
    matched = []
    for unit, planned in zip(units, plan.profile.units, strict=True):
        ordered, flat_segments = in_flat_order(unit, updates)
        segments, dtype = tuple(s.numel for s in flat_segments), dtype_name(ordered[0][1].dtype)
        if (unit.name, segments, unit.trainable) != (planned.name, planned.segments, planned.trainable):
            raise ValueError(
                f"unit {unit.name} has {segments} elements{'' if unit.trainable else ', frozen'}; the plan was made "
                f"for {planned.name} with {planned.segments}{'' if planned.trainable else ', frozen'}: {_ANEW}"
            )
        if dtype != planned.dtype:
            raise ValueError(f"unit {unit.name} is {dtype}; the plan is for {planned.dtype}: {_ANEW}")
        part = updates.part_of[flat_segments[0].group] if unit.trainable else 0
        if part != planned.optimizer:
            raise ValueError(
                f"unit {unit.name}: another optimizer has its parameters than when the plan was made: "
                f"{_another('each parameter to the same optimizer')}"
            )
        matched.append(replace(unit, parameters=tuple(ordered)))
    return matched


def agree_on_validation(
    result: ValidationResult, model: nn.Module, plan: Plan, place: ErrorContext, groups: ProcessGroups
) -> None:
    """Raise this rank's problem, or name ranks with a problem, another plan, model or optimizer state. Collective."""
    here, named = f"rank {place.rank}, before step 1:", [*model.named_parameters(), *model.named_buffers()]
    text = None if result.problem is None else str(result.problem) or type(result.problem).__name__
    answers = groups.all_gather_object((plan.hash, text, layout(named), result.state))
    if result.problem is not None:
        raise result.problem
    for r, (_, theirs, *_) in enumerate(answers):
        if theirs is not None:
            raise PlanError(f"{here} rank {r} cannot run: {theirs}")
    hashes = [h for h, *_ in answers]
    common, count = Counter(hashes).most_common(1)[0]
    common = common if count > 1 else hashes[0]
    if other := [r for r, h in enumerate(hashes) if h != common]:
        raise PlanError(
            f"{here} {ranks_in_words(other)} ha{'ve' if len(other) > 1 else 's'} another plan "
            f"({', '.join(str(hashes[r]) for r in other)}) than the others ({common}): give every rank the same plan"
        )
    for r, (_, _, theirs, state) in enumerate(answers):
        if theirs != answers[0][2]:
            raise UnsupportedModel(
                f"{here} parameters or buffers of rank {r} are not rank 0's in name, shape, strides or type: build the "
                "same model on every rank"
            )
        if state != answers[0][3]:
            raise PlanError(f"{here} rank {r}'s optimizer has other state than rank 0's: load it on all")
