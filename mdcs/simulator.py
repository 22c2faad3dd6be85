"""Replay of a plan in virtual time: what the runtime would do, slot by slot and message by message.

Compute is serial, the link is FIFO with ``depth`` messages in flight (:mod:`mdcs.link`), what follows a message
(summing, unpacking, updating) is serial on the dispatcher. A message starts when its turn has come, its data is
ready and compute has arrived at its issue slot; messages and slots are admitted only when their bytes fit, and
admission never changes the order. Because compute is the only thing that issues messages, and it waits only for
messages issued before, every time follows from earlier ones: one pass, no event queue.

Periods are replayed from the prologue (iteration 1 starts at the first forward slot) until they repeat.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from mdcs.ledger import Ledger, MessageBytes, SlotLimits, most_in_flight
from mdcs.link import Kind
from mdcs.measure.timeline import Interval, Span, StepTimes
from mdcs.plan import CATEGORIES, Period, Plan, PlanError, Prediction
from mdcs.profile import Contention, Profile

_MAX_PERIODS = 12
_REPEATS = 1e-9  # of a period: two periods that differ by less are the same


class Replay:
    """What the replay of a plan gives. Planners replay thousands of plans: what is not asked for is not worked out.

    Times are in seconds from the start of the last replayed period (its first backward slot).
    """

    def __init__(self, plan: Plan, trace: _Trace, ledger: Ledger | None) -> None:
        self._plan, self._trace, self._ledger = plan, trace, ledger
        self.period_s = trace.ended - trace.began

    @cached_property
    def times(self) -> StepTimes:
        trace = self._trace
        return StepTimes.of(self.period_s, trace.compute(), trace.seen(trace.spans).values())

    @cached_property
    def intervals(self) -> list[Interval]:
        return _intervals(self._plan, self._trace)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category, each at its own peak, and of all together ("total")."""
        return {key: max([slot[key] for slot in self.curve]) for key in (*CATEGORIES, "total")}

    @cached_property
    def curve(self) -> list[dict[str, int]]:
        """The same for every slot. A slot includes the wait before it."""
        return _memory(self._plan, self._ledger or Ledger.of(self._plan), self._trace)

    def prediction(self) -> Prediction:
        t, peak = self.times, self.peak
        return Prediction(
            step_s=self.period_s,
            compute_s=t.compute_s,
            communication_s=t.communication_s,
            overlap_s=t.overlap_s,
            exposed_s=t.exposed_s,
            overlap_ratio=t.overlap_ratio,
            peak_bytes=peak["total"],
            memory=peak,
        )


def replay(plan: Plan, *, ledger: Ledger | None = None) -> Replay:
    """Replay until the period repeats; ``ledger`` is the plan's, if it is at hand.

    Raises PlanError, naming the slot, when admission under the plan's budget deadlocks.
    """
    if plan.budget is not None:
        ledger = ledger or Ledger.of(plan)
    return Replay(plan, _run(plan, ledger), ledger)


class Steady(NamedTuple):
    """Times of the last replayed period, in seconds from its start.

    ``slots`` are (arrival, begin, end) of compute; ``bytes`` when the link begins and ends to carry the bytes of each
    message that is issued in the period, which may be after its end.
    """

    period_s: float
    slots: tuple[tuple[float, float, float], ...]
    bytes: tuple[Span, ...]


def steady_state(plan: Plan) -> Steady:
    """When slots and messages of the steady period happen. Raises PlanError as :func:`replay`."""
    trace = replay(plan)._trace
    began, n, length = trace.began, trace.messages, trace.slots
    slots = zip(trace.arrivals[-length - 1 : -1], trace.begins[-length:], trace.arrivals[-length:], strict=True)
    finishes = [finish - began for _, finish in trace.spans[len(trace.spans) - n :]]
    return Steady(
        trace.ended - began,
        tuple((a - began, b - began, e - began) for a, b, e in slots),
        tuple((end - cost.transfer, end) for end, cost in zip(finishes, trace.course.costs, strict=True)),
    )


# ---- seconds


class _Cost(NamedTuple):
    """Seconds of a message: latency and bytes on the link, then summing and unpacking, then the update.

    ``idle`` is ``transfer`` while nothing computes, ``lost`` what computing loses when the message is done beside it.
    """

    alpha: float
    transfer: float
    copy: float
    update: float
    idle: float
    lost: float


_known: WeakKeyDictionary[Period, dict[tuple[Kind, int, int, bool], _Cost]] = WeakKeyDictionary()


