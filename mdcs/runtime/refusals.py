"""Checks before step 1: of the plan against processes, job and model, and of the ranks against each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mdcs.model.guard import Closed
from mdcs.model.optimizers import in_flat_order, optimizer_bytes
from mdcs.model.units import ModelUnit, UnsupportedModel, refuse_shared_memory
from mdcs.plan.messages import Plan
from mdcs.plan.validity import PlanError
from mdcs.runtime.emulation import Emulation
from mdcs.runtime.scaling import LossScale
from mdcs.torch_compat import has_gradient_hooks, step_hooks


def fits_processes(plan: Plan, processes: int, backend: str, emulate: Emulation | None) -> None:
    """Raise PlanError unless there is a process of the plan's backend per rank, or one process for an emulated world.
    """
    if emulate is not None:
        if processes != 1:
            raise PlanError(f"an emulated world is one process, the process group has {processes}")
        if emulate.world != plan.world:
            raise PlanError(f"the plan is for {plan.world} ranks, the emulated world has {emulate.world}")
        if not plan.profile.link.emulated:
            raise PlanError("an emulated world sends nothing: plan with an emulated link")
        if within := next((k for k in plan.strategies if k.in_node), None):
            raise PlanError(f"an emulated world has no nodes, and {within} shards within one")
        return
    if processes != plan.world:
        raise PlanError(f"the plan is for {plan.world} ranks, the process group has {processes}")
    planned_backend = plan.profile.collectives.backend
    if processes > 1 and backend != planned_backend:
        raise PlanError(f"the plan is for collectives of {planned_backend}, the process group is of {backend}")


def fits_job(
    plan: Plan, clip_norm: float | None, loss_scale: LossScale | None, optimizer: torch.optim.Optimizer
) -> None:
    """Raise PlanError or ValueError if clipping, loss scale or optimizer are not those that the plan was made for."""
    for given, what in ((clip_norm, "clipping the global norm"), (loss_scale, "a dynamic loss scale")):
        if given is not None and plan.cross_iteration:
            raise PlanError(f"{what} needs all gradients first: plan with cross_iteration=False")
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm must be > 0, got {clip_norm}")
    state, fixed, _ = optimizer_bytes(optimizer)
    planned = plan.profile.optimizer
    if (state, fixed) != (planned.state_tensors, planned.state_fixed):
        raise ValueError(
            f"{type(optimizer).__name__} holds {state} state tensors per parameter; the plan was made for {planned.name} "
            f"with {planned.state_tensors}"
        )
    if any(step_hooks(optimizer)):
        raise ValueError(f"{type(optimizer).__name__} has hooks on step(), which is not called: call them after parallel.step()")


def covers(model: nn.Module, units: list[ModelUnit], optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedModel for a parameter that would not be trained, or not by this runtime alone."""
    names = {p: name for name, p in model.named_parameters()}
    held = {p for unit in units for _, p in unit.parameters}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(trained):
        if p.requires_grad and p not in held and p.numel():  # a parameter without elements needs no training
            name = names.get(p) or f"parameter {number} of the optimizer, of shape {tuple(p.shape)}"
            raise UnsupportedModel(
                f"{name}: is in the optimizer and in no unit, so it would never be trained: partition the model that holds it"
            )
    for name, p in model.named_parameters():
        if p not in held and not p.numel():
            continue
        if p not in held:
            raise UnsupportedModel(f"{name}: is in no unit: partition the model as it is now")
        if issubclass(type(p), Closed):
            raise UnsupportedModel(f"{name}: is parallelized already: close() that first")
        if has_gradient_hooks(p):
            raise UnsupportedModel(
                f"{name}: has a hook for its accumulated gradient, which the runtime takes: remove it, or parallelize() once"
            )
    refuse_shared_memory(model)  # again: the model may have changed since partition()


