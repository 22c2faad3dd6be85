"""Replay of a plan in virtual time: what the runtime would do, slot by slot and message by message.

Compute is serial, the link is FIFO with ``depth`` messages in flight (:mod:`mdcs.link`), what follows a message
(summing, unpacking, updating) is serial on the dispatcher. A message starts when its turn has come, its data is
ready and compute has arrived at its issue slot; messages and slots are admitted only when their bytes fit, and
admission never changes the order. Because compute is the only thing that issues messages, and it waits only for
messages issued before, every time follows from earlier ones: one pass, no event queue.

Periods are replayed from the prologue (iteration 1 starts at the first forward slot) until they repeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mdcs.ledger import Ledger, SlotLimits, most_in_flight
from mdcs.link import Kind
from mdcs.measure.timeline import Interval, Span, StepTimes, intersection_length, length
from mdcs.plan import CATEGORIES, Plan, PlanError, Prediction

_MAX_PERIODS = 12
_REPEATS = 1e-9  # of a period: two periods that differ by less are the same


@dataclass
class Replay:
    """Times in seconds from the start of the last replayed period (its first backward slot)."""

    period_s: float
    times: StepTimes
    intervals: list[Interval] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)  # by category, each at its own peak, and "total"
    curve: list[dict[str, int]] = field(default_factory=list)  # per slot, by category, and "total"

    def prediction(self) -> Prediction:
        """Raises ValueError for a replay without ``detail``, which knows no memory."""
        if not self.peak:
            raise ValueError("a prediction needs a replay with detail")
        t = self.times
        return Prediction(
            step_s=self.period_s,
            compute_s=t.compute_s,
            communication_s=t.communication_s,
            overlap_s=t.overlap_s,
            exposed_s=t.exposed_s,
            overlap_ratio=t.overlap_ratio,
            peak_bytes=self.peak["total"],
            memory=self.peak,
        )


def replay(plan: Plan, *, detail: bool = True, ledger: Ledger | None = None) -> Replay:
    """Replay until the period repeats. ``detail`` adds intervals and the memory of the last period.

    Raises PlanError, naming the slot, when admission under the plan's budget deadlocks.
    """
    ledger = ledger or Ledger(plan)
    costs = _Costs(plan)
    trace = _run(plan, ledger, costs)
    result = Replay(trace.ended - trace.began, _times(trace))
    if detail:
        result.intervals = _intervals(plan, trace)
        result.peak, result.curve = _memory(plan, ledger, trace)
    return result


@dataclass(frozen=True)
class Steady:
    """Times of the last replayed period, in seconds from its start.

    ``slots`` are (arrival, begin, end) of compute; ``bytes`` when the link begins and ends to carry the bytes of each
    message that is issued in the period, which may be after its end.
    """

    period_s: float
    slots: tuple[tuple[float, float, float], ...]
    bytes: tuple[Span, ...]


def steady_state(plan: Plan) -> Steady:
    """When slots and messages of the steady period happen. Raises PlanError as :func:`replay`."""
    costs = _Costs(plan)
    trace = _run(plan, Ledger(plan), costs)
    began, n, length = trace.began, len(plan.messages), trace.slots
    slots = zip(trace.arrivals[-length:], trace.begins[-length:], trace.ends[-length:], strict=True)
    finishes = [t - began for t in trace.finishes[len(trace.finishes) - n :]]
    return Steady(
        trace.ended - began,
        tuple((a - began, b - began, e - began) for a, b, e in slots),
        tuple((end - transfer, end) for end, transfer in zip(finishes, costs.transfer, strict=True)),
    )


class _Costs:
    """Seconds of every message of a plan, looked up once."""

    def __init__(self, plan: Plan) -> None:
        profile, opt = plan.profile, plan.profile.optimizer
        alpha = dict(zip(Kind, profile.link.alpha, strict=True))
        beta = dict(zip(Kind, profile.link.beta, strict=True))
        self.alpha = [alpha[m.kind] for m in plan.messages]
        self.transfer = [beta[m.kind] * plan.wire(m) for m in plan.messages]
        self.copy: list[float] = []
        self.update: list[float] = []
        summed = profile.collectives.reduce_scatter == "all_to_all"
        at_barrier, last_reduction = 0.0, -1
        for i, m in enumerate(plan.messages):
            passes = int(summed and m.kind is Kind.RS) + 2 * int(len(m.parts) > 1)
            self.copy.append(profile.copy_seconds_per_byte * plan.payload(m) * passes if passes else 0.0)
            seconds = 0.0
            if not m.kind.is_gather:
                share = 1 if m.kind is Kind.AR else plan.world
                seconds = plan.elements(m) / share * opt.seconds_per_element + len(m.parts) * opt.seconds_per_run
                at_barrier, last_reduction = at_barrier + seconds, i
            self.update.append(seconds if plan.cross_iteration else 0.0)
        if not plan.cross_iteration and last_reduction >= 0:
            self.update[last_reduction] = at_barrier


@dataclass
class _Trace:
    """When everything happened, in seconds since the prologue began.

    Messages are counted in FIFO order and slots in executed order, both from the prologue; the last ``slots``
    slots and the last ``messages`` messages are the last period.
    """

    slots: int
    messages: int
    starts: list[float] = field(default_factory=list)  # of messages
    finishes: list[float] = field(default_factory=list)  # off the link
    landed: list[float] = field(default_factory=list)  # summed or unpacked
    processed: list[float] = field(default_factory=list)  # and updated
    arrivals: list[float] = field(default_factory=list)  # of compute at slots
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    issued: list[int] = field(default_factory=list)  # messages by then
    _busy_from: int = 0  # no message before it is in flight any more

    @property
    def began(self) -> float:
        return self.arrivals[-self.slots]

    @property
    def ended(self) -> float:
        return self.ends[-1]

    def in_flight(self, since: int) -> list[float]:
        """Times, from the end of the last slot on, of what is not done by then of the messages from ``since`` on."""
        now, messages = self.ended, range(since, len(self.starts))
        return [
            times[g] - now for g in messages if self.processed[g] > now for times in (self.starts, self.finishes, self.processed)
        ]

    def slowed(self, now: float, work: float, slowdown: float) -> float:
        """When ``work`` seconds of computing are done: they take ``slowdown`` times as long beside a message."""
        while self._busy_from < len(self.finishes) and self.finishes[self._busy_from] <= now:
            self._busy_from += 1
        for g in range(self._busy_from, len(self.starts)):
            alone = max(0.0, self.starts[g] - now)
            if alone >= work:
                break
            now, work = now + alone, work - alone
            beside = max(0.0, self.finishes[g] - now)
            if work * slowdown <= beside:
                return now + work * slowdown
            now, work = now + beside, work - beside / slowdown
        return now + work


def _run(plan: Plan, ledger: Ledger, costs: _Costs) -> _Trace:
    n, period, depth = len(plan.messages), plan.period, plan.profile.link.depth
    alpha, transfer, copy, update, after = costs.alpha, costs.transfer, costs.copy, costs.update, plan.waits_for
    blocking = [m.blocking for m in plan.messages]
    seconds = [plan.profile.slots[s.place].seconds for s in period.slots]
    slowdown = 1 + plan.profile.interference
    limits = SlotLimits(plan)
    trace = _Trace(period.length, n)
    starts, finishes, landed, processed = trace.starts, trace.finishes, trace.landed, trace.processed
    admission = None if plan.budget is None else _Admission(plan, ledger, trace)
    now = last_start = last_finish = last_processed = 0.0
    before: list[float] | None = None  # what was in flight at the last turn
    repeats = False
    for p in range(_MAX_PERIODS):
        base = p * n
        issued = 0
        for q in range(period.turn if p == 0 else 0, period.length):
            trace.arrivals.append(now)
            for i in range(issued, limits.issued[q]):
                g = base + i
                if p == 0 and not plan.in_prologue(plan.messages[i]):
                    for times in (starts, finishes, landed, processed):
                        times.append(last_processed)
                    continue
                if admission is not None:
                    now = admission.message(now, q, i)
                begin = now if now > last_start else last_start
                if g >= depth and processed[g - depth] > begin:
                    begin = processed[g - depth]
                if p and after[i] >= 0 and processed[base + after[i]] > begin:
                    begin = processed[base + after[i]]
                last_start = begin
                last_finish = max(begin + alpha[i], last_finish) + transfer[i]
                landed.append(max(last_finish, last_processed) + copy[i])
                last_processed = landed[g] + update[i]
                starts.append(begin)
                finishes.append(last_finish)
                processed.append(last_processed)
                if blocking[i]:
                    now = last_processed
            issued = limits.issued[q]
            trace.issued.append(base + issued)
            done = base + limits.done[q] - 1
            if done >= 0 and processed[done] > now:
                now = processed[done]
            if admission is not None:
                now = admission.slot(now, q)
            trace.begins.append(now)
            now = now + seconds[q] if slowdown == 1 else trace.slowed(now, seconds[q], slowdown)
            trace.ends.append(now)
            if admission is not None:
                admission.leave(q)
            if q == period.turn - 1:
                in_flight = trace.in_flight(base)
                repeats = before is not None and _same(before, in_flight, _REPEATS * now / (p + 1))
                before = in_flight
        if repeats:
            break
    return trace


def _same(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


class _Admission:
    """The byte account: messages and slots start when their bytes fit beside all that is held."""

    def __init__(self, plan: Plan, ledger: Ledger, trace: _Trace) -> None:
        assert plan.budget is not None
        self._plan, self._ledger, self._trace = plan, ledger, trace
        self._cap = plan.budget - plan.reserve
        self._held = ledger.rest_bytes
        self._done = 0  # messages whose bytes have been freed
        self._n, self._depth = len(plan.messages), plan.profile.link.depth
        self._transient = [e.transient for e in ledger.messages]
        self._freed = [e.freed for e in ledger.messages]
        # Beside these bytes in flight anything fits: most questions are answered without looking closer.
        self._most = most_in_flight(self._transient * (1 + -(-self._depth // max(1, self._n))), self._depth)

    def message(self, now: float, q: int, i: int) -> float:
        """When message ``i`` of the period, issued at slot ``q``, is admitted."""
        held = self._ledger.messages[i].held
        now = self._wait(now, held + self._ledger.slots[q].live, q, (self._transient[i],))
        self._held += held
        return now

    def slot(self, now: float, q: int) -> float:
        """When slot ``q`` is admitted."""
        slot = self._ledger.slots[q]
        now = self._wait(now, slot.allocated + slot.peak, q, ())
        self._held += slot.allocated
        return now

    def leave(self, q: int) -> None:
        self._held -= self._ledger.slots[q].freed

    def _wait(self, now: float, more: int, q: int, upcoming: tuple[int, ...]) -> float:
        processed, n = self._trace.processed, self._n
        while True:
            while self._done < len(processed) and processed[self._done] <= now:
                if self._done >= n:  # the prologue only gathers, which frees nothing
                    self._held -= self._freed[self._done % n]
                self._done += 1
            if self._held + more + self._most <= self._cap:
                return now
            pending = [self._transient[g % n] for g in range(self._done, len(processed))]
            need = self._held + more + most_in_flight((*pending, *upcoming), self._depth)
            if need <= self._cap:
                return now
            if self._done == len(processed):
                name = self._plan.period.name(q)
                raise PlanError(f"deadlock at slot {q} ({name}): needs {need} of {self._cap} bytes")
            now = processed[self._done]


def _slots(trace: _Trace) -> list[Span]:
    """The slots of the last period, from its start."""
    began, last = trace.began, trace.slots
    return [(a - began, b - began) for a, b in zip(trace.begins[-last:], trace.ends[-last:], strict=True)]


def _seen(trace: _Trace, starts: list[float], ends: list[float]) -> dict[int, Span]:
    """What messages do in the last period, by their index: from its start, cut off at both its ends."""
    began, ended = trace.began, trace.ended
    out = {}
    # Messages of the period before may still be in flight; none is older.
    for g in range(max(0, len(starts) - 2 * trace.messages), len(starts)):
        if ends[g] > began and starts[g] < ended:
            out[g] = max(starts[g], began) - began, min(ends[g], ended) - began
    return out


def _times(trace: _Trace) -> StepTimes:
    """As :func:`mdcs.measure.timeline.step_times`, without making intervals."""
    compute, messages = _slots(trace), _seen(trace, trace.starts, trace.finishes).values()
    step_s, compute_s, communication_s = trace.ended - trace.began, length(compute), length(messages)
    overlap_s = intersection_length(compute, messages)
    return StepTimes(
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        overlap_s=overlap_s,
        exposed_s=max(0.0, step_s - compute_s),
        overlap_ratio=min(1.0, overlap_s / communication_s) if communication_s > 0 else 0.0,
    )


def _intervals(plan: Plan, trace: _Trace) -> list[Interval]:
    units = plan.profile.units
    out = [
        Interval("compute", plan.period.name(q), slot.phase, units[slot.unit].name, start, end)
        for q, (slot, (start, end)) in enumerate(zip(plan.period.slots, _slots(trace), strict=True))
    ]
    messages = _seen(trace, trace.starts, trace.finishes)
    updates = _seen(trace, trace.landed, trace.processed)
    for g in sorted({*messages, *updates}):
        m = plan.messages[g % trace.messages]
        names = "+".join(dict.fromkeys(units[u].name for u, _ in m.parts))
        if g in messages:
            out.append(Interval("message", f"{m.kind}:{names}", str(m.kind), names, *messages[g], plan.wire(m)))
        if g in updates and trace.landed[g] < trace.processed[g]:
            out.append(Interval("update", f"update:{names}", "update", names, *updates[g]))
    return out


_Event = tuple[float, int, str, int]  # time, order of causes at one time, category or mark, bytes or slot
_ARRIVE, _BEGIN, _END = "arrive", "begin", "end"  # marks of compute


def _memory(plan: Plan, ledger: Ledger, trace: _Trace) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Peak by category, and by slot and category, of the last period. A slot includes the wait before it."""
    live = dict.fromkeys(CATEGORIES, 0) | ledger.at_rest
    known, rest = ledger.rest_bytes, 0
    window: dict[str, int] | None = None
    curve: list[dict[str, int]] = []
    for _, _, what, size in sorted(_events(plan, ledger, trace)):
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
            if what in live:
                window[what] = max(window[what], live[what])
            window["activations"] = max(window["activations"], rest)
            window["total"] = max(window["total"], known + rest)
    curve = curve[-trace.slots :]
    return {key: max(window[key] for window in curve) for key in (*CATEGORIES, "total")}, curve


