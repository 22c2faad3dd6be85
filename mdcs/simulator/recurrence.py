"""The recurrence that a replay follows: every time of compute and of the link, from earlier ones, in one pass.

What it computes is told in :mod:`mdcs.simulator.simulate`.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from operator import itemgetter

from mdcs.measure.timeline import Span
from mdcs.plan.ledger import Ledger, SlotLimits, most_in_flight
from mdcs.plan.messages import Plan
from mdcs.plan.validity import PlanError
from mdcs.profile.contents import Contention

MAX_PERIODS = 12
"""For so many a plan is replayed; one that has not repeated by then is said not to have settled."""
_NOTHING = Contention()
_REPEATS = 1e-9  # of a period: two periods that differ by less are the same


class Trace:
    """When everything happened, in seconds since the prologue began.

    Messages are counted in FIFO order and slots in executed order, both from the prologue; the last ``slots``
    slots and the last ``messages`` messages are the last period.
    """

    def __init__(self, course: Course) -> None:
        self.course, self.slots, self.messages = course, len(course.slots), len(course.costs)
        self.spans: list[Span] = []  # of messages on the link
        self.processed: list[float] = []  # when they are summed or unpacked, and updated
        self.arrivals: list[float] = []  # of compute at slots, and at last at the end
        self.begins: list[float] = []
        self._busy_from = 0  # no message before it is in flight any more
        self._paid = 0  # messages that have cost compute what they do
        self.settled = False  # the last period was as the one before

    @property
    def began(self) -> float:
        """When the last period begins."""
        return self.arrivals[-self.slots - 1]

    @property
    def ended(self) -> float:
        """When the last period ends."""
        return self.arrivals[-1]

    def in_flight(self, now: float, since: int) -> list[float]:
        """Seconds from now of what is not done of the messages from ``since`` on."""
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
        """Compute waits from ``now`` on for the message ``awaited``: until that is done, none is slowed down.

        All that is known of has been issued by now: what has not started waits for others that are done sooner.
        """
        spans, processed = self.spans, self.processed
        first = bisect_right(spans, now, key=itemgetter(1))
        (last_start, last_finish), done = (spans[first - 1], processed[first - 1]) if first else ((-inf, -inf), 0.0)
        for g in range(first, len(spans)):
            i = g % self.messages
            cost, (start, finish) = self.course.costs[i], spans[g]
            transfer = cost.transfer
            if g <= awaited and transfer > 0:
                served = max(0.0, now - (finish - transfer))
                transfer = served + (1 - served / transfer) * cost.idle
            if start > now:
                start = max(now, last_start, processed[g - depth] if g >= depth else -inf)
                after = self.course.waits_for[i]
                if after >= 0:
                    start = max(start, processed[g - i + after])
            last_start, last_finish = start, max(start + cost.alpha, last_finish + cost.gap) + transfer
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


class Course:
    """What compute and the link do in a period: all that a replay needs of a plan.

    ``slots`` has, per slot, its index, the messages issued there, the last message that must be done (-1: the last of
    the period before) and the seconds of compute. A message is (index, the part of the slot before after which it leaves if its
    bytes fit, blocking, the message it waits for, whether it is in the prologue, its seconds). The prologue begins at the turn,
    with all that is issued by then.
    """

    def __init__(self, plan: Plan) -> None:
        self.limits, self.costs, self.waits_for = SlotLimits(plan), plan.job.cost.messages(plan), plan.waits_for
        issued, period = self.limits.issued, plan.period
        messages = [
            (i, part, m.blocking, after, plan.in_prologue(m), *cost[:5])
            for i, (m, part, after, cost) in enumerate(zip(plan.messages, plan.early, self.waits_for, self.costs, strict=True))
        ]
        spans = zip([0, *issued], issued, self.limits.done, period.seconds, strict=False)
        self.slots = [(q, messages[first:last], done - 1, work) for q, (first, last, done, work) in enumerate(spans)]
        q, _, done, work = self.slots[period.turn]
        self.prologue = [(q, messages[: issued[q]], done, work), *self.slots[q + 1 :]]


def run(plan: Plan, course: Course, ledger: Ledger | None) -> Trace:
    """Follow the course of a plan until its period repeats, admitting by the ledger if there is one and a budget.

    Raises PlanError for a deadlock.
    """
    # Called thousands of times: names are local, and one loop does it all.
    turn, depth, slowdown = plan.period.turn, plan.profile.link.depth, 1 + plan.profile.interference
    contention = plan.profile.contention
    contended, dispatch, per_wait = contention != _NOTHING, contention.dispatch_seconds, contention.compute_per_wait
    between = contention.turn_seconds
    trace = Trace(course)
    spans, processed, arrivals, begins = trace.spans, trace.processed, trace.arrivals, trace.begins
    admission = None if plan.budget is None or ledger is None else _Admission(plan, ledger, trace)
    now = last_start = last_processed = 0.0
    last_finish = -inf
    before: list[float] | None = None  # what was in flight at the last turn
    repeats = False
    sent = base = 0  # messages: so far, before this period
    slot, computing = -1, 0.0  # the slot that compute is in, and its seconds

    def computed(seconds: float) -> float:
        """When so much of the slot is over."""
        return begins[-1] + seconds if slowdown == 1 else trace.slowed(begins[-1], seconds, slowdown)

    def left() -> float:
        """When all of it is."""
        over = trace.delayed(begins[-1], computed(computing)) if contended else computed(computing)
        if admission is not None:
            admission.leave(slot)
        arrivals.append(over)
        return over

    for p in range(MAX_PERIODS):
        for q, ahead, done, work in course.slots if p else course.prologue:
            inside = slot >= 0  # compute is in the slot before
            if not inside:
                arrivals.append(now)
            for i, part, blocking, after, in_prologue, alpha, gap, transfer, copy, update in ahead:
                if not (p or in_prologue):
                    spans.append((last_processed, last_processed))
                    processed.append(last_processed)
                    sent += 1
                    continue
                if inside:
                    if part < 1:
                        now = computed(part * computing)
                        inside = admission is None or admission.early(now, slot, i)
                    else:
                        inside = False
                    if not inside:
                        now = left()
                if admission is not None and not inside:
                    now = admission.message(now, q, i)
                if now > last_start:
                    last_start = now
                if sent >= depth and processed[sent - depth] > last_start:
                    last_start = processed[sent - depth]
                if after >= 0 and p and processed[base + after] > last_start:
                    last_start = processed[base + after]
                started = last_start + alpha
                free = last_finish + gap
                last_finish = (started if started > free else free) + transfer
                landed = (last_finish if last_finish > last_processed else last_processed) + copy
                last_processed = landed + update
                spans.append((last_start, last_finish))
                processed.append(last_processed)
                sent += 1
                if blocking:
                    now = last_processed + dispatch
            if inside:
                now = left()
            if q == turn and p:
                in_flight = trace.in_flight(arrivals[-1], base)
                repeats = before is not None and _same(before, in_flight, _REPEATS * arrivals[-1] / (p + 1))
                before = in_flight
                now += between
            if base + done >= 0 and processed[base + done] > now:
                if contended and p:
                    trace.hurried(now, base + done, depth)
                    (last_start, last_finish), last_processed = spans[-1], processed[-1]
                now = processed[base + done] + dispatch
            if admission is not None:
                now = admission.slot(now, q)
            begins.append(now)
            slot, computing = q, work + per_wait * (now - arrivals[-1]) if per_wait else work
        if repeats:
            break
        base = sent
    left()
    trace.settled = repeats
    return trace


def _same(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


# ---- memory


class _Admission:
    """The byte account: messages and slots start when their bytes fit beside all that is held."""

    def __init__(self, plan: Plan, ledger: Ledger, trace: Trace) -> None:
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

    def early(self, now: float, q: int, i: int) -> bool:
        """Whether message ``i`` is admitted while compute is in slot ``q``: it does not wait for that."""
        held = self._ledger.messages[i].held
        self._look(now)
        if self._held + held + self._ledger.slots[q].peak + self._in_flight((self._transient[i],)) > self._cap:
            return False
        self._held += held
        return True

    def slot(self, now: float, q: int) -> float:
        """When slot ``q`` is admitted."""
        slot = self._ledger.slots[q]
        now = self._wait(now, slot.allocated + slot.peak, q, ())
        self._held += slot.allocated
        return now

    def leave(self, q: int) -> None:
        self._held -= self._ledger.slots[q].freed

    def _look(self, now: float) -> None:
        """Which messages are done by now, and what they free."""
        processed, n = self._trace.processed, self._n
        while self._done < len(processed) and processed[self._done] <= now:
            if self._done >= n:  # the prologue only gathers, which frees nothing
                self._held -= self._freed[self._done % n]
            self._done += 1

    def _in_flight(self, upcoming: tuple[int, ...]) -> int:
        pending = [self._transient[g % self._n] for g in range(self._done, len(self._trace.processed))]
        return most_in_flight((*pending, *upcoming), self._depth)

    def _wait(self, now: float, more: int, q: int, upcoming: tuple[int, ...]) -> float:
        processed = self._trace.processed
        while True:
            self._look(now)
            if self._held + more + self._most <= self._cap:
                return now
            need = self._held + more + self._in_flight(upcoming)
            if need <= self._cap:
                return now
            if self._done == len(processed):
                name = self._plan.period.name(q)
                raise PlanError(f"deadlock at slot {q} ({name}): needs {need} of {self._cap} bytes")
            now = processed[self._done]
