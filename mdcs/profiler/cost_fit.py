"""Fit the costs of messages and of compute beside them to periods of a run under several plans.

Each cost is read from the times that it changes, by least squares, so that each has a standard error:

- Compute of a slot, over the plans: seconds alone, and what messages that complete in it take from it, by number, by
  bytes, and by seconds of copies and updates. Where updates run beside compute (CUDA): how much slower it is while a
  message is in flight.
- Time of a message on the link, over messages: latency α or gap, β for each operation, the wait for the last rank, and
  what compute adds by number and by bytes (:mod:`mdcs.profiler.link_fit`).
- The step: what slots do not show of the compute that a message takes.
- Delays of compute: between the end of a message and the slot that waits for it, and between backward and forward.
- The host's time for a message, where it enqueues ahead of a device.

A cost that the plans do not determine keeps its value in the profile given. One that is not significantly above 0 is 0.
:attr:`mdcs.Profile.calibration_runs` compares each plan's measured step with the prediction of a fit without that plan.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mdcs.plan.plan import Plan
from mdcs.profile.schema import Profile
from mdcs.profiler.link_fit import Row, covered, link_costs, occupancy, served, with_costs
from mdcs.profiler.regression import Estimates, Term, estimate
from mdcs.simulator.simulate import replay
from mdcs.telemetry.timeline import PeriodTrace

_WAKE_S = 2e-3  # compute that begins later after its message, or the slot before, has waited for something else
_LOST = "interference"  # the fraction of compute that is lost while a message is in flight
_HOST = "host_seconds_per_message"
_ENOUGH = 16  # periods of a run that are looked at, of many ranks and steps
_STEP_ERROR = 0.01  # relative error of a run's step
_MORE_S, _MOST_S = 1e-4, 5e-4  # compute of a message beyond the slots': a step for the derivative, and the most
_SLOTS_ERROR_S = 2e-4  # the least error of what slots show: a message delays more slots than the one in which it ends
_FEW = 3  # samples of a delay from which on it is determined


class Run(NamedTuple):
    """Periods of one plan in steady state, of all ranks."""

    plan: Plan
    periods: Sequence[PeriodTrace]

    @property
    def step_s(self) -> float:
        """Median seconds of a period."""
        return statistics.median(each.period_s for each in self.periods)


def fit_costs(profile: Profile, runs: Sequence[Run]) -> Profile:
    """Return the profile with the costs that the runs determine, and their standard errors.

    The other costs are those of ``profile``, the prior. ``calibration_runs`` has the measured step of each run, and the
    step that is predicted from the other runs: of the runs without which the others determine as much, if there are
    some. It is empty for a single run.
    """
    runs = [Run(plan, periods[:: -(-len(periods) // _ENOUGH)]) for plan, periods in runs if periods]
    if not runs or profile.world == 1:
        return profile
    evidence = [_Evidence.of(profile, run) for run in runs]
    found = _fitted(profile, runs, evidence)
    others = [[j for j in range(len(runs)) if j != i] for i in range(len(runs)) if len(runs) > 1]
    without = [_fitted(profile, [runs[j] for j in each], [evidence[j] for j in each]) for each in others]
    is_enough = [known.errors.keys() >= found.errors.keys() for known in without]
    judged = dict[str, tuple[float, float]]()
    for run, known, determines_all in zip(runs, without, is_enough, strict=False):
        if determines_all or not any(is_enough):
            judged[run_name(run.plan, judged)] = replay(_under(run.plan, known)).period_s, run.step_s
    return dataclasses.replace(found, calibration_runs=judged)


def run_name(plan: Plan, others: Collection[str] = ()) -> str:
    """Return a plan's name among ``others``: its strategy and scheduler, and if need be its number of messages."""
    name = plan.strategy if plan.strategy == plan.scheduler else f"{plan.strategy} {plan.scheduler}"
    return name if name not in others else f"{name}, {len(plan.messages)} messages"


