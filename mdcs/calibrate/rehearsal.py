"""Rehearse a few plans with the real model, and fit to them what a CPU loses to waiting and to messages.

On a CPU a message that has ended wakes threads on every rank, a core that has slept computes more slowly for a while,
and messages take caches and memory bandwidth beside processor time. All of it depends on how many ranks share the
cores, so it is seen only with all of them, in the real runtime.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.calibrate.agreement import advance, gathered
from mdcs.calibrate.regression import factor, line
from mdcs.calibrate.slots import slot_seconds
from mdcs.calibrate.trials import cost_s, periods
from mdcs.model.units import ModelUnit
from mdcs.plan.messages import Plan
from mdcs.plan.times import StepTimes
from mdcs.planner.judge import InfeasibleBudget
from mdcs.planner.make import make_plan
from mdcs.planner.named import Scheduler
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind
from mdcs.runtime.emulation import Emulation
from mdcs.simulator.simulate import replay

_ROUNDS, _PERIODS = 3, 3
_MOST_SECONDS = 100.0  # for all rounds; there is one in any case

_NOISE = 0.05  # of computing: by how much its time differs from minute to minute on a shared machine
_SMALL = 1e-5  # seconds, to see what depends on the number of waits
_SLOWEST = 3.0  # times as slow as a probe's messages
_WELL = 0.1  # predicted: steps are off by so much on average, and nothing better is looked for
_PARTS = (1.0, 0.5, 0.25, 0.125, 0.0)
# The first overlaps nothing; of the next two one has few large messages, the other many. The last has all-reduces.
_REHEARSED: tuple[tuple[str, Scheduler], ...] = (
    ("zero2", Sequential()),
    ("zero2", Dear()),
    ("fsdp", Wfbp()),
    ("dp", Wfbp()),
)
_NAMES = tuple(f"{strategy} {scheduler.name}" for strategy, scheduler in _REHEARSED)


class Seen(NamedTuple):
    """Seconds of an iteration in which compute runs, in which it waits, and in which a message is in flight."""

    computing: float
    waiting: float
    communicating: float

    @property
    def step(self) -> float:
        """Seconds of the iteration."""
        return self.computing + self.waiting

    @classmethod
    def of(cls, times: StepTimes) -> Seen:
        """Return the same seconds from the times of a step."""
        assert times.compute_s is not None and times.stalled_s is not None and times.communication_s is not None
        return cls(times.compute_s, times.stalled_s, times.communication_s)


def rehearse(
    profile: Profile,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    emulate: Emulation | None = None,
    budget: int | None = None,
) -> Profile:
    """The profile with its contention fitted to plans that ran for a few periods each, on a CPU.

    All zero2, ``sequential``, and three plans that overlap. They take turns with computing alone, to which the slots are
    scaled, and compute counts relative to that: a shared machine is faster in one minute than in the next. What compute
    takes longer than in the profile is put down to the time it waited, where nothing overlaps, and then to messages beside
    it, those that all-reduce on their own; what messages take longer, to computing beside them; what compute waits longer
    than in the replay, to the number of waits and to the training loop between backward and forward. Rank 0 warns of
    predictions that are more than half off all the same. The model is not changed. Collective: call it on every rank, with
    the same profile, whose ``step`` and ``optimizer`` are those of :func:`mdcs.calibrate.slots.measure_profile`; ``emulate`` is
    that of :func:`mdcs.parallelize`. Plans keep within ``budget`` bytes per rank, if there is one: a strategy that does not fit
    is replaced by a mix that does. Raises InfeasibleBudget where none does.
    """
    device = units[0].parameters[0][1].device
    if profile.world == 1 or device.type != "cpu":
        return profile
    profile = _with(profile, dispatch_seconds=0.0, compute_per_wait=0.0, turn_seconds=0.0)
    plans = [_rehearsed(profile, strategy, scheduler, budget) for strategy, scheduler in _REHEARSED]
    alone: list[float] = []
    rounds: list[list[Seen]] = []
    many = _rounds(plans)
    for i in range(many):
        alone += _mean_of_ranks(slot_seconds(model, units, step))
        rounds.append([])
        for k, plan in enumerate(plans):
            advance((i + k / len(plans)) / many)
            rounds[-1].append(_run(plan, model, units, step, optimizer, emulate))
    profile = _computing(profile, statistics.median(alone))
    profile = fitted(profile, plans, [_typical(runs, alone) for runs in zip(*rounds, strict=True)])
    if profile.doubted and dist.get_rank() == 0:
        warnings.warn(f"{profile.doubt}: is the machine busy? measure again", stacklevel=3)
    return profile


def _rehearsed(profile: Profile, strategy: str, scheduler: Scheduler, budget: int | None) -> Plan:
    try:
        return make_plan(profile, Uniform(strategy), scheduler, budget=budget)
    except InfeasibleBudget:
        return make_plan(profile, Greedy(), scheduler, budget=budget)


def fitted(profile: Profile, plans: Sequence[Plan], seen: Sequence[Seen]) -> Profile:
    """The profile with its contention fitted to what was seen of the rehearsed ``plans``, and how well it predicts them."""
    sequential, dear, wfbp, all_reduces = zip(plans, seen, strict=True)
    overlapping = [dear, wfbp, all_reduces]

    slots = sum(slot.seconds for slot in profile.slots)
    lost = max(0.0, sequential[1].computing - slots)
    # Of a wait shorter than the noise of computing no rate can be told.
    profile = _with(profile, compute_per_wait=lost / max(sequential[1].waiting, _NOISE * slots) if slots else 0.0)
    profile = _scaled(profile, factor([_losses(profile, *each) for each in (dear, wfbp)], _NOISE * slots))
    if any(m.kind is Kind.AR for m in all_reduces[0].messages):  # else nothing of it fitted a budget
        profile = _with(profile, all_reduce=factor([_losses(profile, *all_reduces)], _NOISE * slots))
    profile = _slower(profile, _factor_of_messages(profile, overlapping))
    profile = _waited(profile, plans, seen)
    names = (f"greedy for {name}" if plan.strategy == Greedy.name else name for name, plan in zip(_NAMES, plans, strict=True))
    steps = zip(names, (_replay(plan, profile).step for plan in plans), (times.step for times in seen), strict=True)
    return dataclasses.replace(profile, rehearsed={name: (predicted, measured) for name, predicted, measured in steps})


def _waited(profile: Profile, plans: Sequence[Plan], seen: Sequence[Seen]) -> Profile:
    """The profile with what compute waits longer than in the replay: at every wait, and once at the turn.

    A line over the number of waits, as a small delay shows it. That number changes with the delay, and waits that nearly all
    plans have alike tell nothing of one wait: where the line's own replays are far off, what predicts the steps best is taken
    of it, parts of its slope, and none.
    """
    waits = []
    for plan, times in zip(plans, seen, strict=True):
        waiting = _replay(plan, profile).waiting
        later = _replay(plan, _with(profile, dispatch_seconds=_SMALL)).waiting
        waits.append((round((later - waiting) / _SMALL, 3), times.waiting - waiting))  # a count, without rounding noise
    waited = line(waits)
    most = max((longer / count for count, longer in waits if count >= 1), default=0.0)  # if it took all that is unexplained
    found = _with(profile, dispatch_seconds=min(waited.slope, max(0.0, most)), turn_seconds=waited.intercept)
    if not found.contention.dispatch_seconds or _error(found, plans, seen) <= _WELL:
        return found
    others = []
    for part in _PARTS:
        other = _with(profile, dispatch_seconds=part * found.contention.dispatch_seconds, turn_seconds=0.0)
        longer = (times.step - _replay(plan, other).step for plan, times in zip(plans, seen, strict=True))
        others.append(_with(other, turn_seconds=max(0.0, statistics.mean(longer))))
    return min([found, *others], key=lambda each: _error(each, plans, seen))


def _error(profile: Profile, plans: Sequence[Plan], seen: Sequence[Seen]) -> float:
    """Return the root mean square error of the predicted steps, as a fraction of the measured ones."""
    off = (_replay(plan, profile).step / times.step - 1 for plan, times in zip(plans, seen, strict=True))
    return math.sqrt(statistics.mean(each**2 for each in off))


def _factor_of_messages(profile: Profile, rehearsed: Sequence[tuple[Plan, Seen]]) -> float:
    """How many times longer than a probe's the messages of these plans take beside computing, 1 to 3, by bisection."""
    seen = sum(times.communicating for _, times in rehearsed)

    def falls_short(factor: float) -> bool:
        return sum(_replay(plan, _slower(profile, factor)).communicating for plan, _ in rehearsed) < seen

    low, high = 1.0, _SLOWEST
    if not falls_short(low):
        return low
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if falls_short(middle) else (low, middle)
    return high