def _costs(plan: Plan) -> list[_Cost]:
    """The seconds of every message, each worked out once for all plans of a profile."""
    known = _known.setdefault(plan.period, {})
    blocks, out = plan.blocks, []
    for m in plan.messages:
        elements = sum([blocks[u][b] for u, b in m.parts])
        key = m.kind, elements, len(m.parts), m.blocking
        cost = known.get(key)
        if cost is None:
            cost = known[key] = _cost(plan.profile, *key)
        out.append(cost)
    if not plan.cross_iteration:
        total = sum(cost.update for cost in out)
        last = max((i for i, m in enumerate(plan.messages) if not m.kind.is_gather), default=-1)
        updates = [total if i == last else 0.0 for i in range(len(out))]
        share = plan.profile.contention.compute_per_work
        out = [c._replace(update=u, lost=c.lost + share * (u - c.update)) for c, u in zip(out, updates, strict=True)]
    return out


def _cost(profile: Profile, kind: Kind, elements: int, parts: int, blocking: bool) -> _Cost:
    payload = elements * (profile.param_bytes if kind.is_gather else profile.grad_bytes)
    passes = int(profile.collectives.reduce_scatter == "all_to_all" and kind is Kind.RS) + 2 * int(parts > 1)
    update = 0.0
    if not kind.is_gather:
        share = 1 if kind is Kind.AR else profile.world
        update = elements / share * profile.optimizer.seconds_per_element + parts * profile.optimizer.seconds_per_run
    wire, contention = profile.wire(kind, payload), profile.contention
    idle = transfer = profile.link.beta_of(kind) * wire
    copy = profile.copy_seconds_per_byte * payload * passes if passes else 0.0
    lost = contention.compute_lost(wire, copy + update)
    if blocking:
        copy += contention.dispatch_seconds
    else:
        transfer = max(transfer, contention.message_seconds + contention.seconds_per_byte * wire)
    return _Cost(profile.link.alpha_of(kind), transfer, copy, update, idle, lost)


# ---- time


class _Trace:
    """When everything happened, in seconds since the prologue began.

    Messages are counted in FIFO order and slots in executed order, both from the prologue; the last ``slots``
    slots and the last ``messages`` messages are the last period.
    """

    def __init__(self, course: _Course) -> None:
        self.course, self.slots, self.messages = course, len(course.slots), len(course.costs)
        self.spans: list[Span] = []  # of messages on the link
        self.processed: list[float] = []  # when they are summed or unpacked, and updated
        self.arrivals: list[float] = []  # of compute at slots, and at last at the end
        self.begins: list[float] = []
        self._busy_from = 0  # no message before it is in flight any more
        self._paid = 0  # messages that have cost compute what they do

    @property
    def began(self) -> float:
        return self.arrivals[-self.slots - 1]

    @property
    def ended(self) -> float:
        return self.arrivals[-1]

    def in_flight(self, now: float, since: int) -> list[float]:
        """Times from now on of what is not done of the messages from ``since`` on."""
        return [
            time - now
            for span, done in zip(self.spans[since:], self.processed[since:], strict=True)
            if done > now
            for time in (*span, done)
        ]

    def slowed(self, now: float, work: float, slowdown: float) -> float:
        """When ``work`` seconds of computing are done: they take ``slowdown`` times as long beside a message."""
        spans = self.spans
        while self._busy_from < len(spans) and spans[self._busy_from][1] <= now:
            self._busy_from += 1
        for g in range(self._busy_from, len(spans)):
            start, finish = spans[g]
            alone = max(0.0, start - now)
            if alone >= work:
                break
            now, work = now + alone, work - alone
            beside = max(0.0, finish - now)
            if work * slowdown <= beside:
                return now + work * slowdown
            now, work = now + beside, work - beside / slowdown
        return now + work

    def hurried(self, now: float, awaited: int, depth: int) -> None:
        """Compute waits from ``now`` on for the message ``awaited``: until that is done, none is slowed down."""
        spans, processed = self.spans, self.processed
        first = bisect_right(spans, now, key=itemgetter(1))
        before = processed[first:]
        last_finish, done = (spans[first - 1][1], processed[first - 1]) if first else (0.0, 0.0)
        for g in range(first, len(spans)):
            cost, (start, finish) = self.course.costs[g % self.messages], spans[g]
            transfer = cost.transfer
            if g <= awaited and transfer > 0:
                served = max(0.0, now - (finish - transfer))
                transfer = served + (1 - served / transfer) * cost.idle
            if g - depth >= first and start > now:
                start = max(now, start - (before[g - depth - first] - processed[g - depth]))
            last_finish = max(start + cost.alpha, last_finish) + transfer
            done = processed[g] = max(last_finish, done) + cost.copy + cost.update
            spans[g] = start, last_finish

    def delayed(self, begin: float, end: float) -> float:
        """When a slot ends that would end at ``end`` but for the messages which are done by then."""
        while self._paid < len(self.processed) and self.processed[self._paid] <= end:
            if self.processed[self._paid] > begin:  # else compute was waiting
                end += self.course.costs[self._paid % self.messages].lost
            self._paid += 1
        return end

    def compute(self) -> list[Span]:
        """The slots of the last period, from its start."""
        began, last = self.began, self.slots
        return [(a - began, b - began) for a, b in zip(self.begins[-last:], self.arrivals[-last:], strict=True)]

    def seen(self, spans: list[Span]) -> dict[int, Span]:
        """What messages do in the last period, by their index: from its start, cut off at both its ends."""
        began, ended = self.began, self.ended
        oldest = max(0, len(spans) - 2 * self.messages)  # those of the period before may still be in flight
        return {
            g: ((start if start > began else began) - began, (end if end < ended else ended) - began)
            for g, (start, end) in enumerate(spans[oldest:], oldest)
            if end > began and start < ended
        }


