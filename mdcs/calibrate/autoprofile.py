"""Measure all that planning reads, on all ranks at once: the one way to a profile, of the library and of its programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.calibrate.agreement import agree, doing, meet, together
from mdcs.calibrate.interference import measure_interference
from mdcs.calibrate.link_timing import MeasuredLink, measure_link
from mdcs.calibrate.rehearsal import rehearse
from mdcs.calibrate.room import measuring_bytes, require_floor, require_room, warn_of_measuring
from mdcs.calibrate.slots import measure_profile, refuse_meta
from mdcs.model.units import ModelUnit
from mdcs.profile.contents import Profile
from mdcs.runtime.emulation import Emulation


def autoprofile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: list[ModelUnit],
    step: Callable[[], Tensor],
    *,
    link: MeasuredLink | None = None,
    depth: int | None = 2,
    collectives: Mapping[str, str] | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    iterations: int = 3,
    about: dict[str, str] | None = None,
    emulate: Emulation | None = None,
    computes: bool = True,
    budget: int | None = None,
) -> Profile:
    """The profile of this job, the same on all ranks; collective: call it on every rank.

    Model and optimizer are not changed. First the link is measured, with ``depth`` messages in flight (None: as many as are
    best; on NCCL one) and ``collectives``, algorithms by operation that are named rather than measured; ``link`` is one that is
    known. Then slots and updates, in ``iterations`` steps, what computing and communicating cost each other, and a few plans in
    rehearsal, which tell how good predictions are (:attr:`mdcs.Profile.rehearsed`). ``step`` runs one forward pass on a typical
    batch and returns the loss. ``master_dtype``, ``grad_dtype`` and ``about`` are those of :func:`mdcs.measure_profile`,
    ``emulate`` that of :func:`mdcs.parallelize`. ``computes`` is False where computing only waits, so that messages take none of
    its time.

    With a ``budget`` (bytes per rank) the plans in rehearsal keep it, and one that no plan can keep is refused as soon as that is
    known. The model itself is measured whole: a warning says how much that holds, if it is more than the budget.

    What one rank raises alone the others hear of at once: they raise RunError with its words, or with the rank that was killed.
    Raises ValueError for an algorithm that the backend does not have, and what :func:`mdcs.measure_profile` and
    :func:`mdcs.parallelize` raise: an optimizer that has state already is refused here. Raises InfeasibleBudget, see above.
    """
    refuse_meta(model)  # before the link, whose backend has no such device
    processes = dist.get_world_size() if dist.is_initialized() else 1
    world, is_first = emulate.world if emulate else processes, not dist.is_initialized() or dist.get_rank() == 0
    with together():
        if budget is not None:
            require_room(units, optimizer, budget, world, master_dtype)
            known = measuring_bytes(units)
            if is_first:
                warn_of_measuring(known, budget)
        doing("measuring the link")
        link = link or measure_link(units[0].parameters[0][1].device, depth=depth, wanted=collectives)
        if processes > 1:
            meet()  # so that all compute side by side, as in training
        doing("measuring the model")
        profile = measure_profile(
            model, units, step, optimizer, world=world, link=link.link,
            collectives=link.collectives, iterations=iterations, about=about, master_dtype=master_dtype, grad_dtype=grad_dtype,
        )  # fmt: skip
        profile = agree(dataclasses.replace(profile, spread=profile.spread | link.spread))
        if budget is not None:
            require_floor(profile, budget)
            if is_first and known <= budget:
                warn_of_measuring(measuring_bytes(units, profile), budget)
        doing("measuring computing beside messages")
        profile = measure_interference(profile, model, step, optimizer, emulate=emulate)
        profile = profile if computes else _undisturbed(profile)
        doing("rehearsing plans")
        return rehearse(profile, model, units, step, optimizer, emulate=emulate, budget=budget)


def _undisturbed(profile: Profile) -> Profile:
    free = dataclasses.replace(profile.contention, compute_per_message=0.0, compute_per_byte=0.0, compute_per_work=0.0)
    return dataclasses.replace(profile, contention=free)
