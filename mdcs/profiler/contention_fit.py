"""Fit the contention model of a CPU: what compute, messages and the training loop cost each other on shared cores.

A few plans run with the real model in the real runtime, in turns with compute alone. On a CPU a message that ends wakes
threads on every rank, and takes processor time, caches and memory bandwidth from compute. All of it depends on how many
ranks share the cores, so it is seen only with all of them.

:func:`fit_contention` is the one place where :class:`mdcs.profile.contention.Contention` is fitted.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.emulation import Emulation
from mdcs.model.optimizers import GivenOptimizers
from mdcs.model.units import ModelUnit
from mdcs.plan.plan import Plan
from mdcs.plan.times import StepTimes
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import make_plan
from mdcs.planner.registry import Scheduler
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.contention import Contention
from mdcs.profile.schema import Profile, is_far_off
from mdcs.profiler.autotune import run_periods
from mdcs.profiler.consensus import all_gather_object
from mdcs.profiler.model_profile import time_compute_alone
from mdcs.profiler.regression import nonneg_line_fit
from mdcs.profiler.timing import machine_id
from mdcs.simulator.simulate import replay

_PERIODS, _MOST_ROUNDS = 2, 3
_STABLE = 0.03  # relative change of the mean step from round to round below which no further round is run
_BUSY = 0.2  # fraction of compute's time without the processor above which other programs are a cause
_SWEEPS = 8
_TRUST = 0.05  # relative error of a step that weighs as much as one unit of distance from the first guess
# The first overlaps nothing; of the next two one has few large messages, the other many. The last has all-reduces.
CALIBRATION_PLANS: tuple[tuple[str, Scheduler], ...] = (
    ("zero2", Sequential()),
    ("zero2", Dear()),
    ("fsdp", Wfbp()),
    ("dp", Wfbp()),
)

STEPS = 3 + len(CALIBRATION_PLANS) * (2 + _PERIODS)
"""Steps of one round: compute alone, then each plan with a warm-up and a last period that is cut short."""


class StepBreakdown(NamedTuple):
    """Seconds per iteration: compute runs, compute waits, messages are in flight, and processor time of the process."""

    computing: float
    waiting: float
    communicating: float
    processor: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of the iteration."""
        return self.computing + self.waiting

    @classmethod
    def of(cls, times: StepTimes, processor: float = 0.0) -> StepBreakdown:
        """Return the same seconds from the times of a step."""
        assert times.compute_s is not None and times.stalled_s is not None and times.communication_s is not None
        return cls(times.compute_s, times.stalled_s, times.communication_s, processor)


def measure_contention(
    profile: Profile,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
    *,
    seconds: float = 12.0,
    shares_cores: bool = True,
    emulate: Emulation | None = None,
    budget: int | None = None,
) -> Profile:
    """Return the profile with slots and contention fitted to a few plans, on a CPU. Collective, with equal profiles.

    Plans and compute alone take turns: a shared machine is faster in one minute than in the next. Rounds end when the
    steps are stable or ``seconds`` are over; one round runs in any case. The model is not changed.

    - ``step``, ``optimizer``: those of :func:`mdcs.profiler.model_profile.measure_profile`.
    - ``shares_cores``: False where compute only waits, so that messages take nothing from it.
    - ``emulate``: that of :func:`mdcs.parallelize`.
    - ``budget``: bytes per rank that the plans keep. A strategy that does not fit is replaced by a mix that does.

    Rank 0 warns of predictions that are more than half off all the same, in every round, with the cause. Raises
    InfeasibleBudget where no plan fits.
    """
    if profile.world == 1 or units[0].parameters[0][1].device.type != "cpu":
        return profile
    until = time.monotonic() + seconds
    plans = [_calibration_plan(profile, strategy, scheduler, budget) for strategy, scheduler in CALIBRATION_PLANS]
    alone: list[StepBreakdown] = []
    rounds: list[list[StepBreakdown]] = []
    while len(rounds) < _MOST_ROUNDS and not _is_enough(rounds, until):
        on_ranks = all_gather_object(time_compute_alone(model, units, step))
        alone.append(_mean([StepBreakdown(computing, 0.0, 0.0, processor) for computing, processor in on_ranks]))
        rounds.append([_run(plan, model, units, step, optimizer, emulate) for plan in plans])
    lost = _busy_cores() if shares_cores else 0.0
    found = fit_contention(
        profile, plans, [_typical(runs, alone) for runs in zip(*rounds, strict=True)], _median(alone), lost
    )
    if (said := _off_in_every_round(found, rounds, alone, shares_cores)) and (
        not dist.is_initialized() or dist.get_rank() == 0
    ):
        warnings.warn(said, stacklevel=3)
    return found