class _Course:
    """What compute and the link do in a period: all that a replay needs of a plan.

    ``slots`` has, per slot, its index, the messages issued there, the last message that must be done (-1: the last of
    the period before) and the seconds of compute. A message is (index, blocking, the message it waits for, whether it
    is in the prologue, its seconds). The prologue begins at the turn, with all that is issued by then.
    """

    def __init__(self, plan: Plan) -> None:
        self.limits, self.costs = SlotLimits(plan), _costs(plan)
        issued, period = self.limits.issued, plan.period
        messages = [
            (i, m.blocking, after, plan.in_prologue(m), *cost[:4])
            for i, (m, after, cost) in enumerate(zip(plan.messages, plan.waits_for, self.costs, strict=True))
        ]
        spans = zip([0, *issued], issued, self.limits.done, period.seconds, strict=False)
        self.slots = [(q, messages[first:last], done - 1, work) for q, (first, last, done, work) in enumerate(spans)]
        q, _, done, work = self.slots[period.turn]
        self.prologue = [(q, messages[: issued[q]], done, work), *self.slots[q + 1 :]]

    @classmethod
    def of(cls, plan: Plan) -> _Course:
        """Plans are immutable, and some are replayed again."""
        course: _Course = vars(plan).get("_course") or cls(plan)
        vars(plan)["_course"] = course
        return course


def _run(plan: Plan, ledger: Ledger | None) -> _Trace:
    # Called thousands of times: names are local, and one loop does it all.
    turn, depth, slowdown = plan.period.turn, plan.profile.link.depth, 1 + plan.profile.interference
    contended = plan.profile.contention != Contention()
    course = _Course.of(plan)
    trace = _Trace(course)
    spans, processed, arrivals, begins = trace.spans, trace.processed, trace.arrivals, trace.begins
    admission = None if plan.budget is None or ledger is None else _Admission(plan, ledger, trace)
    now = last_start = last_finish = last_processed = 0.0
    before: list[float] | None = None  # what was in flight at the last turn
    repeats = False
    sent = base = 0  # messages: so far, before this period
    for p in range(_MAX_PERIODS):
        for q, ahead, done, work in course.slots if p else course.prologue:
            arrivals.append(now)
            for i, blocking, after, in_prologue, alpha, transfer, copy, update in ahead:
                if not (p or in_prologue):
                    spans.append((last_processed, last_processed))
                    processed.append(last_processed)
                    sent += 1
                    continue
                if admission is not None:
                    now = admission.message(now, q, i)
                if now > last_start:
                    last_start = now
                if sent >= depth and processed[sent - depth] > last_start:
                    last_start = processed[sent - depth]
                if after >= 0 and p and processed[base + after] > last_start:
                    last_start = processed[base + after]
                started = last_start + alpha
                last_finish = (started if started > last_finish else last_finish) + transfer
                landed = (last_finish if last_finish > last_processed else last_processed) + copy
                last_processed = landed + update
                spans.append((last_start, last_finish))
                processed.append(last_processed)
                sent += 1
                if blocking:
                    now = last_processed
            if base + done >= 0 and processed[base + done] > now:
                if contended and p:
                    trace.hurried(now, base + done, depth)
                    (last_start, last_finish), last_processed = spans[-1], processed[-1]
                now = processed[base + done]
            if admission is not None:
                now = admission.slot(now, q)
            begins.append(now)
            now = now + work if slowdown == 1 else trace.slowed(now, work, slowdown)
            if contended:
                now = trace.delayed(begins[-1], now)
            if admission is not None:
                admission.leave(q)
            if q == turn - 1:
                in_flight = trace.in_flight(now, base)
                repeats = before is not None and _same(before, in_flight, _REPEATS * now / (p + 1))
                before = in_flight
        if repeats:
            break
        base = sent
    arrivals.append(now)
    return trace


