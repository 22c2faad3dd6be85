"""The queue by itself: by hand, and a thousand random schedules of random messages."""

from __future__ import annotations

import random
from collections.abc import Iterator

from mdcs.plan.lifetimes import Admission
from mdcs.runtime.wire import MessageQueue, QueuedMessage


def reduction(freed: int = 0, transient: int = 0) -> QueuedMessage:
    return QueuedMessage(-1, False, 0, freed, transient)


def gather(held: int = 0, transient: int = 0, waits_for: int = -1) -> QueuedMessage:
    return QueuedMessage(waits_for, True, held, 0, transient)


def queue_of(
    messages: list[QueuedMessage], depth: int, has_own_updates: bool = False, cap: int | None = None, at_rest: int = 0
) -> MessageQueue:
    return MessageQueue(messages, Admission(cap, at_rest, depth), has_own_updates)


def send_all(queue: MessageQueue) -> None:
    while queue.next_start() is not None:
        queue.start()
    while queue.done < queue.started:
        queue.finish()


# ---- by hand


def test_a_message_does_not_wait_until_compute_comes_behind_the_one_before() -> None:
    queue = queue_of([reduction(freed=5, transient=3)] * 3, depth=1, has_own_updates=True, at_rest=100, cap=108)
    for _ in range(3):
        queue.issue()  # the prologue's
    queue.admission.reserve(5)
    assert queue.issue() == 3 and not queue.admission.admits(1)
    queue.start(), queue.land(), queue.update()
    assert queue.admission.admits(3) and not queue.admission.admits(4) and queue.done == 3  # its own 3 bytes; the gradient stays
    assert queue.issue() == 4 and queue.next_start() == 4
    queue.finish()
    assert (queue.updated, queue.done, queue.admission.reserved) == (4, 4, 100)
    queue.start(), queue.land(), queue.finish()
    assert (queue.updated, queue.done) == (5, 5)


def test_a_message_sent_ahead_is_passed_over_in_its_turn() -> None:
    queue = queue_of([reduction(30), gather()], depth=1)
    queue.issue(), queue.issue()
    send_all(queue)
    queue.admission.reserve(30)
    queue.send_ahead(2)
    assert queue.admission.reserved == 0 and queue.is_skipped(2)
    assert [queue.issue(), queue.issue()] == [None, 3]
    send_all(queue)
    assert queue.done == 4 and queue.admission.reserved == 0


def test_the_bytes_of_the_next_message_fit_or_not() -> None:
    queue = queue_of([gather(30, transient=10)] * 2, depth=2, cap=200, at_rest=100)
    assert queue.admits_next(60) and not queue.admits_next(61)
    queue.issue()
    assert queue.admission.admits(60) and not queue.admission.admits(61)  # 10 of 70 for the message in flight
    assert not queue.admits_next(60) and queue.has_room(20) and not queue.has_room(21)
    queue.admission.reserve(20)
    assert not queue.has_room(1)
    assert queue_of([gather(30)], depth=1).admission.admits(1 << 60)  # no cap


def test_a_restart_forgets_what_was_sent_ahead_and_reserved() -> None:
    queue = queue_of([gather(30), reduction()], depth=1, at_rest=100)
    queue.issue(), queue.issue()
    send_all(queue)
    queue.send_ahead(3)
    assert queue.restart() == 2
    assert (queue.issued, queue.done, queue.admission.reserved) == (4, 4, 100) and not queue.is_skipped(7)
    assert [queue.issue(), queue.issue()] == [4, None]


# ---- random schedules


