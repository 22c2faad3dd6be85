"""Replay of a plan in virtual time: the actions of the runtime, slot by slot and message by message.

Compute is serial. The link is FIFO with ``depth`` messages in flight (:mod:`mdcs.profile.link`). Summing, unpacking and
updating after a message are serial in the transport. A message starts when all messages ahead of it have started, its
data is ready and compute has arrived at its issue slot. Messages and slots are admitted only when their bytes fit, and
admission never changes the order.

Only compute issues messages, and it waits only for messages issued before. So every time follows from earlier times:
the replay is one pass without an event queue, from the prologue until periods repeat, at most ``MAX_PERIODS``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mdcs.plan import ledger, schedule
from mdcs.plan.cost import Prediction, StepTimes
from mdcs.plan.job import Job
from mdcs.plan.ledger import AssignmentBytes, Ledger, MessageBytes
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.plan.period import Period
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Folded
from mdcs.profile.link import Contention
from mdcs.simulator import kernel
from mdcs.simulator.kernel import PeriodArrays, ReplayArrays
from mdcs.telemetry.timeline import Interval, Span, times_of

_NOTHING = Contention()


class Replay:
    """The result of a replay: times of all messages and slots, in seconds since the prologue began, in FIFO and
    executed order. The last ones are those of the last period. What takes time to compute is computed on demand.

    - ``spans``: (start, end) of each message on the link.
    - ``landed``: when each message is summed or unpacked. ``processed``: when it and all before are updated.
    - ``arrivals``: when compute arrives at each slot; the last entry is the end. ``begins``: when it runs each.
    - ``began``: start of the last period. ``period_s``: its length.
    - ``settled``: whether the last period equals the one before, so that all later periods are equal.
    """

    def __init__(self, plan: Plan, ledger: Ledger | None, track: ReplayArrays, settled: bool) -> None:
        self._plan, self._ledger, self.settled = plan, ledger, settled
        sent, arrivals = track.count[kernel.SENT], track.count[kernel.ARRIVALS]
        written = ReplayArrays(*(column if isinstance(column, list) else column.tolist() for column in track))
        self.spans: list[Span] = list(zip(written.start[:sent], written.finish[:sent], strict=True))
        self.landed: list[float] = written.landed[:sent]
        self.processed: list[float] = written.done[:sent]
        self.arrivals: list[float] = written.arrival[:arrivals]
        self.begins: list[float] = written.begin[: arrivals - 1]
        self.began = self.arrivals[-plan.period.length - 1]
        self.period_s = self.arrivals[-1] - self.began

    def compute(self) -> list[Span]:
        """Return (start, end) of each slot of the last period, relative to its start."""
        began, last = self.began, self._plan.period.length
        return [(a - began, b - began) for a, b in zip(self.begins[-last:], self.arrivals[-last:], strict=True)]

    def seen(self, spans: list[Span]) -> dict[int, Span]:
        """Return the spans in the last period, by message index, relative to its start and cut off at its ends."""
        began, ended = self.began, self.arrivals[-1]
        oldest = max(0, len(spans) - 2 * len(self._plan.messages))  # those of the period before may still be in flight
        return {
            g: ((start if start > began else began) - began, (end if end < ended else ended) - began)
            for g, (start, end) in enumerate(spans[oldest:], oldest)
            if end > began and start < ended
        }

    @cached_property
    def times(self) -> StepTimes:
        """Parts of the period: computing, communicating, both, and exposed communication."""
        return times_of(self.period_s, self.compute(), self.seen(self.spans).values())

    @cached_property
    def intervals(self) -> list[Interval]:
        """Slots, messages and updates of the period, in the format of a measured timeline."""
        plan, units, first = self._plan, self._plan.profile.units, len(self.spans) - 2 * len(self._plan.messages)
        out = [
            Interval("compute", plan.period.name(q), slot.phase, units[slot.unit].name, start, end)
            for q, (slot, (start, end)) in enumerate(zip(plan.period.slots, self.compute(), strict=True))
        ]
        # An update beside the link may wait for the one before it.
        begun = [*map(max, self.landed[first:], [0.0, *self.processed][first:])]
        messages = self.seen(self.spans)
        updates = self.seen([*self.spans[:first], *zip(begun, self.processed[first:], strict=True)])
        for g in sorted({*messages, *updates}):
            kind, names, wire = plan.labels[g % len(plan.messages)]
            if g in messages:
                out.append(Interval("message", f"{kind}:{names}", kind, names, *messages[g], wire))
            if g in updates and begun[g - first] < self.processed[g]:
                out.append(Interval("update", f"update:{names}", "update", names, *updates[g]))
        return out

    @property
    def peak(self) -> dict[str, int]:
        """Peak bytes of each category (at its own time), and of all together ("total")."""
        return {key: max([slot[key] for slot in self.curve]) for key in (*CATEGORIES, "total")}

    @cached_property
    def curve(self) -> list[dict[str, int]]:
        """The same bytes for every slot of the period. A slot includes the wait before it."""
        ledger = self._ledger or Ledger(self._plan)
        live, events = _events(self._plan, ledger, self)
        known, rest = sum(live.values()), 0
        window: dict[str, int] | None = None
        curve: list[dict[str, int]] = []
        for _, what, size in sorted(events, key=itemgetter(0)):
            if what == _ARRIVE:
                rest = ledger.slots[size].live
                window = dict(live, activations=rest, total=known + rest)
                curve.append(window)
            elif what == _END:
                window = None
            elif what == _BEGIN:
                rest = ledger.slots[size].peak
            else:
                live[what] += size
                known += size
            if window is not None:
                if what in live and live[what] > window[what]:
                    window[what] = live[what]
                if rest > window["activations"]:
                    window["activations"] = rest
                if known + rest > window["total"]:
                    window["total"] = known + rest
        return curve

    def prediction(self) -> Prediction:
        """Return the part of the result that is stored with the plan."""
        t, peak = self.times, self.peak
        return Prediction.of(
            t.step_s, t.compute_s, t.communication_s, t.overlap_s, peak_bytes=peak["total"], memory=peak
        )

    def steady(self) -> Steady:
        """Return the times of the last period."""
        began, length = self.began, self._plan.period.length
        slots = zip(self.arrivals[-length - 1 : -1], self.begins[-length:], self.arrivals[-length:], strict=True)
        finishes = [finish - began for _, finish in self.spans[len(self.spans) - len(self._plan.messages) :]]
        return Steady(
            self.period_s,
            tuple((a - began, b - began, e - began) for a, b, e in slots),
            tuple((end - transfer, end) for end, transfer in zip(finishes, self._plan.seconds.transfer, strict=True)),
        )


def replay(plan: Plan) -> Replay:
    """Replay a plan until its period repeats. Messages are admitted by its bytes if it has a budget. Raises PlanError,
    naming the slot, when admission deadlocks.
    """
    ledger, n = None if plan.admissible is None else Ledger(plan), len(plan.messages)
    slots = for_loops(period_arrays(plan.job, plan.admissible, ledger))
    sizes = Folded([0] * n, [0] * n, [0] * n) if ledger is None else ledger.folded
    track = for_loops(empty_replay(n, plan.period.length))
    how = kernel.run(slots, for_loops(plan.schedule), for_loops(plan.seconds), for_loops(sizes), track)
    if how == kernel.DEADLOCK:
        q, need = track.count[kernel.STUCK], track.count[kernel.NEEDED]
        raise PlanError(f"deadlock at slot {q} ({plan.period.name(q)}): needs {need} of {slots.cap} bytes")
    return Replay(plan, ledger, track, how == kernel.SETTLED)


def period_arrays(job: Job, admissible: int | None, held: AssignmentBytes | None) -> PeriodArrays:
    """Return the slots of a job's period. ``held``: bytes of the mix; None: bytes are not counted."""
    contention, execution, none = job.profile.contention, job.profile.execution, [0] * job.period.length
    slots = [] if held is None else held.slots
    # One type per field: processes that compile loops for other types at a time may mix up numba's cached code.
    return PeriodArrays(
        seconds=job.period.seconds,
        live=[s.live for s in slots] or none,
        peak=[s.peak for s in slots] or none,
        allocated=[s.allocated for s in slots] or none,
        freed=[s.freed for s in slots] or none,
        turn=job.period.turn,
        depth=execution.in_flight(job.profile.link.depth),
        apart=execution.has_own_updates,
        host_message_s=float(execution.host_seconds_per_message),
        host_slot_s=float(execution.host_seconds_per_slot),
        slowdown=1.0 + job.profile.interference,
        contended=contention != _NOTHING,
        dispatch_s=float(contention.dispatch_seconds),
        turn_s=float(contention.turn_seconds),
        skew_s=float(contention.skew_seconds),
        rest=0 if held is None else held.rest_bytes,
        cap=-1 if admissible is None else admissible,
    )