def keeps_order(model: nn.Module, backend: str) -> None:
    """Raise UnsupportedModel for a module whose forward has collectives that could mix with the plan's messages."""
    for name, module in model.named_modules():
        if backend == "nccl" and isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedModel(
                f"{name}: SyncBatchNorm's collectives would come between the messages, on each rank elsewhere: use BatchNorm"
            )


def same_plan(
    plan: Plan, problem: ValueError | None, layout: int, state: Any, rank: int, processes: int, control: dist.ProcessGroup | None
) -> None:
    """Raise this rank's problem, or an error that names ranks with a problem, another plan, model layout or optimizer
    state.

    ``layout``: checksum of parameters and buffers (:func:`mdcs.runtime.buffers.layout`). ``state``: the optimizer's,
    from :func:`mdcs.runtime.optimizer_state.together`. Collective.
    """
    if problem is not None and processes == 1:
        raise problem
    if processes == 1:
        return
    answers: list[Any] = [None] * processes
    dist.all_gather_object(answers, (plan.hash, None if problem is None else str(problem), layout, state), group=control)
    if problem is not None:
        raise problem
    for r, (_, theirs, *_) in enumerate(answers):
        if theirs is not None:
            raise PlanError(f"rank {rank}, before step 1: rank {r} cannot run: {theirs}")
    hashes = [h for h, *_ in answers]
    common = Counter(hashes).most_common(1)[0][0]
    other = [r for r, h in enumerate(hashes) if h != common]
    if len(set(hashes)) == len(hashes) > 1:
        common, other = hashes[0], [r for r in range(processes) if hashes[r] != hashes[0]]
    if other:
        raise PlanError(
            f"rank {rank}, before step 1: rank{'s' if len(other) > 1 else ''} {', '.join(map(str, other))} "
            f"ha{'ve' if len(other) > 1 else 's'} another plan ({', '.join(str(hashes[r]) for r in other)}) "
            f"than the others ({common})"
        )
    different = [r for r in range(processes) if answers[r][2] != answers[0][2]]
    if different:
        raise UnsupportedModel(
            f"rank {rank}, before step 1: parameters or buffers of rank {different[0]} are not rank 0's in name, shape or type"
        )
    for r, (*_, theirs) in enumerate(answers):
        if theirs != answers[0][3]:
            raise PlanError(f"rank {rank}, before step 1: rank {r}'s optimizer has other state than rank 0's: load it on all")


def match(
    plan: Plan, units: list[ModelUnit], groups: dict[nn.Parameter, int]
) -> tuple[list[list[tuple[str, nn.Parameter]]], list[list[int]]]:
    """Return, for every unit, its (name, parameter) pairs in flat order, and the optimizer's group of each segment.

    Raises ValueError where plan and model differ.
    """
    if len(units) != len(plan.profile.units):
        raise ValueError(f"the plan has {len(plan.profile.units)} units, the model {len(units)}")
    parameters, group_of = [], []
    for unit, planned, layout in zip(units, plan.profile.units, plan.profile.layouts, strict=True):
        ordered, found = in_flat_order(unit, groups)
        segments = tuple(s.numel for s in found)
        if (unit.name, segments, unit.trainable) != (planned.name, planned.segments, planned.trainable):
            raise ValueError(
                f"unit {unit.name} has {segments} elements{'' if unit.trainable else ', frozen'}; the plan was made "
                f"for {planned.name} with {planned.segments}{'' if planned.trainable else ', frozen'}"
            )
        types: dict[torch.dtype, int] = {}
        for s in found:
            types[s.dtype] = types.get(s.dtype, 0) + s.numel
        wanted = [(s.numel, s.param_bytes) for s in layout.sections]
        if [(n, dtype.itemsize) for dtype, n in types.items()] != wanted:
            raise ValueError(
                f"unit {unit.name} has {', '.join(f'{n} {dtype}' for dtype, n in types.items())}; the plan is for "
                f"{', '.join(f'{n} of {width} bytes' for n, width in wanted)}"
            )
        parameters.append(ordered)
        group_of.append([s.group for s in found])
    return parameters, group_of