def _events(plan: Plan, ledger: Ledger, trace: _Trace) -> list[_Event]:
    """Every allocation and release of a registered buffer since the prologue, and what compute does."""
    out: list[_Event] = []

    def add(time: float, what: str, size: int) -> None:
        if size or what not in CATEGORIES:
            out.append((time, len(out), what, size))

    sent = 0
    compute = zip(trace.issued, trace.arrivals, trace.begins, trace.ends, strict=True)
    for k, (issued, arrival, begin, end) in enumerate(compute, plan.period.turn):
        q = k % trace.slots
        add(arrival, _ARRIVE, q)
        for g in range(sent, issued):
            i = g % trace.messages
            if g < trace.messages and not plan.in_prologue(plan.messages[i]):
                continue
            effect, start, landed, done = ledger.messages[i], trace.starts[g], trace.landed[g], trace.processed[g]
            for _, b in effect.full:
                add(start, "full_parameters", b)
            add(start, "staging", effect.staging)
            add(start, "gradient_shards", effect.shards)
            add(landed, "staging", -effect.staging)
            for _, b in effect.gradients_after_link:
                add(landed, "gradients", -b)
            add(landed, "update_scratch", effect.scratch)
            add(done, "update_scratch", -effect.scratch)
            add(done, "gradient_shards", -effect.shards_freed)
            for _, b in effect.gradients_after_update:
                add(done, "gradients", -b)
        sent = issued
        slot = ledger.slots[q]
        add(begin, _BEGIN, q)
        add(begin, "gradients", slot.allocated)
        add(end, _END, q)
        add(end, "full_parameters", -slot.freed)
    return out
