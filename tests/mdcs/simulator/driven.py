"""A slow replay: the runtime's :class:`MessageQueue`, driven by a clock. The simulator must give the same times.

Nothing here is computed ahead: compute asks the queue whether it may go on, and messages end one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count

from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import MessageSeconds
from mdcs.runtime.wire import queue_for


class DrivenReplay:
    """Times of ``periods`` periods after the prologue, of a profile without interference and lost compute.

    ``arrivals``: when compute arrives at each slot. ``starts``, ``ends``, ``dones``: by message, without skipped ones.
    """

    def __init__(self, plan: Plan, periods: int) -> None:
        self.plan, self.limits, self.ledger = plan, plan.schedule, Ledger(plan)
        self.costs = [MessageSeconds(*each) for each in zip(*plan.seconds, strict=True)]
        self.queue, self.execution = queue_for(plan, self.ledger, plan.profile.execution), plan.profile.execution
        self.now, self.link_end, self.unpacked, self.updated = 0.0, float("-inf"), 0.0, 0.0
        self.arrivals: list[float] = []
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.dones: dict[int, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        for wake in self._compute(periods):
            if isinstance(wake, float):
                self._run_until(wake)
            else:
                while not wake():
                    assert self._events, "compute waits for ever"
                    self._run_until(self._events[0][0])
            self._start_messages()

    def _run_until(self, time: float) -> None:
        """Let the link go on until ``time``, all that happens then included."""
        while self._events and self._events[0][0] <= time:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            self._start_messages()
        self.now = time

    def _start_messages(self) -> None:
        while (index := self.queue.next_start()) is not None:
            self.queue.start()
            cost = self.costs[index % self.queue.n]
            self.starts[index] = self.now
            skew = min(self.plan.profile.contention.skew_seconds, max(0.0, self.now - self.link_end))
            begin = max(self.now + skew + cost.alpha, self.link_end + cost.gap)
            self.ends[index] = self.link_end = begin + cost.transfer
            self.unpacked = max(self.link_end, self.unpacked if self.queue.has_own_updates else self.updated) + cost.copy
            self.dones[index] = self.updated = max(self.unpacked, self.updated) + cost.update
            heapq.heappush(self._events, (self.unpacked, next(self._number), self.queue.land))
            heapq.heappush(self._events, (self.updated, next(self._number), self.queue.finish))

    def _compute(self, periods: int) -> Iterator[float | Callable[[], bool]]:
        """Yield what compute waits for: a time, or a condition."""
        plan, queue, turn = self.plan, self.queue, self.plan.period.turn
        contention = plan.profile.contention
        for p in range(periods + 1):
            for q in range(turn if p == 0 else 0, plan.period.length):
                self.arrivals.append(self.now)
                slot = self.ledger.slots[q]
                yield from self._issue(p, q, slot.live)
                if q == turn and p:
                    yield self.now + contention.turn_seconds
                until = p * queue.n + self.limits.required[q]
                yield self.now  # messages that take no time are done now
                if queue.done < until:
                    yield lambda until=until: queue.done >= until  # type: ignore[misc]
                    yield self.now + contention.dispatch_seconds
                yield lambda slot=slot: queue.admission.admits(slot.allocated + slot.peak)  # type: ignore[misc]
                queue.admission.reserve(slot.allocated)
                begin, seconds = self.now, plan.period.seconds[q]
                if q + 1 < plan.period.length:
                    yield from self._leave_early(p, q, begin, seconds)
                yield begin + seconds
                queue.admission.reserve(-slot.freed)
        self.arrivals.append(self.now)

    def _leave_early(self, p: int, q: int, begin: float, seconds: float) -> Iterator[float | Callable[[], bool]]:
        """Issue the messages of the next slot whose gradients come in this one, as far as they fit."""
        queue, peak = self.queue, self.ledger.slots[q].peak
        while p and queue.issued < p * queue.n + self.limits.issued[q + 1]:
            part = self.limits.ready[queue.issued % queue.n]
            if part >= 1:
                return
            yield begin + part * seconds
            if not queue.has_room(peak):
                return
            queue.issue()
            self._start_messages()

    def _issue(self, p: int, q: int, live: int) -> Iterator[float | Callable[[], bool]]:
        queue = self.queue
        while queue.issued < p * queue.n + self.limits.issued[q]:
            yield lambda: queue.admits_next(live)
            index = queue.issue()
            self._start_messages()
            if index is not None and self.plan.messages[index % queue.n].blocking:
                yield lambda index=index: queue.done > index  # type: ignore[misc]
                yield self.now + self.plan.profile.contention.dispatch_seconds
