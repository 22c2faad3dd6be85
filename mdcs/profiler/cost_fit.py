"""Costs of messages and of compute beside them: plans whose steps tell them apart, and the fit to their periods.

Each cost is read from the times that it changes, by least squares, so that each has a standard error:

- Compute of a slot, over the plans: seconds alone, and what messages beside it take from it, by number, by bytes,
  and by seconds of copies and updates. Where updates run beside compute (CUDA): how much slower it is while a
  message is in flight.
- Time of a message on the link, over messages: latency α or gap, β for each operation, the wait for the last rank, and
  what compute adds by number and by bytes (:mod:`mdcs.profiler.link_fit`).
- The step: what slots do not show of the compute that a message takes.
- Delays of compute: between the end of a message and the slot that waits for it, and between backward and forward.
- The host's time for a message, where it enqueues ahead of a device.

A cost that the plans do not determine keeps its value in the profile given; that of updates and copies is the time that
they take. One that is not significantly above 0, but below this value, is 0.
:attr:`mdcs.Profile.calibration_runs` compares each plan's measured step with the prediction of a fit without that plan.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mdcs.plan.job import Job
from mdcs.plan.period import Op, Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem, StrategyDecision
from mdcs.planner.pipeline import Scheduler, StrategyPlanner, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Partitioning, StrategyAssignment, Wfbp, buckets, fuse
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.schema import Profile
from mdcs.profiler.link_fit import Estimates, Row, Term, covered, estimate, link_costs, occupancy, served, with_costs
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PeriodTrace

_APART = 4  # units that are cut have at least so many messages
_FUSED = 2  # fused messages have about so many units
_SMALLEST_MIB = 0.25  # units are not cut into smaller blocks

_WAKE_S = 2e-3  # compute that begins later after its message, or the slot before, has waited for something else
_LOST = "interference"  # the fraction of compute that is lost while a message is in flight
_HOST = "host_seconds_per_message"
_ENOUGH = 16  # periods of a run that are looked at, of many ranks and steps
_STEP_ERROR = 0.01  # relative error of a run's step
_MORE_S, _MOST_S = 1e-4, 5e-4  # compute of a message beyond the slots': a step for the derivative, and the most
_SLOTS_ERROR_S = 2e-4  # the least error of what slots show: a message delays more slots than the one in which it ends
_OF_COMPUTE = "compute_per_work", "compute_per_message", "compute_per_byte"
_WORK = 1.0  # s of compute that a second of copies and updates takes where steps do not tell: all cores are busy
_FEW = 3  # samples of a delay from which on it is determined


@dataclass(frozen=True)
class _Halves:
    """Two of four units are not sharded, and two are in their updates."""

    name: ClassVar[str] = "halves"

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        units = range(len(problem.profile.units))
        decision = StrategyDecision(tuple(Strategy.dp if u % 4 < 2 else Strategy.zero2 for u in units))
        problem.require(decision.strategies, f"strategies {self.name}")
        return decision


@dataclass(frozen=True)
class _HalfCut(Partitioning):
    """Cuts every second unit, and sends messages when they are ready."""

    def partition(self, mix: StrategyAssignment) -> tuple[tuple[int, ...], ...]:
        cut, whole = super().partition(mix), mix.unpartitioned_blocks()
        return tuple((cut if u % 2 else whole)[u] for u in range(len(cut)))


@dataclass(frozen=True)
class _HalfFused:
    """Fuses neighbours into messages of ``bucket_mib``, every second of which is sent as its parts instead."""

    bucket_mib: float
    name: ClassVar[str] = "fusion"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        def groups(stream: list[Op]) -> list[list[Op]]:
            fused = enumerate(buckets(mix, stream, self.bucket_mib))
            return [part for i, group in fused for part in ([[op] for op in group] if i % 2 else [group])]

        return fuse(mix, self.name, groups)


def calibration_plans(job: Job, budget: int | None = None) -> list[Plan]:
    """Return the plans under which a run's first steps determine the costs of messages.

    The first has every operation, but for those within nodes, and long and short messages of each: of whole units and
    of blocks of others, or if units are small of several fused and of others alone. The last is what greedy makes of
    these costs.

    ``budget``: bytes per rank. Strategies that do not keep it are replaced by a mix that does. Raises InfeasibleBudget.
    """
    unit, block = statistics.median(layout.param_bytes for layout in job.profile.layouts) / MIB, job.profile.block / MIB
    is_large = unit >= _APART * _SMALLEST_MIB
    mixed: Scheduler = _HalfCut(min(block, unit / _APART)) if is_large else _HalfFused(_FUSED * unit)
    wanted: list[tuple[StrategyPlanner, Scheduler]] = [(_Halves(), mixed), (Greedy(), Priority())]
    if job.profile.per_node:
        wanted.insert(1, (Uniform("hsdp"), Wfbp()))
    found: dict[str, Plan] = {}
    for strategy, scheduler in wanted:
        try:
            plan = make_plan(job, strategy, scheduler, budget=budget)
        except InfeasibleBudget:
            plan = make_plan(job, Greedy(), scheduler, budget=budget)
        found.setdefault(plan.execution_hash, plan)
    return [*found.values()]


# ---- the fit


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
    without = [
        _fitted(profile, [*runs[:i], *runs[i + 1 :]], [*evidence[:i], *evidence[i + 1 :]])
        for i in range(len(runs) if len(runs) > 1 else 0)
    ]
    is_enough = [known.errors.keys() >= found.errors.keys() for known in without]
    judged = dict[str, tuple[float, float]]()
    for run, known, determines_all in zip(runs, without, is_enough, strict=False):
        if determines_all or not any(is_enough):
            judged[run_name(run.plan, judged)] = replay(_under(run.plan, known)).period_s, run.step_s
    return replace(found, calibration_runs=judged)


def run_name(plan: Plan, others: Collection[str] = ()) -> str:
    """Return a plan's name among ``others``: its strategy and scheduler, and if need be its number of messages."""
    name = plan.strategy if plan.strategy == plan.scheduler else f"{plan.strategy} {plan.scheduler}"
    return name if name not in others else f"{name}, {len(plan.messages)} messages"