class Case:
    """Random messages of a period: each unit's gradient is reduced, then its parameters are gathered and used.

    Compute's actions of a period: ("hold", bytes), ("issue", activations), ("use", message).
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.rng, units = rng, rng.randint(1, 4)
        self.messages: list[QueuedMessage] = []
        self.backward: list[tuple[str, int]] = []
        self.forward: list[tuple[str, int]] = []
        for _ in range(units):
            gradient = rng.randint(0, 9)
            self.messages.append(reduction(gradient, rng.randint(0, 9)))
            self.backward += [("hold", gradient), ("issue", rng.randint(0, 5))]
        for unit in range(units):
            self.messages.append(gather(rng.randint(0, 9), rng.randint(0, 9), rng.choice([-1, unit])))
            where = self.backward if rng.random() < 0.5 and not self.forward else self.forward
            where.append(("issue", rng.randint(0, 5)))
            self.forward.append(("use", units + unit))
        self.depth, self.has_own_updates = rng.randint(1, 4), rng.random() < 0.3
        self.cap = self._smallest_cap()

    def queue(self, cap: int | None) -> MessageQueue:
        return queue_of(self.messages, self.depth, self.has_own_updates, cap, at_rest=10)

    def actions(self, periods: int) -> Iterator[tuple[str, int]]:
        """The prologue passes over the reductions, but comes to them."""
        yield from [a for a in self.backward if a[0] == "issue"]
        for period in range(periods):
            yield from self.forward
            if period < periods - 1:
                yield from self.backward

    def _smallest_cap(self) -> int:
        """The bytes of the worst action when all earlier messages are done, as :func:`mdcs.plan.ledger.check` has them."""
        queue, most = self.queue(None), 0
        for action, value in self.actions(3):
            if action == "hold":
                queue.admission.reserve(value)
            elif action == "issue":
                m = self.messages[queue.issued % queue.n]
                if queue.issue() is not None:
                    most = max(most, queue.admission.reserved + m.transient + value)
                send_all(queue)
            else:
                queue.admission.reserve(-self.messages[value].held)
            most = max(most, queue.admission.reserved)
        return most


class Schedule:
    """One random interleaving of compute and link, with all that must hold at every event."""

    def __init__(self, case: Case, periods: int = 3) -> None:
        self.case, self.queue = case, case.queue(case.cap)
        self.live = self.queue.admission.at_rest
        self.passed = [False] * (periods * self.queue.n)
        self.todo, self.uses = list(reversed(list(case.actions(periods)))), 0
        moves = [self._compute, self._start, self._land, self._finish]
        while self.todo or self.queue.done < self.queue.issued:
            case.rng.shuffle(moves)
            assert any(move() for move in moves), f"deadlock before {self.todo[-1]}"
            self._check()

    def _compute(self) -> bool:
        queue = self.queue
        if not self.todo:
            return False
        action, value = self.todo[-1]
        if action == "hold":
            if not queue.admission.admits(value):
                return False
            queue.admission.reserve(value)
            self.live += value
        elif action == "issue":
            if not queue.admits_next(value):
                return False
            index = queue.issued
            self.passed[index] = queue.issue() is None
        else:
            if queue.done <= self.uses // (queue.n // 2) * queue.n + value:
                return False
            self.uses += 1
            queue.admission.reserve(-self.case.messages[value].held)
            self.live -= self.case.messages[value].held
        self.todo.pop()
        return True

    def _start(self) -> bool:
        index = self.queue.next_start()
        if index is None:
            return False
        assert not self.passed[index] and index == self.queue.started  # in order
        m = self.case.messages[index % self.queue.n]
        waits_for = index - index % self.queue.n + m.waits_for
        assert m.waits_for < 0 or index < self.queue.n or self.queue.done > waits_for
        self.live += m.held + m.transient
        self.queue.start()
        return True

    def _land(self) -> bool:
        if self.queue.landed == self.queue.started:
            return False
        assert not self.passed[self.queue.landed]
        self.queue.land()
        return True

    def _finish(self) -> bool:
        if self.queue.done == self.queue.landed:
            return False
        assert not self.passed[self.queue.done]
        m = self.case.messages[self.queue.done % self.queue.n]
        self.live -= m.transient + m.freed
        self.queue.finish()
        return True

    def _check(self) -> None:
        queue = self.queue
        assert queue.done <= queue.landed <= queue.started <= queue.issued
        in_flight = [i for i in range(queue.done, queue.started) if not self.passed[i]]
        assert len(in_flight) <= queue.admission.depth
        assert not queue.has_own_updates or queue.started - queue.landed <= 1
        assert self.live <= self.case.cap


def test_a_thousand_random_schedules() -> None:
    """Messages go in order, at most ``depth`` of them, within the smallest cap, and none waits for ever."""
    for seed in range(1000):
        Schedule(Case(seed))
