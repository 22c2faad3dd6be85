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
from mdcs.measure.profiler import slot_seconds, untouched
from mdcs.measure.timeline import StepTimes
from mdcs.plan import Plan
from mdcs.planner import make_plan
from mdcs.profile import Profile
from mdcs.runtime.api import parallelize
from mdcs.runtime.emulation import Emulation
from mdcs.schedulers import Dear, Scheduler, Sequential, Wfbp
from mdcs.simulator import replay
from mdcs.strategies import Uniform
from mdcs.units import ModelUnit

_ROUNDS, _PERIODS = 3, 3
_WARMUP = 1
_MOST_SECONDS = 15.0  # for each plan

_NOISE = 0.05  # of computing: by how much its time differs from minute to minute on a shared machine
_SMALL = 1e-5  # seconds, to see what depends on the number of waits
# The first overlaps nothing; of the others one has few large messages, the other many.
_REHEARSED: tuple[tuple[str, Scheduler], ...] = (("fsdp", Sequential()), ("zero1", Dear()), ("fsdp", Wfbp()))


def rehearse(
    profile: Profile,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    emulate: Emulation | None = None,
) -> Profile:
    """The profile with its contention fitted to plans that ran for a few periods each, on a CPU.

    All fsdp, ``sequential``, and two plans that overlap. They take turns with computing alone, and compute counts relative
    to that: a shared machine is faster in one minute than in the next. What compute takes longer than in the profile is put
    down to the time it waited, where nothing overlaps, and then to messages beside it; what it waits longer than in the
    replay, to the number of waits and to the training loop between backward and forward. The model is not changed.
    Collective: call it on every rank, with the same profile, whose ``step`` and ``optimizer`` are those of
    :func:`mdcs.measure.profiler.measure_profile`; ``emulate`` is that of :func:`mdcs.parallelize`.
    """
    device = units[0].parameters[0][1].device
    if profile.world == 1 or device.type != "cpu":
        return profile
    profile = _with(profile, dispatch_seconds=0.0, compute_per_wait=0.0, turn_seconds=0.0)
    plans = [make_plan(profile, Uniform(kind), scheduler) for kind, scheduler in _REHEARSED]
    slots = sum(slot.seconds for slot in profile.slots)
    rounds: list[list[tuple[float, float]]] = []
    for _ in range(_rounds(plans)):
        alone = _mean_of_ranks(slot_seconds(model, units, step))[0]
        runs = [_run(plan, model, units, step, optimizer, emulate) for plan in plans]
        rounds.append([(computing * slots / alone if alone else computing, waiting) for computing, waiting in runs])
    seen = [
        (statistics.median(c for c, _ in runs), statistics.median(w for _, w in runs)) for runs in zip(*rounds, strict=True)
    ]
    computing, waiting = seen[0]
    profile = _with(profile, compute_per_wait=max(0.0, computing - slots) / waiting)
    losses = []
    for plan, (computing, _) in zip(plans[1:], seen[1:], strict=True):
        without, modelled = (_replay(plan, _scaled(profile, f)).compute_s for f in (0.0, 1.0))
        losses.append((modelled - without, computing - without))
    profile = _scaled(profile, factor(losses, _NOISE * slots))
    waits = []
    for plan, (_, waiting) in zip(plans, seen, strict=True):
        exposed = _replay(plan, profile).exposed_s
        later = _replay(plan, _with(profile, dispatch_seconds=_SMALL)).exposed_s
        waits.append(((later - exposed) / _SMALL, waiting - exposed))
    dispatch, turn = waiting_line(waits)
    return _with(profile, dispatch_seconds=dispatch, turn_seconds=turn)


def factor(losses: Sequence[tuple[float, float]], noise: float) -> float:
    """What turns modelled into seen losses (seconds): their least squares, drawn to 1 by as much as they are ``noise``."""
    square = noise**2
    scaled = sum(modelled * seen for modelled, seen in losses) + square
    return max(0.0, scaled / (sum(modelled**2 for modelled, _ in losses) + square)) if square else 1.0


def waiting_line(waits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds per wait, seconds besides) from the waits and the seconds of several plans: least squares, neither negative."""
    count, seconds = (statistics.mean(values) for values in zip(*waits, strict=True))
    square = sum((n - count) ** 2 for n, _ in waits)
    slope = sum((n - count) * (s - seconds) for n, s in waits) / square if square else 0.0
    if slope >= 0 and seconds >= slope * count:
        return slope, seconds - slope * count
    through_origin = sum(n * s for n, s in waits) / sum(n * n for n, _ in waits) if count else 0.0
    return (max(0.0, through_origin), 0.0) if slope > 0 else (0.0, max(0.0, seconds))


def _replay(plan: Plan, profile: Profile) -> StepTimes:
    return replay(dataclasses.replace(plan, profile=profile)).times


def _run(
    plan: Plan,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    emulate: Emulation | None,
) -> tuple[float, float]:
    """Seconds of an iteration in which compute runs and in which it does not: medians, averaged over the ranks."""
    weights = {p: p.data for p in model.parameters()}
    records = []
    with untouched(model, current_meter(units[0].parameters[0][1].device)):
        parallel = parallelize(model, optimizer, plan, list(units), emulate=emulate)
        try:
            for _ in range(_WARMUP + _PERIODS + 1):  # the last is cut short
                step().backward()
                parallel.step()
                records += parallel.records()
            parallel.drain()
            times = [r.times for r in records[_WARMUP:]]
        finally:
            parallel.undo(weights)
    computing, waiting = _mean_of_ranks(
        statistics.median(t.compute_s for t in times), statistics.median(t.exposed_s for t in times)
    )
    return computing, waiting


def _rounds(plans: Sequence[Plan]) -> int:
    slowest = max(replay(plan).period_s for plan in plans) * (_WARMUP + _PERIODS + 1)
    return max(1, min(_ROUNDS, int(_MOST_SECONDS / slowest))) if slowest else _ROUNDS


def _mean_of_ranks(*own: float) -> list[float]:
    seen: list[tuple[float, ...]] = [own] * dist.get_world_size()
    dist.all_gather_object(seen, own)
    return [statistics.mean(values) for values in zip(*seen, strict=True)]


def _with(profile: Profile, **contention: float) -> Profile:
    return dataclasses.replace(profile, contention=dataclasses.replace(profile.contention, **contention))


def _scaled(profile: Profile, factor: float) -> Profile:
    """What compute loses to messages, times ``factor``."""
    lost = ("compute_per_message", "compute_per_byte", "compute_per_work")
    return _with(profile, **{name: factor * getattr(profile.contention, name) for name in lost})
