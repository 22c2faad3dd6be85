"""Rehearse a few plans with the real model, and fit to them what a CPU loses to waiting and to messages.

On a CPU a message that has ended wakes threads on every rank, a core that has slept computes more slowly for a while,
and messages take caches and memory bandwidth beside processor time. All of it depends on how many ranks share the
cores, so it is seen only with all of them, in the real runtime.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.measure.memory import current_meter
from mdcs.measure.profiler import untouched
from mdcs.plan import Plan
from mdcs.planner import make_plan
from mdcs.profile import Profile
from mdcs.runtime.api import parallelize
from mdcs.schedulers import Dear, Scheduler, Sequential, Wfbp
from mdcs.simulator import replay
from mdcs.strategies import Uniform
from mdcs.units import ModelUnit

_WARMUP = 2
_MOST_PERIODS, _MOST_SECONDS = 8, 15.0

_NOISE = 0.05  # of computing: by how much its time differs from minute to minute on a shared machine
_OVERLAPPED: tuple[tuple[str, Scheduler], ...] = (("zero1", Dear()), ("fsdp", Wfbp()))  # few large messages, and many


def rehearse(
    profile: Profile,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
) -> Profile:
    """The profile with its contention fitted to plans that ran for a few periods each, on a CPU.

    All fsdp, ``sequential``: what compute takes longer than in the profile is put down to the time it waited, what it
    waits longer than in the replay to the number of messages. Then two plans that overlap: what compute still takes
    longer scales what it loses to messages. The model is not changed. Collective: call it on every rank, with the same
    profile, whose ``step`` and ``optimizer`` are those of :func:`mdcs.measure.profiler.measure_profile`.
    """
    device = units[0].parameters[0][1].device
    if profile.world == 1 or device.type != "cpu":
        return profile

    def seen(plan: Plan) -> tuple[float, float]:
        return _run(plan, model, units, step, optimizer)

    profile = _with(profile, dispatch_seconds=0.0, compute_per_wait=0.0)
    plan = _plan(profile, "fsdp", Sequential())
    computing, waiting = seen(plan)
    profile = _with(
        profile,
        dispatch_seconds=max(0.0, waiting - replay(plan).times.exposed_s) / len(plan.messages),
        compute_per_wait=max(0.0, computing - sum(slot.seconds for slot in profile.slots)) / waiting,
    )
    losses = []
    for kind, scheduler in _OVERLAPPED:
        plan = _plan(profile, kind, scheduler)
        without = replay(dataclasses.replace(plan, profile=_scaled(profile, 0.0))).times.compute_s
        losses.append((replay(plan).times.compute_s - without, seen(plan)[0] - without))
    return _scaled(profile, factor(losses, _NOISE * computing))


def factor(losses: Sequence[tuple[float, float]], noise: float) -> float:
    """What turns modelled into seen losses (seconds): their least squares, drawn to 1 by as much as they are ``noise``."""
    square = noise**2
    scaled = sum(modelled * seen for modelled, seen in losses) + square
    return max(0.0, scaled / (sum(modelled**2 for modelled, _ in losses) + square)) if square else 1.0


def _plan(profile: Profile, kind: str, scheduler: Scheduler) -> Plan:
    return make_plan(profile, Uniform(kind), scheduler)


def _run(
    plan: Plan, model: nn.Module, units: Sequence[ModelUnit], step: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """Seconds of an iteration in which compute runs and in which it does not: medians, averaged over the ranks."""
    expected = replay(plan).period_s
    periods = max(2, min(_MOST_PERIODS, int(_MOST_SECONDS / expected))) if expected else _MOST_PERIODS
    weights = {p: p.data for p in model.parameters()}
    with untouched(model, current_meter(units[0].parameters[0][1].device)):
        parallel = parallelize(model, optimizer, plan, list(units))
        try:
            for _ in range(_WARMUP + periods + 1):  # the last is cut short by drain()
                step().backward()
                parallel.step()
            parallel.drain()
            times = [r.times for r in parallel.records(flush=True)[_WARMUP:-1]]
        finally:
            parallel.undo(weights)
    own = statistics.median(t.compute_s for t in times), statistics.median(t.exposed_s for t in times)
    seen: list[tuple[float, float]] = [own] * plan.world
    dist.all_gather_object(seen, own)
    computing, waiting = (statistics.mean(values) for values in zip(*seen, strict=True))
    return computing, waiting


def _with(profile: Profile, **contention: float) -> Profile:
    return dataclasses.replace(profile, contention=dataclasses.replace(profile.contention, **contention))


def _scaled(profile: Profile, factor: float) -> Profile:
    """What compute loses to messages, times ``factor``."""
    lost = ("compute_per_message", "compute_per_byte", "compute_per_work")
    return _with(profile, **{name: factor * getattr(profile.contention, name) for name in lost})
