"""Fit the costs of messages and of compute beside them to periods of a run under several plans.

Each cost is read from the times that it changes, by least squares, so that each has a standard error:

- Compute of a slot, over the plans: seconds alone, and what messages that complete in it take from it, by number, by
  bytes, and by seconds of copies and updates. Where updates run beside compute (CUDA): how much slower it is while a
  message is in flight.
- Time of a message on the link, over messages: latency α or gap, β for each operation, the wait for the last rank, and
  what compute adds by number and by bytes.
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
from mdcs.profile.link import Kind, Link, operation_name
from mdcs.profile.schema import Profile
from mdcs.profiler.regression import Estimates, Term, estimate
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PeriodTrace, Span, union

_IDLE_S = 1e-3  # a link that was idle for longer has let the ranks drift apart
_TOGETHER = 4  # messages in flight share the link in any way, so the times of at least so many are added
_ALIKE = 2  # two messages that differ in bytes by less than this factor gain alike from what they share
_WAKE_S = 2e-3  # compute that begins later after its message, or the slot before, has waited for something else
_LARGEST_BLOCK, _SATURATED = 16 * MIB, 0.97
_LOST = "interference"  # the fraction of compute that is lost while a message is in flight
_MANY = 24  # messages on an idle link that determine its latency: the waits of a few for other ranks look like it
_HOST = "host_seconds_per_message"
_ENOUGH = 16  # periods of a run that are looked at, of many ranks and steps
_STEP_ERROR = 0.01  # relative error of a run's step
_MORE_S, _MOST_S = 1e-4, 5e-4  # compute of a message beyond the slots': a step for the derivative, and the most
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
    alone: list[_Row]
    behind: list[_Row]
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
            for served in _served(run.plan, trace, sizes):
                is_alone = len(served) == 1 and served[0].idle > 0
                (found.alone if is_alone else found.behind).append(_Row.of(served))
        return found


def _fitted(profile: Profile, runs: Sequence[Run], evidence: Sequence[_Evidence]) -> Profile:
    seconds, compute = _compute_costs(profile, evidence)
    link, delays = _link_costs(profile, evidence), _delays(profile, evidence)
    slots = tuple(dataclasses.replace(s, seconds=seconds.get(i, s.seconds)) for i, s in enumerate(profile.slots))
    found = dataclasses.replace(
        profile, slots=slots, link=_with_costs(profile, link), errors=compute.errors | link.errors | delays.errors
    )
    if profile.execution.updates != "cores":
        lost = compute.values[_LOST]
        host_s = delays.values.get(_HOST, profile.execution.host_seconds_per_message)
        return dataclasses.replace(
            found,
            interference=lost / (1 - lost) if lost < 1 else profile.interference,
            execution=dataclasses.replace(profile.execution, host_seconds_per_message=host_s),
        )
    values = compute.values | delays.values | _occupancy(found, link) | {"skew_seconds": link.values["skew_seconds"]}
    found = dataclasses.replace(found, contention=dataclasses.replace(profile.contention, **values))
    return _as_long_as(runs, found) if "compute_per_message" in found.errors else found


def _as_long_as(runs: Sequence[Run], profile: Profile) -> Profile:
    """Return the profile with the compute of a message that explains the runs' steps, as far as its error allows.

    Where all cores are busy a message delays compute by more than the slots in which it ends show, and a planner to
    which messages seem to be free sends many. Least squares of the steps' errors, which are small enough to be linear.
    """
    before = profile.contention.compute_per_message
    weight = (_STEP_ERROR / profile.errors["compute_per_message"]) ** 2
    above = slope = 0.0
    for run in runs:
        told, more = (replay(_under(run.plan, _per_message(profile, c))).period_s for c in (before, before + _MORE_S))
        change = (more - told) / _MORE_S / run.step_s
        above += change * (run.step_s - told) / run.step_s
        slope += change**2
    return _per_message(profile, min(max(0.0, before + above / (slope + weight)), before + _MOST_S))


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
    return np.diff(_covered([*before, *trace.messages], np.array(trace.slots)), axis=1)


def _covered(spans: Sequence[Span], at: np.ndarray) -> np.ndarray:
    """Return how many seconds of the spans lie before each time."""
    edges = np.array(union(spans)).reshape(-1, 2)
    if not len(edges):
        return np.zeros_like(at)
    until = np.cumsum(np.diff(edges, axis=1))
    return np.interp(at, edges.ravel(), np.array([np.roll(until, 1) * (np.arange(len(until)) > 0), until]).T.ravel())


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


# ---- the link


def _link_costs(profile: Profile, runs: Sequence[_Evidence]) -> Estimates:
    """Return gap, β and α of each operation, what compute adds to a message, and the skew.

    Messages that follow each other give all but α and the skew, which are what messages alone on the link take beyond.
    """
    link = profile.link
    alone, behind = [row for run in runs for row in run.alone], [row for run in runs for row in run.behind]
    kinds = {name: kind for row in (*alone, *behind) for name, kind in row.kinds.items()}
    never_behind = kinds.keys() - {name for row in behind for name in row.kinds}
    terms = [] if link.emulated else [Term(f"gap of {name}", link.gap_of(kind)) for name, kind in kinds.items()]
    terms += [Term("message_seconds"), Term("seconds_per_byte")]
    if not link.emulated:
        terms += [Term(f"beta of {name}", link.beta_of(kind), is_effect=False) for name, kind in kinds.items()]
    known = {f"gap of {name}": link.gap_of(kind) for name, kind in kinds.items()}
    known |= {f"beta of {name}": link.beta_of(kind) for name, kind in kinds.items()}
    rates = _estimate(terms, [*behind, *(row for row in alone if row.kinds.keys() & never_behind)], known)
    known |= rates.values
    known = {key: value for key, value in known.items() if not key.startswith("gap")}
    known |= {f"alpha of {name}": link.alpha_of(kind) for name, kind in kinds.items()}
    often = [] if link.emulated else [n for n in kinds if sum(n in row.kinds for row in alone) >= _MANY]
    terms = [Term(f"alpha of {name}", known[f"alpha of {name}"]) for name in often]
    terms.append(Term("skew_seconds", profile.contention.skew_seconds))
    waits = _estimate(terms, alone, known)
    return Estimates(rates.values | waits.values, rates.errors | waits.errors)


class _Row(NamedTuple):
    """Messages that the link serves one behind the other, and the seconds of all: how often each cost counts."""

    seconds: float
    kinds: dict[str, Kind]
    costs: dict[str, float]

    @classmethod
    def of(cls, served: Sequence[_Service]) -> _Row:
        """Return the row of these messages."""
        costs, kinds = defaultdict[str, float](float), {operation_name(each.kind): each.kind for each in served}
        for each in served:
            name = operation_name(each.kind)
            costs[f"gap of {name}"] += 1
            costs[f"alpha of {name}"] += 1
            costs[f"beta of {name}"] += each.wire
            costs["message_seconds"] += each.computing
            costs["seconds_per_byte"] += each.computing * each.wire
            costs["skew_seconds"] += each.idle > _IDLE_S
        return cls(sum(each.seconds for each in served), kinds, costs)


def _estimate(terms: Sequence[Term], rows: Sequence[_Row], known: dict[str, float]) -> Estimates:
    """Return the estimates of these terms; other costs are ``known``."""
    if not rows:
        return Estimates({term.name: term.prior for term in terms}, {})
    named = {term.name for term in terms}
    x = np.array([[row.costs[term.name] for term in terms] for row in rows])
    fixed = [sum(row.costs[name] * value for name, value in known.items() if name not in named) for row in rows]
    y = np.array([row.seconds for row in rows]) - fixed
    size = np.array([sum(value for name, value in row.costs.items() if name.startswith("beta")) for row in rows])
    scale = np.sqrt(size / size.mean() + 0.1)  # longer ones vary more
    return estimate(terms, x / scale[:, None], y / scale)


class _Service(NamedTuple):
    """The time of a message on the link.

    - ``wire``: bytes. ``seconds``: from its start, or the end of the message before, to its end.
    - ``idle``: seconds for which the link was idle before; 0: the message before was still in flight.
    - ``computing``: fraction of the time in which compute ran.
    """

    kind: Kind
    wire: int
    seconds: float
    idle: float
    computing: float


def _served(plan: Plan, trace: PeriodTrace, sizes: Sequence[int]) -> Iterator[list[_Service]]:
    """Yield the messages of a period as the link serves them, a few consecutive ones together.

    ``sizes``: wire bytes of each message.
    """
    if not trace.messages:
        return
    starts, ends = np.array(trace.messages).T
    begins = np.maximum(starts[1:], ends[:-1])
    following = [(begin + trace.period_s, end + trace.period_s) for begin, end in trace.slots]
    computing = np.diff(_covered([*trace.slots, *following], np.array([begins, ends[1:]])), axis=0)[0]
    together: list[_Service] = []
    rows = zip(begins.tolist(), ends[1:].tolist(), (starts[1:] - ends[:-1]).tolist(), computing.tolist(), strict=True)
    for message, size, (begin, end, idle, beside) in zip(plan.messages[1:], sizes[1:], rows, strict=True):
        if end <= begin:
            continue
        ends_alike = together and max(size, together[-1].wire) < _ALIKE * min(size, together[-1].wire)
        if together and (idle > 0 or len(together) >= (_TOGETHER if ends_alike else 2 * _TOGETHER)):
            yield together
            together = []
        together.append(_Service(message.kind, size, end - begin, max(0.0, idle), beside / (end - begin)))
    if together:
        yield together


def _occupancy(profile: Profile, found: Estimates) -> dict[str, float]:
    """Return how long messages occupy the link at least while something computes, of what compute adds to them."""
    added = {name: found.values[name] for name in ("message_seconds", "seconds_per_byte") if name in found.errors}
    if not any(added.values()):
        return dict.fromkeys(added, 0.0)
    link = profile.link
    kinds = [kind for kind in link.kinds if f"beta of {operation_name(kind)}" in found.values] or [*link.kinds]
    return {
        "message_seconds": statistics.mean(map(link.gap_of, kinds)) + added.get("message_seconds", 0.0),
        "seconds_per_byte": statistics.mean(map(link.beta_of, kinds)) + added.get("seconds_per_byte", 0.0),
    }


def _with_costs(profile: Profile, found: Estimates) -> Link:
    """Return the link with these costs of each operation, and the block that follows from them."""
    link = profile.link
    if link.emulated:
        return link

    def column(name: str, before: tuple[float, ...]) -> tuple[float, ...]:
        keys = [f"{name} of {operation_name(kind)}" for kind in link.kinds]
        return tuple(found.values.get(key, value) for key, value in zip(keys, before, strict=True))

    known = [f"beta of {operation_name(kind)}" in found.errors for kind in link.kinds]
    gap, beta = column("gap", link.gap), column("beta", link.beta)
    if ratios := [b / a for a, b, is_known in zip(link.beta, beta, known, strict=True) if is_known and a]:
        rate = statistics.median(ratios)  # of operations that no plan has: assumed as far off as the others were
        beta = tuple(b if is_known else rate * b for b, is_known in zip(beta, known, strict=True))
    blocks = [float(link.block)]
    if any(key.startswith("gap") for key in found.errors):
        sent = [profile.wire(kind, MIB) / MIB for kind in link.kinds]
        blocks = [g / (b * s) * _SATURATED / (1 - _SATURATED) for g, b, s in zip(gap, beta, sent, strict=True) if b * s]
    block = min(max(MIB, int(max(blocks, default=0))), _LARGEST_BLOCK)
    return dataclasses.replace(link, alpha=column("alpha", link.alpha), beta=beta, gap=gap, block=block)