def _replay(plan: Plan, profile: Profile) -> Seen:
    return Seen.of(replay(dataclasses.replace(plan, job=dataclasses.replace(plan.job, profile=profile))).times)


def _losses(profile: Profile, plan: Plan, seen: Seen) -> tuple[float, float]:
    """Seconds that computing loses to messages, modelled and seen."""
    without, modelled = (_replay(plan, _scaled(profile, factor)).computing for factor in (0.0, 1.0))
    return modelled - without, seen.computing - without


def _run(
    plan: Plan,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    emulate: Emulation | None,
) -> Seen:
    """Medians over the periods, averaged over the ranks."""
    seen = [Seen.of(times) for times in periods(plan, model, units, step, optimizer, _PERIODS, emulate=emulate)]
    return Seen(*_mean_of_ranks(*(statistics.median(values) for values in zip(*seen, strict=True))))


def _typical(rounds: Sequence[Seen], alone: Sequence[float]) -> Seen:
    """Medians over the rounds, of computing relative to what it took ``alone`` in the same one."""
    typical = Seen(*(statistics.median(values) for values in zip(*rounds, strict=True)))
    relative = (seen.computing / seconds for seen, seconds in zip(rounds, alone, strict=True))
    return typical._replace(computing=statistics.median(alone) * statistics.median(relative))


