"""Records of a run: intervals of compute, messages and updates on one clock, and a record per step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from mdcs.plan.plan import Plan
from mdcs.plan.times import StepTimes
from mdcs.runtime.executor import Executor
from mdcs.telemetry.timeline import Interval, PeriodTrace, Span, intersection, length, step_times

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
    - ``over_budget``: most bytes by which a slot's measured peak exceeded the budget; 0 if none did, or nothing is
      measured.
    - ``slots_over_budget``: number of slots that exceeded it.
    - ``departures``: what the step did otherwise than the plan, in words ("left out layers.3"), and how often;
      ``departed_s``: the seconds that this took.
    - ``grad_norm``: global norm of the gradient before it was clipped; None without clipping.
    """

    step: int
    times: StepTimes
    bytes: dict[str, int]
    messages: dict[str, int]
    peak: dict[str, int] | None = None
    over_budget: int = 0
    slots_over_budget: int = 0
    departures: dict[str, int] = field(default_factory=dict)
    departed_s: float = 0.0
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
    ``departing``: number of steps so far that did something otherwise than the plan.
    """

    plan: Plan
    executor: Executor
    departing: int = 0
    _raw: deque[tuple[int, str, int, Any, Any, int]] = field(default_factory=deque)
    _intervals: list[_Timed] = field(default_factory=list)
    # the end of each iteration, and the begin of the first
    _steps: deque[tuple[int, Any]] = field(default_factory=deque)
    _sent: dict[int, list[int]] = field(default_factory=dict)  # by period: messages
    _notes: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step: fields of its record
    _pauses: deque[tuple[int, Any, Any]] = field(default_factory=deque)  # (iteration, begin, end)
    _periods: list[tuple[int, Any]] = field(default_factory=list)  # (iteration in which it began, stamp)
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

    def compute(self, slot: int, begin: Any, end: Any) -> None:
        """Record that compute was in a slot of the period from ``begin`` to ``end`` (stamps)."""
        if begin is not UNTIMED:
            self._raw.append((self._under_way, "compute", slot, begin, end, 0))

    def message(self, index: int, period: int, begin: Any, end: Any) -> None:
        """Record that message ``index`` of the plan was on the wire, in period number ``period`` (0: the prologue)."""
        self._raw.append((self._under_way, "message", index, begin, end, period))

    def update(self, index: int, period: int, begin: Any, end: Any) -> None:
        """Record that the updates completed by message ``index`` of a period ran from ``begin`` to ``end``."""
        if begin is not UNTIMED:
            self._raw.append((self._under_way, "update", index, begin, end, period))

    def enqueued(self, period: int, seconds: float) -> None:
        """Record that the host took so long to enqueue a message of a period."""
        self._host_s[period] = self._host_s.get(period, 0.0) + seconds

    @cached_property
    def _messages(self) -> list[tuple[str, str, int]]:
        """(kind, units, wire bytes) of the plan's messages."""
        names = [unit.name for unit in self.plan.profile.units]
        return [
            (str(m.kind), "+".join(dict.fromkeys(names[u] for u, _ in m.parts)), self.plan.wire(m))
            for m in self.plan.messages
        ]

    def _interval(self, lane: str, index: int, begin: Any, end: Any) -> Interval:
        a, b = self.executor.seconds(begin), self.executor.seconds(end)
        b = max(a, b)
        if lane == "compute":
            s = self.plan.period.slots[index]
            unit = self.plan.profile.units[s.unit].name
            return Interval("compute", self.plan.period.name(index), s.phase, unit, a, b, 0)
        kind, units, wire = self._messages[index]
        if lane == "message":
            return Interval("message", f"{kind}:{units}", kind, units, a, b, wire)
        return Interval("update", f"update:{units}", "update", units, a, b, 0)

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
        """Return the end of a span from ``begin``, and its intervals, on a clock that stands still in pauses.

        ``upto``: last iteration whose pauses the span may have.
        """
        inside = [each for *_, each in self._intervals if each.end > begin and each.start < end]
        seconds = self.executor.seconds
        pauses = [(seconds(a), seconds(b)) for iteration, a, b in self._pauses if iteration <= upto]
        if not (pauses := [*intersection(pauses, [(begin, end)])]):
            return end, inside

        def moved(time: float) -> float:
            return time - length([(a, min(b, time)) for a, b in pauses])

        return moved(end), [replace(i, start=moved(i.start), end=moved(i.end)) for i in inside]

    def over_budget(self, step: int, slots: int, size: int) -> None:
        """Record that ``slots`` slots of the iteration exceeded the budget, by at most ``size`` bytes."""
        if slots:
            self._note(step, slots_over_budget=slots, over_budget=size)

    def departures(self, step: int, counts: dict[str, int], seconds: float) -> None:
        """Record what the iteration did otherwise than the plan."""
        if counts:
            self._note(step, departures=counts, departed_s=seconds)
            self.departing += 1

    def norm(self, step: int, norm: Tensor) -> None:
        """Record the gradient's norm [scalar] of a step: copied to the host behind what is enqueued now, and read with
        the record."""
        self._note(step, grad_norm=norm.to("cpu", non_blocking=True))

    def _note(self, step: int, **fields: Any) -> None:
        self._notes.setdefault(step, {}).update(fields)

    def period(self, stamp: Any) -> None:
        """Record the begin of a period of the plan."""
        if stamp is UNTIMED:
            return
        self._periods.append((self._under_way, stamp))
        del self._periods[:-3]

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
        newest = max((timed.period for timed in self._intervals), default=0) - _TRACED
        if len(self._periods) == 3:
            (_, begun), (oldest, ended) = self._periods[0], self._steps[0]
            keep_from = min(self.executor.seconds(begun), self.executor.seconds(ended))
            self._intervals = [i for i in self._intervals if i.interval.end > keep_from or i.period > newest]
            for old in [k for k in self._sent if k <= oldest]:  # of iterations that were never read
                del self._sent[old]
        for old in [k for k in self._host_s if k <= newest]:
            del self._host_s[old]

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
        """Return what ran when in the last periods, by the step whose backward begins the period.

        Steps count from the first :meth:`finished` that has returned them on. Periods with a pause are left out.
        """
        length, n, out = self.plan.period.length, len(self.plan.messages), dict[int, PeriodTrace]()
        paused = {iteration for iteration, *_ in self._pauses}
        periods: dict[int, dict[tuple[str, int], Span]] = {}
        for period, index, each in self._intervals:
            periods.setdefault(period, {})[each.lane, index] = each.start, each.end
        for step, spans in periods.items():
            following = periods.get(step + 1, {}).get(("compute", 0))
            slots = [spans.get(("compute", q)) for q in range(length)]
            messages = [spans.get(("message", i)) for i in range(n)]
            if following is None or None in slots or None in messages or paused & {step, step + 1}:
                continue
            began = spans["compute", 0][0]

            def since(found: list[Span | None], began: float = began) -> tuple[Span, ...]:
                return tuple((each[0] - began, each[1] - began) for each in found if each is not None)

            done = tuple(
                spans.get(("update", i), sent)[1] - began for i, sent in enumerate(messages) if sent is not None
            )
            host_s = self._host_s.get(step, 0.0)
            out[step] = PeriodTrace(following[0] - began, since(slots), since(messages), done, host_s)
        return out

    def finished(self, upto: int, is_last: bool = False) -> list[StepRecord]:
        """Return records of the iterations up to step ``upto``; each is returned once.

        Where the host runs ahead, iterations whose end the device has not reached are returned later.
        """
        self.begin_timing()
        if self.executor.runs_ahead and not is_last:
            ends = [(step, end) for step, end in self._steps if step <= upto]
            ends += [(iteration, end) for iteration, *_, end, _ in self._raw if end is not UNTIMED]
            under_way = [iteration for iteration, end in ends if not self.executor.query(end)]
            upto = min(upto, min(under_way, default=upto + 1) - 1)
        self._resolve(upto)
        out = []
        while len(self._steps) >= 2 and self._steps[1][0] <= upto:
            (_, first), (step, last) = self._steps[0], self._steps[1]
            begin, end = self.executor.seconds(first), self.executor.seconds(last)
            end, inside = self._without_pauses(begin, end, step)
            sent, count = Counter[str](), Counter[str]()
            for kind, _, wire in (self._messages[index] for index in self._sent.pop(step, ())):
                sent[kind] += wire
                count[kind] += 1
            is_timed, notes = self._timed_from is not None and step >= self._timed_from, self._notes.pop(step, {})
            times = step_times(inside, begin, end) if is_timed else StepTimes(end - begin)
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
        (_, first), (_, last) = self._periods[-2:]
        begin = self.executor.seconds(first)
        end, inside = self._without_pauses(begin, self.executor.seconds(last), self._under_way)
        return begin, end, [replace(i, start=max(i.start, begin), end=min(i.end, end)) for i in inside]