def _off_in_every_round(
    profile: Profile, rounds: Sequence[Sequence[StepBreakdown]], alone: Sequence[StepBreakdown], shares_cores: bool
) -> str:
    """Return which plans took in no round about what is predicted, and why; "" if there are none.

    A plan that was as predicted in one round tells how much the rounds differ, not that it is predicted wrongly.
    """
    seen = dict(zip(profile.calibration_runs, zip(*rounds, strict=True), strict=True))
    off = {
        name: seconds
        for name, seconds in profile.unreliable_runs.items()
        if all(is_far_off(seconds[0], run.step) for run in seen[name])
    }
    if not off:
        return ""
    without = 1 - sum(each.processor for each in alone) / sum(each.computing for each in alone)
    why = "the model of costs does not describe these plans"
    if shares_cores and without > _BUSY:
        why = f"other programs had the processor for {without:.0%} of the time; measure again without them"
    elif len(rounds) == 1:
        why = "there was time for one round; more seconds measure several"
    return f"{dataclasses.replace(profile, calibration_runs=off).reliability_warning} in every round: {why}"


def fit_contention(
    profile: Profile, plans: Sequence[Plan], measured: Sequence[StepBreakdown], alone: StepBreakdown, lost: float = 1.0
) -> Profile:
    """Return the profile with the contention whose replays of ``plans`` come nearest to the ``measured`` steps.

    1. In the first plan nothing overlaps. Its compute gives the seconds of the slots. Its messages find the link idle:
       what they take beyond α + β·bytes is the skew.
    2. Two lines over the bytes of a message are fitted: its processor time, over all plans, and its time on the link
       without skew, over the plans that overlap.
    3. Four values are varied until the replayed steps fit: the fraction of the processor time that compute loses, a
       factor of the time on the link, the delay after a wait, and the time between backward and forward. A value far
       from its first guess needs clear evidence (ridge regression).

    - ``measured``: one per plan. ``alone``: compute without messages.
    - ``lost``: first guess of the fraction that compute loses (0 to 1). With 0 it stays 0.

    ``calibration_runs`` of the result says how well the profile predicts the plans.
    """
    first = measured[0]
    profile = _with_compute_seconds(profile, first.computing)
    counts = [max(1, len(plan.messages)) for plan in plans]
    sizes = [sum(map(plan.wire, plan.messages)) / n for plan, n in zip(plans, counts, strict=True)]

    processor = [
        max(0.0, run.processor - alone.processor - _work(plan)) / n
        for plan, run, n in zip(plans, measured, counts, strict=True)
    ]
    processor_s, processor_s_per_byte = nonneg_line_fit([*zip(sizes, processor, strict=True)], relative=True)

    without = [_replay(plan, profile, Contention()) for plan in plans]
    skew = Contention(skew_seconds=max(0.0, first.communicating - without[0].communicating) / counts[0])
    skewed = [_replay(plan, profile, skew) for plan in plans]
    on_link = [
        max(0.0, run.communicating - (late.communicating - prompt.communicating)) / n
        for run, late, prompt, n in zip(measured, skewed, without, counts, strict=True)
    ]
    link_s, link_s_per_byte = nonneg_line_fit([*zip(sizes, on_link, strict=True)][1:], relative=True)

    def contention(values: Sequence[float]) -> Contention:
        share, stretch, dispatch_s, turn_s = values
        return dataclasses.replace(
            skew, compute_per_message=share * processor_s, compute_per_byte=share * processor_s_per_byte,
            compute_per_work=share, message_seconds=stretch * link_s, seconds_per_byte=stretch * link_s_per_byte,
            dispatch_seconds=dispatch_s, turn_seconds=turn_s,
        )  # fmt: skip

    turn = max(0.0, first.waiting - skewed[0].waiting)
    guess = [lost, 1.0, 0.0, turn / 2]
    scales = [0.5 * lost, 0.5, 1e-3, max(turn / 2, 1e-3)]
    values = _nearest(guess, scales, lambda v: _error(profile, plans, measured, contention(v)))
    profile = dataclasses.replace(profile, contention=contention(values))
    steps = (
        (_replay(plan, profile, profile.contention).step, run.step) for plan, run in zip(plans, measured, strict=True)
    )
    return dataclasses.replace(
        profile, calibration_runs=dict(zip(map(_name, plans, CALIBRATION_PLANS), steps, strict=True))
    )


def _with_compute_seconds(profile: Profile, seconds: float) -> Profile:
    """Return the profile with its slots scaled to ``seconds`` in all."""
    before = sum(slot.seconds for slot in profile.slots)
    scale = seconds / before if before else 1.0
    slots = tuple(dataclasses.replace(slot, seconds=slot.seconds * scale) for slot in profile.slots)
    return dataclasses.replace(profile, slots=slots)