def _under(plan: Plan, profile: Profile) -> Plan:
    return replace(plan, job=replace(plan.job, profile=profile))


_Sample = tuple[int, float, np.ndarray]  # a slot's place in the profile, its seconds, and how often each cost counts


class _Evidence(NamedTuple):
    """Samples of costs, from the periods of a run.

    - ``slots``: for each slot of the period.
    - ``alone``, ``behind``: messages on an idle link, and messages behind others.
    - ``dispatch``, ``turn``, ``host``: samples of the two delays, and of the host's seconds for a message.
    """

    slots: list[_Sample]
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
            for row in served(run.plan, trace, sizes):
                (found.alone if row.is_alone else found.behind).append(row)
        return found


def _fitted(profile: Profile, runs: Sequence[Run], of_runs: Sequence[_Evidence]) -> Profile:
    samples: Any = zip(*of_runs, strict=True)
    evidence = _Evidence(*([*itertools.chain(*each)] for each in samples))
    seconds, compute = _compute_costs(profile, evidence.slots)
    link, delays = link_costs(profile, evidence.alone, evidence.behind), _delays(profile, evidence)
    slots = tuple(replace(s, seconds=seconds.get(i, s.seconds)) for i, s in enumerate(profile.slots))
    errors = compute.errors | link.errors | delays.errors
    found = replace(profile, slots=slots, link=with_costs(profile, link), errors=errors)
    if profile.execution.updates != "cores":
        lost = compute.values[_LOST]
        host_s = delays.values.get(_HOST, profile.execution.host_seconds_per_message)
        return replace(
            found, interference=lost / (1 - lost) if lost < 1 else profile.interference,
            execution=replace(profile.execution, host_seconds_per_message=host_s),
        )  # fmt: skip
    values = compute.values | delays.values | occupancy(found, link) | {"skew_seconds": link.values["skew_seconds"]}
    found = replace(found, contention=replace(profile.contention, **values))
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
    return replace(profile, contention=replace(profile.contention, compute_per_message=seconds))


# ---- compute


def _compute_costs(profile: Profile, slots: Sequence[_Sample]) -> tuple[dict[int, float], Estimates]:
    """Return the seconds of each slot of the profile without messages, and what messages take from compute."""
    terms = [Term(name, getattr(profile.contention, name)) for name in _OF_COMPUTE]
    if _OF_COMPUTE[0] not in profile.errors:
        terms[0] = Term(_OF_COMPUTE[0], _WORK)
    if profile.execution.updates != "cores":
        terms = [Term(_LOST, profile.interference / (1 + profile.interference))]
    by_place = defaultdict[int, list[int]](list)
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


def _slots(profile: Profile, run: Run, between_s: float, sizes: Sequence[int]) -> Iterator[_Sample]:
    """Yield :attr:`_Evidence.slots`. ``between_s``: from slot to slot without a wait; it belongs to the slot."""
    grown = [own.seconds - slot.seconds for own, slot in zip(run.plan.profile.slots, profile.slots, strict=True)]
    work = np.add(run.plan.seconds.copy, run.plan.seconds.update)
    of_messages = np.array([work, np.ones(len(work)), sizes]).T
    shares = profile.execution.updates == "cores"
    counts = np.mean([_shares(each, of_messages) if shares else _beside(each) for each in run.periods], axis=0)
    for q, slot in enumerate(run.plan.period.slots):
        busy = statistics.median(trace.slots[q][1] - trace.slots[q][0] for trace in run.periods)
        yield slot.place, busy + between_s - grown[slot.place], counts[q]


def _shares(trace: PeriodTrace, of_messages: np.ndarray) -> np.ndarray:
    """Return for each slot the sums over the messages beside it, each by its part from the begin of its bytes until it
    is done. ``of_messages`` [messages, values].
    """
    begins, ends = np.array(trace.slots).T[:, :, None]
    starts, finishes = np.array(trace.messages).T
    done, before = np.array(trace.done), np.roll(finishes, 1) - np.r_[trace.period_s, np.zeros(len(finishes) - 1)]
    began = np.maximum(starts, before)
    beside = sum(  # some are done in the next period
        np.clip(np.minimum(ends, done - late) - np.maximum(begins, began - late), 0, None)
        for late in (0, trace.period_s)
    )
    return np.asarray(beside / np.maximum(done - began, 1e-9) @ of_messages)


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


def _delays(profile: Profile, evidence: _Evidence) -> Estimates:
    """Return the delays of compute: medians over slots that waited for a message, and over turns that did not. Of a
    device with streams of its own: the host's time for a message.
    """
    delays = {"dispatch_seconds": evidence.dispatch, "turn_seconds": evidence.turn}
    if profile.execution.updates != "cores":
        delays = {_HOST: evidence.host}
    out = Estimates({}, {})
    for name, samples in delays.items():
        if len(samples) >= _FEW:
            middle = statistics.median(samples)
            spread = statistics.median(abs(each - middle) for each in samples) / 0.6745
            out.errors[name] = 1.25 * spread / len(samples) ** 0.5
            out.values[name] = middle if middle > 3 * out.errors[name] else 0.0
    return out