def _same(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


# ---- memory


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


# ---- the last period, in detail


def _intervals(plan: Plan, trace: _Trace) -> list[Interval]:
    units, first = plan.profile.units, len(trace.spans) - 2 * trace.messages
    out = [
        Interval("compute", plan.period.name(q), slot.phase, units[slot.unit].name, start, end)
        for q, (slot, (start, end)) in enumerate(zip(plan.period.slots, trace.compute(), strict=True))
    ]
    landed = _landed(trace, first)
    messages = trace.seen(trace.spans)
    updates = trace.seen([*trace.spans[:first], *zip(landed, trace.processed[first:], strict=True)])
    for g in sorted({*messages, *updates}):
        m = plan.messages[g % trace.messages]
        names = "+".join(dict.fromkeys(units[u].name for u, _ in m.parts))
        if g in messages:
            out.append(Interval("message", f"{m.kind}:{names}", str(m.kind), names, *messages[g], plan.wire(m)))
        if g in updates and landed[g - first] < trace.processed[g]:
            out.append(Interval("update", f"update:{names}", "update", names, *updates[g]))
    return out


def _landed(trace: _Trace, since: int) -> list[float]:
    """When messages from ``since`` on are summed or unpacked; their updates follow."""
    copies = [cost.copy for cost in trace.course.costs]
    out, before = [], trace.processed[since - 1] if since else 0.0
    for g, ((_, finish), done) in enumerate(zip(trace.spans[since:], trace.processed[since:], strict=True), since):
        out.append(max(finish, before) + copies[g % trace.messages])
        before = done
    return out


_Event = tuple[float, str, int]
"""Time, category or mark, bytes or slot. Those of one time keep the order of their causes."""

_ARRIVE, _BEGIN, _END = "arrive", "begin", "end"  # marks of compute


def _memory(plan: Plan, ledger: Ledger, trace: _Trace) -> list[dict[str, int]]:
    """By slot of the last period and category, each at its own peak, and "total". A slot includes the wait before it."""
    live, events = _events(plan, ledger, trace)
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


def _events(plan: Plan, ledger: Ledger, trace: _Trace) -> tuple[dict[str, int], list[_Event]]:
    """What registered buffers hold when the last period begins, and every allocation and release from then on."""
    live = dict.fromkeys(CATEGORIES, 0) | ledger.at_rest
    n, turn, began = trace.messages, plan.period.turn, trace.began
    # Every later period frees as much as it allocates.
    live["full_parameters"] += sum(
        size
        for m, e in zip(plan.messages, ledger.messages, strict=True)
        if plan.in_prologue(m)
        for _, size in e.full
    )
    live["full_parameters"] -= sum(slot.freed for slot in ledger.slots[turn:])
    live["gradients"] += sum(slot.allocated for slot in ledger.slots[turn:])
    out: list[_Event] = []
    first = len(trace.spans) - 2 * n
    times = zip(trace.spans[first:], _landed(trace, first), trace.processed[first:], strict=True)
    messages = [(start, landed, done) for (start, _), landed, done in times]
    for e, (start, landed, done) in zip(ledger.messages, messages[:n], strict=True):
        if done <= began:
            continue
        for event in _effects(e, start, landed, done):
            if event[0] > began:  # else it is among what is held already
                live[event[1]] -= event[2]
                out.append(event)
    arrivals, begins = trace.arrivals[-trace.slots - 1 :], trace.begins[-trace.slots :]
    issued, sent = trace.course.limits.issued, 0
    for q, (arrival, begin, end, slot) in enumerate(zip(arrivals[:-1], begins, arrivals[1:], ledger.slots, strict=True)):
        out.append((arrival, _ARRIVE, q))
        for i in range(sent, issued[q]):
            out += _effects(ledger.messages[i], *messages[n + i])
        sent = issued[q]
        out.append((begin, _BEGIN, q))
        if slot.allocated:
            out.append((begin, "gradients", slot.allocated))
        out.append((end, _END, q))
        if slot.freed:
            out.append((end, "full_parameters", -slot.freed))
    return live, out


def _effects(e: MessageBytes, start: float, landed: float, done: float) -> list[_Event]:
    """What a message allocates and frees."""
    events = [(start, what, size) for what, size in e.at_start]
    if e.when_landed:
        events += [(landed, what, size) for what, size in e.when_landed]
    if e.when_done:
        events += [(done, what, size) for what, size in e.when_done]
    return events