def _nearest(guess: Sequence[float], scales: Sequence[float], error: Callable[[Sequence[float]], float]) -> list[float]:
    """Return values >= 0 near ``guess`` with the least error, by coordinate search with shrinking steps.

    A value's distance from its guess adds to the error: its square in units of its scale, times ``_TRUST`` squared.
    """

    def total(values: Sequence[float]) -> float:
        off = (((v - g) / s) ** 2 for v, g, s in zip(values, guess, scales, strict=True) if s)
        return error(values) + _TRUST**2 * sum(off)

    values, steps = list(guess), [s / 2 for s in scales]
    best = total(values)
    for _ in range(_SWEEPS):
        for i, step in enumerate(steps):
            tried = [[*values[:i], max(0.0, values[i] + sign * step), *values[i + 1 :]] for sign in (1, -1)]
            found, nearer = min((total(each), each) for each in tried)
            if found < best:
                best, values = found, nearer
            else:
                steps[i] /= 2
    return values


def _error(profile: Profile, plans: Sequence[Plan], measured: Sequence[StepBreakdown], contention: Contention) -> float:
    """Return the sum over the plans of squared errors relative to the step: of the step, and with less weight of its
    parts."""
    total = 0.0
    for plan, run in zip(plans, measured, strict=True):
        predicted = _replay(plan, profile, contention)
        step, computing, communicating = (
            (getattr(predicted, part) - getattr(run, part)) / run.step
            for part in ("step", "computing", "communicating")
        )
        total += step**2 + (0.5 * computing) ** 2 + (0.3 * communicating) ** 2
    return total


def _replay(plan: Plan, profile: Profile, contention: Contention) -> StepBreakdown:
    profile = dataclasses.replace(profile, contention=contention)
    return StepBreakdown.of(replay(dataclasses.replace(plan, job=dataclasses.replace(plan.job, profile=profile))).times)


def _work(plan: Plan) -> float:
    """Return the seconds of copies, sums and updates of an iteration."""
    return sum(map(operator.add, plan.seconds.copy, plan.seconds.update))


def _calibration_plan(profile: Profile, strategy: str, scheduler: Scheduler, budget: int | None) -> Plan:
    try:
        return make_plan(profile, Uniform(strategy), scheduler, budget=budget)
    except InfeasibleBudget:
        return make_plan(profile, Greedy(), scheduler, budget=budget)


def _name(plan: Plan, wanted: tuple[str, Scheduler]) -> str:
    name = f"{wanted[0]} {wanted[1].name}"
    return f"greedy for {name}" if plan.strategy == Greedy.name else name


def _run(
    plan: Plan,
    model: nn.Module,
    units: Sequence[ModelUnit],
    step: Callable[[], Tensor],
    optimizer: GivenOptimizers,
    emulate: Emulation | None,
) -> StepBreakdown:
    """Return medians over the periods, averaged over the ranks."""
    times, processor = run_periods(plan, model, units, step, optimizer, _PERIODS, emulate=emulate)
    return _mean(all_gather_object(_median([StepBreakdown.of(each, processor) for each in times])))


def _is_enough(rounds: Sequence[Sequence[StepBreakdown]], until: float) -> bool:
    """Whether the steps are stable or time is over, on any rank."""
    if not rounds:
        return False
    steps = [statistics.mean(seen.step for seen in of_round) for of_round in rounds]
    stable = len(steps) > 1 and abs(steps[-1] - steps[-2]) < _STABLE * steps[-2]
    return stable or any(all_gather_object(time.monotonic() > until))


def _typical(rounds: Sequence[StepBreakdown], alone: Sequence[StepBreakdown]) -> StepBreakdown:
    """Return medians over the rounds. Compute is relative to what it took ``alone`` in the same round."""
    relative = statistics.median(seen.computing / each.computing for seen, each in zip(rounds, alone, strict=True))
    return _median(rounds)._replace(computing=_median(alone).computing * relative)


def _median(seen: Sequence[StepBreakdown]) -> StepBreakdown:
    return StepBreakdown(*(statistics.median(values) for values in zip(*seen, strict=True)))


def _mean(seen: Sequence[StepBreakdown]) -> StepBreakdown:
    return StepBreakdown(*(statistics.mean(values) for values in zip(*seen, strict=True)))


def _busy_cores() -> float:
    """Return the fraction of the processor time of messages for which this machine has no spare core (0 to 1)."""
    beside = Counter(all_gather_object(machine_id()))[machine_id()]
    spare = len(os.sched_getaffinity(0)) - beside * torch.get_num_threads()
    return min(1.0, max(0.0, 1 - spare / beside))