def _computing(profile: Profile, seconds: float) -> Profile:
    """The profile with slots of so many seconds in all."""
    slots = sum(slot.seconds for slot in profile.slots)
    scaled = (dataclasses.replace(slot, seconds=slot.seconds * seconds / slots) for slot in profile.slots)
    return dataclasses.replace(profile, slots=tuple(scaled))


def _rounds(plans: Sequence[Plan]) -> int:
    """As many as there is time for, the same on every rank."""
    seconds = cost_s(plans, 1, _PERIODS)
    return max(1, min(_ROUNDS, int(_MOST_SECONDS / seconds))) if seconds else _ROUNDS


def _mean_of_ranks(*own: float) -> list[float]:
    return [statistics.mean(values) for values in zip(*gathered(own), strict=True)]


def _with(profile: Profile, **contention: float) -> Profile:
    return dataclasses.replace(profile, contention=dataclasses.replace(profile.contention, **contention))


def _scaled(profile: Profile, factor: float) -> Profile:
    """Return the profile with the seconds that compute loses to messages multiplied by ``factor``."""
    lost = ("compute_per_message", "compute_per_byte", "compute_per_work")
    return _with(profile, **{name: factor * getattr(profile.contention, name) for name in lost})


def _slower(profile: Profile, factor: float) -> Profile:
    """Return the profile with the least seconds of messages during compute multiplied by ``factor``."""
    least = ("message_seconds", "seconds_per_byte")
    return _with(profile, **{name: factor * getattr(profile.contention, name) for name in least})