def _under(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with another profile."""
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, profile=profile))


class _Evidence(NamedTuple):
    """Samples of costs, from the periods of a run.

    - ``slots``: for each slot of the period its place in the profile, its seconds, and how often each cost counts.
    - ``alone``, ``behind``: messages on an idle link, and messages behind others.
    - ``dispatch``, ``turn``, ``host``: samples of the two delays, and of the host's seconds for a message.
    """

    slots: list[tuple[int, float, np.ndarray]]
    alone: list[Row]
    behind: list[Row]
    dispatch: list[float]
    turn: list[float]
    host: list[float]

    @classmethod
    def of(cls, profile: Profile, run: Run) -> _Evidence:
        """Return the evidence of a run, with the bytes and updates of ``profile``."""
        run = Run(_under(run.plan, profile), run.periods)
        found = cls([], [], [], [], [], [])
        gaps, sizes = [*_gaps(run)], [run.plan.wire(m) for m in run.plan.messages]
        between = [gap for gap, done, q in gaps if done is None and q != run.plan.period.turn]
        if run.plan.budget is not None:  # compute that has waited for no message may have waited for memory
            between = [gap for gap in between if gap < _WAKE_S]
        between_s = statistics.median(between) if between else 0.0
        for gap, done, q in gaps:
            if done is not None and abs(gap - done) < _WAKE_S:
                found.dispatch.append(gap - done)
            elif done is None and q == run.plan.period.turn:
                found.turn.append(max(0.0, gap - between_s))
        found.host.extend(trace.host_s / max(1, len(run.plan.messages)) for trace in run.periods)
        found.slots.extend(_slots(profile, run, between_s, sizes))
        for trace in run.periods:
            for messages in served(run.plan, trace, sizes):
                is_alone = len(messages) == 1 and messages[0].idle > 0
                (found.alone if is_alone else found.behind).append(Row.of(messages))
        return found


def _fitted(profile: Profile, runs: Sequence[Run], evidence: Sequence[_Evidence]) -> Profile:
    seconds, compute = _compute_costs(profile, evidence)
    alone, behind = [row for run in evidence for row in run.alone], [row for run in evidence for row in run.behind]
    link, delays = link_costs(profile, alone, behind), _delays(profile, evidence)
    slots = tuple(dataclasses.replace(s, seconds=seconds.get(i, s.seconds)) for i, s in enumerate(profile.slots))
    found = dataclasses.replace(
        profile, slots=slots, link=with_costs(profile, link), errors=compute.errors | link.errors | delays.errors
    )
    if profile.execution.updates != "cores":
        lost = compute.values[_LOST]
        host_s = delays.values.get(_HOST, profile.execution.host_seconds_per_message)
        return dataclasses.replace(
            found,
            interference=lost / (1 - lost) if lost < 1 else profile.interference,
            execution=dataclasses.replace(profile.execution, host_seconds_per_message=host_s),
        )
    values = compute.values | delays.values | occupancy(found, link) | {"skew_seconds": link.values["skew_seconds"]}
    found = dataclasses.replace(found, contention=dataclasses.replace(profile.contention, **values))
    return _as_long_as(runs, found) if "compute_per_message" in found.errors else found


def _as_long_as(runs: Sequence[Run], profile: Profile) -> Profile:
    """Return the profile with the compute of a message that explains the runs' steps, as far as its error allows.

    Where all cores are busy a message delays compute by more than the slots in which it ends show, and a planner to
    which messages seem to be free sends many. Least squares of the steps' errors, which are small enough to be linear.
    """
    before = profile.contention.compute_per_message
    squared = max(profile.errors["compute_per_message"], _SLOTS_ERROR_S) ** 2
    above = slope = 0.0
    for run in runs:
        told, more = (replay(_under(run.plan, _per_message(profile, c))).period_s for c in (before, before + _MORE_S))
        change = (more - told) / _MORE_S / run.step_s
        above += change * (run.step_s - told) / run.step_s
        slope += change**2
    more_s = above * squared / (slope * squared + _STEP_ERROR**2)
    return _per_message(profile, min(max(0.0, before + more_s), before + _MOST_S))


def _per_message(profile: Profile, seconds: float) -> Profile:
    return dataclasses.replace(
        profile, contention=dataclasses.replace(profile.contention, compute_per_message=seconds)
    )


# ---- compute


def _compute_costs(profile: Profile, runs: Sequence[_Evidence]) -> tuple[dict[int, float], Estimates]:
    """Return the seconds of each slot of the profile without messages, and what messages take from compute."""
    contention, before = profile.contention, profile.interference
    terms = [
        Term("compute_per_work", contention.compute_per_work),
        Term("compute_per_message", contention.compute_per_message),
        Term("compute_per_byte", contention.compute_per_byte),
    ]
    if profile.execution.updates != "cores":
        terms = [Term(_LOST, before / (1 + before))]
    slots, by_place = [slot for run in runs for slot in run.slots], defaultdict[int, list[int]](list)
    for i, (place, *_) in enumerate(slots):
        by_place[place].append(i)
    x, y = np.array([row for *_, row in slots]), np.array([seconds for _, seconds, _ in slots])
    within_x, within_y = x.copy(), y.copy()
    for own in by_place.values():  # each slot has its own seconds without messages
        within_x[own] -= x[own].mean(axis=0)
        within_y[own] -= y[own].mean()
    found = estimate(terms, within_x, within_y, len(by_place))
    alone = y - x @ np.array([found.values[term.name] for term in terms])
    return {place: max(0.0, float(np.median(alone[own]))) for place, own in by_place.items()}, found


def _slots(
    profile: Profile, run: Run, between_s: float, sizes: Sequence[int]
) -> Iterator[tuple[int, float, np.ndarray]]:
    """Yield :attr:`_Evidence.slots`. ``between_s``: from slot to slot without a wait; it belongs to the slot."""
    grown = [own.seconds - slot.seconds for own, slot in zip(run.plan.profile.slots, profile.slots, strict=True)]
    work = np.add(run.plan.seconds.copy, run.plan.seconds.update)
    of_messages = np.array([work, np.ones(len(work)), sizes]).T
    if profile.execution.updates == "cores":
        counts = np.mean([_completing(trace, of_messages) for trace in run.periods], axis=0)
    else:
        counts = np.mean([_beside(trace) for trace in run.periods], axis=0)
    for q, slot in enumerate(run.plan.period.slots):
        busy = statistics.median(trace.slots[q][1] - trace.slots[q][0] for trace in run.periods)
        yield slot.place, busy + between_s - grown[slot.place], counts[q]


def _completing(trace: PeriodTrace, of_messages: np.ndarray) -> np.ndarray:
    """Return for each slot the sums over the messages that complete in it. ``of_messages`` [messages, values]."""
    begins, ends = np.array(trace.slots).T
    counts = np.zeros((len(ends), of_messages.shape[1]))
    for at in (np.array(trace.done), np.array(trace.done) - trace.period_s):  # some complete in the next period
        slot = np.minimum(np.searchsorted(ends, at), len(ends) - 1)
        inside = (begins[slot] < at) & (at <= ends[slot])
        np.add.at(counts, slot[inside], of_messages[inside])
    return counts


def _beside(trace: PeriodTrace) -> np.ndarray:
    """Return for how many seconds of each slot messages are in flight [slots, 1]."""
    before = [(start - trace.period_s, end - trace.period_s) for start, end in trace.messages]
    return np.diff(covered([*before, *trace.messages], np.array(trace.slots)), axis=1)


def _gaps(run: Run) -> Iterator[tuple[float, float | None, int]]:
    """Yield for each slot its begin after the end of the slot before, the end of the message that it has waited for,
    after that slot, or None, and the slot."""
    schedule, messages = run.plan.schedule, run.plan.messages
    n, blocking = len(messages), [i + 1 for i, m in enumerate(messages) if m.blocking]
    waits = [max([0, *(i for i in blocking if i <= issued)]) for issued in schedule.issued]
    for trace in run.periods:
        for q in range(1, len(trace.slots)):
            ended, begin = trace.slots[q - 1][1], trace.slots[q][0]
            awaited = max(schedule.required[q], waits[q]) - 1
            done = -1.0
            if n and awaited >= -n:
                done = trace.done[awaited] - (trace.period_s if awaited < 0 else 0.0)
            yield begin - ended, done - ended if ended < done else None, q


def _delays(profile: Profile, runs: Sequence[_Evidence]) -> Estimates:
    """Return the delays of compute: medians over slots that waited for a message, and over turns that did not.

    Of a device with streams of its own: the host's time for a message.
    """
    delays = {_HOST: [each for run in runs for each in run.host]}
    if profile.execution.updates == "cores":
        delays = {
            "dispatch_seconds": [each for run in runs for each in run.dispatch],
            "turn_seconds": [each for run in runs for each in run.turn],
        }
    out = Estimates({}, {})
    for name, samples in delays.items():
        if len(samples) >= _FEW:
            middle = statistics.median(samples)
            spread = statistics.median(abs(each - middle) for each in samples) / 0.6745
            out.errors[name] = 1.25 * spread / len(samples) ** 0.5
            out.values[name] = middle if middle > 3 * out.errors[name] else 0.0
    return out