def empty_replay(messages: int, slots: int) -> ReplayArrays:
    """Return an empty track for a plan with this many messages and slots."""
    n, length = kernel.MAX_PERIODS * messages, kernel.MAX_PERIODS * slots
    return ReplayArrays(
        [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * (length + 1), [0.0] * length, [0.0] * (6 * messages),
        [0] * (kernel.NEEDED + 1),
    )  # fmt: skip


class Steady(NamedTuple):
    """Times of the last replayed period, in seconds from its start.

    - ``slots``: (arrival, begin, end) of compute at each slot.
    - ``bytes``: (begin, end) of the bytes on the link, for each message issued in the period; may end after it.
    """

    period_s: float
    slots: tuple[tuple[float, float, float], ...]
    bytes: tuple[Span, ...]

    def arrival(self, slot: int) -> float:
        """Return when compute arrives at a slot (unrolled)."""
        turns, q = divmod(slot, len(self.slots))
        return turns * self.period_s + self.slots[q][0]


def undelayed(period: Period) -> Steady:
    """Return the times of slots without messages."""
    edges = [0.0, *itertools.accumulate(period.seconds)]
    return Steady(edges[-1], tuple((begin, begin, end) for begin, end in itertools.pairwise(edges)), ())


# ---- bytes of the last period


_Event = tuple[float, str, int]
"""(time, category or mark, bytes or slot). Events with equal times keep their order."""

_ARRIVE, _BEGIN, _END = "arrive", "begin", "end"  # marks of compute


def _events(plan: Plan, ledger: Ledger, trace: Replay) -> tuple[dict[str, int], list[_Event]]:
    """Return the bytes by category when the last period begins, and all later allocations and releases."""
    live = dict.fromkeys(CATEGORIES, 0) | ledger.at_rest
    n, turn, length, began = len(plan.messages), plan.period.turn, plan.period.length, trace.began
    # Bytes at the end of the prologue. Every later period frees as much as it allocates.
    effects = [each for slot in ledger.slots[turn:] for each in (*slot.at_begin, *slot.at_end)]
    for in_prologue, e in zip(plan.schedule.in_prologue, ledger.messages, strict=True):
        if in_prologue:
            effects += itertools.chain(*e.effects)
    for what, size in effects:
        live[what] += size
    out: list[_Event] = []
    first = len(trace.spans) - 2 * n
    times = zip(trace.spans[first:], trace.landed[first:], trace.processed[first:], strict=True)
    messages = [(start, landed, done) for (start, _), landed, done in times]
    for e, (start, landed, done) in zip(ledger.messages, messages[:n], strict=True):
        for event in _effects(e, start, landed, done):
            if event[0] > began:  # earlier events are already counted in ``live``
                live[event[1]] -= event[2]
                out.append(event)
    edges, sent = itertools.pairwise(trace.arrivals[-length - 1 :]), 0
    for q, ((arrival, end), begin, slot) in enumerate(zip(edges, trace.begins[-length:], ledger.slots, strict=True)):
        out.append((arrival, _ARRIVE, q))
        for i in range(sent, plan.schedule.issued[q]):
            out += _effects(ledger.messages[i], *messages[n + i])
        sent = plan.schedule.issued[q]
        out.append((begin, _BEGIN, q))
        out += [(begin, what, size) for what, size in slot.at_begin]
        out.append((end, _END, q))
        out += [(end, what, size) for what, size in slot.at_end]
    return live, out


def _effects(e: MessageBytes, start: float, landed: float, done: float) -> list[_Event]:
    """Return the allocations and releases of a message as events."""
    times = zip((start, landed, done), e.effects, strict=True)
    return [(time, what, size) for time, effects in times for what, size in effects]


# ---- the loops in machine code: compiled by numba; without it they run as Python, only slower


Fields = TypeVar(
    "Fields", kernel.PeriodArrays, kernel.ReplayArrays, schedule.Schedule, schedule.MessageTable,
    schedule.MessageSeconds, schedule.SizeTable, schedule.Folded,
)  # fmt: skip

_SECONDS = {
    *("seconds", "early", "ready", *schedule.MessageSeconds._fields),
    *(name for name in kernel.ReplayArrays._fields if name != "count"),
}  # fmt: skip
_is_compiled = False


class Loops(NamedTuple):
    """The loops that a search calls for each candidate."""

    arrange: Callable[..., int]
    fold_seconds: Callable[..., None]
    fold_bytes: Callable[..., None]
    fill_demands: Callable[..., None]
    run: Callable[..., int]


def compiled_loops() -> Loops:
    """Return the loops, compiled for the rest of this process if numba is installed.

    Plans are arranged and folded as Python, because copying the lists of one plan takes longer; their replays are
    compiled from here on. The first compilation on a machine takes some ten seconds. Numba caches the code next to the
    modules, or in the user's cache; where neither can be written, every process compiles.
    """
    global _is_compiled
    if not _is_compiled:
        with contextlib.suppress(ImportError):  # not installed, or not for this numpy
            for loop in kernel.LOOPS:
                setattr(kernel, loop.__name__, _compiled(loop))  # they call each other
            _is_compiled = True
    made: Callable[[Callable[..., Any]], Callable[..., Any]] = _compiled if _is_compiled else lambda loop: loop
    return Loops(
        made(schedule.arrange), made(schedule.fold_seconds), made(schedule.fold_bytes), made(ledger.fill_demands),
        kernel.run,
    )  # fmt: skip


@cache
def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    _drop_outdated(Path(loop.__code__.co_filename))
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, error_model="numpy")(loop)
    except RuntimeError:  # no folder for the cache
        compiled = numba.njit(error_model="numpy")(loop)
    return compiled


def _drop_outdated(source: Path) -> None:
    """Delete numba's caches of an older source. Numba fails to read those that name classes that are gone."""
    for index in source.parent.glob(f"__pycache__/{source.stem}.*.nbi"):
        with contextlib.suppress(OSError):
            if index.stat().st_mtime < source.stat().st_mtime:
                index.unlink()


def for_loops(fields: Fields) -> Fields:
    """Return a copy whose sequences have the type that the loops take: arrays if compiled, otherwise lists."""
    columns = {name: v for name, v in fields._asdict().items() if isinstance(v, (list, tuple))}
    return fields._replace(**{name: numbers(v, seconds=name in _SECONDS) for name, v in columns.items()})


def numbers(values: Sequence[float], *, seconds: bool = False) -> Any:
    """Return numbers in the type that the loops take. ``seconds``: floats instead of integers."""
    if not _is_compiled:
        return list(values)
    return np.array(values, np.float64 if seconds else np.int64)
