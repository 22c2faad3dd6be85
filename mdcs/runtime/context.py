"""The context of a run: the few things that every part of it needs, the bytes that it holds, and what ran when."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from mdcs.plan.cost import StepTimes
from mdcs.plan.ledger import Ledger
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.plan.plan import Plan
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.executor import Executor, executor_for
from mdcs.telemetry.memory_meter import current_meter
from mdcs.telemetry.timeline import Interval, Lane, PeriodTrace, Span, intersection, length, step_times


class ByteAccount:
    """Live and peak bytes of this rank by the categories of the ledger. Call with ``lock`` (reentrant) held.

    Every allocation and release of a registered buffer is booked together with the real one, so the categories equal
    the allocator's to the byte. Admission counts promised bytes. ``outside``: of units that are whole outside the plan.
    """

    def __init__(self, at_rest: dict[str, int]) -> None:
        self.lock, self.at_rest, self.outside = threading.RLock(), at_rest, 0
        self.restart()
        self.reset()

    def restart(self) -> None:
        """Reset to the bytes at rest: no message, gather or gradient is held."""
        # "activations": of the current slot, workspace included
        self.live = dict.fromkeys(CATEGORIES, 0) | self.at_rest
        self._total = sum(self.at_rest.values())

    def reset(self) -> None:
        """Restart peaks and windows at the live bytes."""
        self.peak = self._now()
        self._window = self._now()

    def _now(self) -> dict[str, int]:
        return {**self.live, "total": self._total}

    def record(self, category: str, size: int) -> None:
        """Book allocated (positive) or freed (negative) bytes."""
        live = self.live[category] = self.live[category] + size
        total = self._total = self._total + size
        if size > 0:  # inlined: this runs several times per message
            for highest in (self.peak, self._window):
                if live > highest[category]:
                    highest[category] = live
                if total > highest["total"]:
                    highest["total"] = total

    def set_activations(self, activations: int) -> None:
        """Set the activations of the slot that compute enters (bytes besides the registered buffers)."""
        self.record("activations", activations - self.live["activations"])

    def take_window_peak(self) -> dict[str, int]:
        """Return the peaks by category since the last call."""
        out, self._window = self._window, self._now()
        return out


# ---- intervals of compute, messages and updates on one clock, and a record per step

_UNREAD = 128  # iterations kept for :meth:`StepRecorder.finished`: bounds the memory of a loop that never reads
_TRACED = 8  # periods kept for :meth:`StepRecorder.traces`

UNTIMED: Any = object()
"""Stands for a timestamp that nobody has asked for."""


@dataclass(frozen=True)
class StepRecord:
    """One iteration, from one ``step()`` to the next.

    - ``times``: seconds, without those of evaluations, checkpoints and :meth:`Session.pause`; only ``step_s`` in steps
      before somebody asked for records.
    - ``bytes``, ``messages``: wire bytes and number of messages, by kind, of the period that begins with its backward.
      :meth:`Session.drain` cuts the last period short: its gathers for the next forward are not included.
    - ``slots_over_budget``: slots whose measured peak exceeded the budget; ``over_budget``: by at most so many bytes.
    - ``departures``: what the step did otherwise than the plan, in words ("left out layers.3"), and how often, in
      ``departed_s`` seconds.
    - ``handover_s``: seconds of the change to this step's plan, before the step, if there was one.
    - ``grad_norm``: global norm of the gradient before it was clipped; None without clipping.
    """

    step: int
    times: StepTimes
    bytes: dict[str, int]
    messages: dict[str, int]
    over_budget: int = 0
    slots_over_budget: int = 0
    departures: dict[str, int] = field(default_factory=dict)
    departed_s: float = 0.0
    handover_s: float = 0.0
    grad_norm: float | None = None


class _Timed(NamedTuple):
    """An interval of message or slot ``number``, in the period that begins with the backward of step ``period``."""

    period: int
    number: int
    interval: Interval


@dataclass
class StepRecorder:
    """Collects stamps from the threads; converts them to seconds and :class:`StepRecord` when read.

    Computing, messages and updates are stamped from the first :meth:`finished` or :meth:`last_period` on: on CUDA that
    is four events for each message and two for each slot.
    """

    plan: Plan
    executor: Executor
    _raw: deque[tuple[int, Lane, int, Any, Any, int]] = field(default_factory=deque)
    _intervals: list[_Timed] = field(default_factory=list)
    _steps: deque[tuple[int, Any]] = field(default_factory=deque)  # each one's end, and the begin of the first
    _sent: dict[int, list[int]] = field(default_factory=dict)  # by period: messages
    _notes: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step: fields of its record
    _pauses: deque[tuple[int, Any, Any]] = field(default_factory=deque)  # (iteration, begin, end)
    # the last two: (iteration in which it began, stamp)
    _periods: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=2))
    _host_s: dict[int, float] = field(default_factory=dict)  # by period: seconds that the host took for its messages
    _under_way: int = 0  # number of the current iteration
    _timed_from: int | None = None  # first iteration with all stamps
    _has_untimed: bool = False

    def stamp(self) -> Any:
        """Return a timestamp of the current stream, :data:`UNTIMED` if nobody has asked for records."""
        if self._timed_from is None:
            self._has_untimed = True
            return UNTIMED
        return self.executor.record_timestamp()

    def begin_timing(self) -> None:
        """Take stamps from now on. What is in flight has none, and may last into the current iteration."""
        if self._timed_from is None:
            self._timed_from = self._under_way + self._has_untimed

    # Threads append to a deque without a lock: only indices and stamps. Names are looked up when somebody reads.

    def ran(self, lane: Lane, index: int, begin: Any, end: Any, period: int = 0) -> None:
        """Record that compute was in slot ``index`` from ``begin`` to ``end`` (stamps); that message ``index`` was on
        the wire, in period number ``period`` (0: the prologue); or that the updates that it completes ran.
        """
        if begin is not UNTIMED or lane == "message":
            self._raw.append((self._under_way, lane, index, begin, end, period))

    def enqueued(self, period: int, seconds: float) -> None:
        """Record that the host took so long to enqueue a message of a period."""
        self._host_s[period] = self._host_s.get(period, 0.0) + seconds

    def _interval(self, lane: Lane, index: int, begin: Any, end: Any) -> Interval:
        start, period = self.executor.seconds(begin), self.plan.period
        end = max(start, self.executor.seconds(end))
        if lane == "compute":
            slot = period.slots[index]
            unit = self.plan.profile.units[slot.unit].name
            return Interval("compute", period.name(index), slot.phase, unit, start, end)
        kind, units, wire = self.plan.labels[index]
        if lane == "message":
            return Interval("message", f"{kind}:{units}", kind, units, start, end, wire)
        return Interval("update", f"update:{units}", "update", units, start, end)

    def step(self, step: int, stamp: Any) -> None:
        """Record the end of the iteration ``step``."""
        self._steps.append((step, stamp))
        self._under_way = step + 1
        if len(self._steps) > _UNREAD:
            self._forget()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the block's seconds out of the iteration and of the period."""
        begin = self.executor.record_timestamp()
        try:
            yield
        finally:
            self._pauses.append((self._under_way, begin, self.executor.record_timestamp()))

    def _without_pauses(self, begin: float, end: float, upto: int) -> tuple[float, list[Interval]]:
        """Return a span's end, and its intervals, on a clock that stands still in pauses of iterations ``upto``."""
        inside = [each for *_, each in self._intervals if each.end > begin and each.start < end]
        seconds = self.executor.seconds
        pauses = [(seconds(a), seconds(b)) for iteration, a, b in self._pauses if iteration <= upto]
        if not (pauses := [*intersection(pauses, [(begin, end)])]):
            return end, inside

        def moved(time: float) -> float:
            return time - length([(a, min(b, time)) for a, b in pauses])

        return moved(end), [replace(i, start=moved(i.start), end=moved(i.end)) for i in inside]

    def note(self, step: int, **fields: Any) -> None:
        """Record fields of the step's record."""
        self._notes.setdefault(step, {}).update(fields)

    def period(self, stamp: Any) -> None:
        """Record the begin of a period of the plan."""
        if stamp is not UNTIMED:
            self._periods.append((self._under_way, stamp))

    def _forget(self) -> None:
        """Drop the oldest unread iteration. Its stamps are not converted, so that no step() stalls."""
        _, stamp = self._steps.popleft()
        self._notes.pop(self._steps[0][0], None)
        self.executor.seconds(stamp)  # moves the reference of CUDA's event times, which are exact only near it
        # On CUDA a message ends up to an iteration after the one that enqueued it.
        needed = self._steps[0][0] - 1
        for stamps in (self._raw, self._pauses):
            while stamps and stamps[0][0] < needed:
                stamps.popleft()

    def _trim(self) -> None:
        """Drop what neither an unread iteration nor one of the last periods needs."""
        newest = max((timed.period for timed in self._intervals), default=self._steps[0][0])
        oldest = min(self._steps[0][0], newest - _TRACED) - 1  # messages may end in the period after theirs
        self._intervals = [timed for timed in self._intervals if timed.period >= oldest]
        self._sent = {period: sent for period, sent in self._sent.items() if period >= oldest}
        self._host_s = {period: seconds for period, seconds in self._host_s.items() if period >= oldest}

    def _resolve(self, upto: int | None = None) -> None:
        """Convert stamps to intervals; not those after iteration ``upto`` that the device may not have reached."""
        later = []
        for _ in range(len(self._raw)):
            raw = iteration, lane, index, begin, end, period = self._raw.popleft()
            if upto is not None and iteration > upto and (lane == "compute" or self.executor.runs_ahead):
                later.append(raw)
                continue
            if lane == "message":
                self._sent.setdefault(period, []).append(index)
            if begin is not UNTIMED:
                if lane == "compute":
                    period = iteration - (index >= self.plan.period.turn)
                self._intervals.append(_Timed(period, index, self._interval(lane, index, begin, end)))
        self._raw.extendleft(reversed(later))

    def traces(self) -> dict[int, PeriodTrace]:
        """Return what ran when in the last periods, those with a pause left out, by the step whose backward begins the
        period. Steps count from the first :meth:`finished` that has returned them on.
        """
        length, n, out = self.plan.period.length, len(self.plan.messages), dict[int, PeriodTrace]()
        paused = {iteration for iteration, *_ in self._pauses}
        periods: dict[int, dict[tuple[str, int], Span]] = {}
        for period, index, each in self._intervals:
            periods.setdefault(period, {})[each.lane, index] = each.start, each.end
        for step, spans in periods.items():
            following = periods.get(step + 1, {}).get(("compute", 0))
            whole = {("compute", q) for q in range(length)} | {("message", i) for i in range(n)}
            if following is None or not whole <= spans.keys() or paused & {step, step + 1}:
                continue
            began = spans["compute", 0][0]
            at = {key: (start - began, end - began) for key, (start, end) in spans.items()}
            out[step] = PeriodTrace(
                following[0] - began, tuple(at["compute", q] for q in range(length)),
                tuple(at["message", i] for i in range(n)),
                tuple(at.get(("update", i), at["message", i])[1] for i in range(n)), self._host_s.get(step, 0.0),
            )  # fmt: skip
        return out

    def finished(self, upto: int, is_last: bool = False) -> list[StepRecord]:
        """Return records of the iterations up to step ``upto``, once each; where the host runs ahead, later for
        iterations whose end the device has not reached.
        """
        self.begin_timing()
        if self.executor.runs_ahead and not is_last:
            ends = [(step, end) for step, end in self._steps if step <= upto]
            ends += [(iteration, end) for iteration, *_, end, _ in self._raw if end is not UNTIMED]
            upto = min([upto, *(iteration - 1 for iteration, end in ends if not self.executor.query(end))])
        self._resolve(upto)
        out = []
        while len(self._steps) >= 2 and self._steps[1][0] <= upto:
            (_, first), (step, last) = self._steps[0], self._steps[1]
            begin, end = self.executor.seconds(first), self.executor.seconds(last)
            end, inside = self._without_pauses(begin, end, step)
            sent, count = Counter[str](), Counter[str]()
            for kind, _, wire in (self.plan.labels[index] for index in self._sent.pop(step, ())):
                sent[kind] += wire
                count[kind] += 1
            is_timed, notes = self._timed_from is not None and step >= self._timed_from, self._notes.pop(step, {})
            times = step_times(inside, begin, end) if is_timed else StepTimes.of(end - begin)
            if "grad_norm" in notes:
                notes["grad_norm"] = float(notes["grad_norm"])
            out.append(StepRecord(step, times, dict(sent), dict(count), **notes))
            self._steps.popleft()
        while self._pauses and self._pauses[0][0] < self._steps[0][0] - 1:
            self._pauses.popleft()
        self._trim()
        return out

    def last_period(self) -> tuple[float, float, list[Interval]]:
        """Return (begin, end, intervals) of the last whole period, on the rank's clock; zeros before there is one."""
        self.begin_timing()
        if len(self._periods) < 2:
            return 0.0, 0.0, []
        self._resolve()
        self._trim()
        (_, first), (_, last) = self._periods
        begin = self.executor.seconds(first)
        end, inside = self._without_pauses(begin, self.executor.seconds(last), self._under_way)
        return begin, end, [replace(i, start=max(i.start, begin), end=min(i.end, end)) for i in inside]


# ---- what every part has


_CPU = torch.device("cpu")


class RunContext:
    """Plan, bytes, device and records of a run, for all of its parts.

    - ``place``: this rank, and the step that errors name. ``device``: where parameters are.
    - ``timeout_s``: seconds after which waiting for other ranks is an error.
    - ``ledger``: the plan's bytes on this rank. ``account``: the bytes that are held.
    - ``executor``, ``meter``: of the device. ``recorder``: what ran when.
    """

    def __init__(self, plan: Plan, place: ErrorContext, device: torch.device = _CPU, timeout_s: float = 300.0) -> None:
        self.plan, self.place, self.rank, self.device, self.timeout_s = plan, place, place.rank, device, timeout_s
        self.ledger = Ledger(plan, place.rank)
        self.account = ByteAccount(self.ledger.at_rest)
        self.executor, self.meter = executor_for(device), current_meter(device)
        self.recorder = StepRecorder(plan, self.executor)
