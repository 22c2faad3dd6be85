"""The queue of a plan's messages: the order in which they start, how many are in flight, and the bytes they need.

A pure state machine without torch, threads or clocks. A transport tells it what happens, and does what it allows:

    issue    compute has come to the message: its bytes are reserved
    start    its turn has come: it goes on the link
    land     its collective has ended and is unpacked
    finish   its updates are done: its bytes are released

Each state is reached in the plan's order, so one count per state is the whole state. A count is a number of messages
since the start of training; message ``index`` is message ``index % n`` of the plan, in period ``index // n``. Period 0
is the prologue: it only gathers what the first forward needs, and passes over its other messages.

A message starts after the message ``depth`` before it is done, and after the message that it waits for is done
(:meth:`MessageQueue.starts_after`). The host's threads check this before they start a message. On CUDA a stream waits
for these events instead. Tests replay plans with this queue and compare with the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan


class QueuedMessage(NamedTuple):
    """A message of the plan as the queue sees it.

    - ``waits_for``: index in the plan of the message that must be done before this one starts, or -1.
    - ``in_prologue``: whether the prologue sends it.
    - ``held``: bytes that it allocates and that stay after it.
    - ``freed``: bytes of slots and earlier messages that it frees when it is done.
    - ``transient``: bytes that it needs only while it is in flight.
    """

    waits_for: int
    in_prologue: bool
    held: int
    freed: int
    transient: int


def queued_messages(plan: Plan, ledger: Ledger) -> list[QueuedMessage]:
    """Return the messages of a plan, with the bytes of its ledger."""
    return [
        QueuedMessage(after, plan.in_prologue(m), e.held, e.freed, e.transient)
        for m, after, e in zip(plan.messages, plan.waits_for, ledger.messages, strict=True)
    ]


class MessageQueue:
    """FIFO and byte admission of the messages of a plan. Not thread-safe.

    - ``messages``: one period, in wire order.
    - ``depth``: messages in flight, from their start until they are done.
    - ``cap``: bytes that may be reserved; None: no limit. ``at_rest``: bytes held between iterations.
    - ``has_own_updates``: updates run beside the link, which then carries one message at a time: a message starts when
      the one before it has landed.
    - ``issued``, ``started``, ``landed``, ``done``: messages that have come so far, since the start of training.
    - ``reserved``: bytes promised, to messages and to slots. ``excess``: activation bytes beyond the profiled ones.
    - ``first_period``: number of the prologue.
    """

    def __init__(
        self,
        messages: Sequence[QueuedMessage],
        depth: int,
        *,
        cap: int | None = None,
        at_rest: int = 0,
        has_own_updates: bool = False,
    ) -> None:
        self.messages, self.n, self.depth = messages, len(messages), depth
        self.cap, self.at_rest, self.has_own_updates = cap, at_rest, has_own_updates
        self.excess = 0
        self._begin(0)

    def restart(self) -> int:
        """Forget the position in the plan: the next period is a prologue. Return its number.

        Nothing may be in flight. Only the bytes at rest stay reserved.
        """
        self._begin(self.issued // max(1, self.n) + 1)
        return self.first_period

    def _begin(self, period: int) -> None:
        self.first_period = period
        self.issued = self.started = self.landed = self.done = period * self.n
        self.reserved = self.at_rest
        self._skipped: set[int] = set()  # messages that are passed over when their turn comes
        self._in_flight = _Window(self.depth)  # transient bytes of the messages that are issued and not done

    # -- bytes ----------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Promise bytes to compute; a negative size takes a promise back."""
        self.reserved += size

    def fits(self, size: int) -> bool:
        """Return whether ``size`` bytes fit beside what is reserved, not counting messages in flight."""
        return self.cap is None or self.reserved + size <= self.cap

    def admits(self, size: int) -> bool:
        """Return whether ``size`` bytes of compute fit beside everything reserved and in flight."""
        return self.cap is None or self._admits(size + self._in_flight.most(), size - self._freed)

    def admits_next(self, activations: int) -> bool:
        """Return whether the next message fits beside ``activations`` bytes of the slot; it does if it is skipped."""
        if self.cap is None or self.is_skipped(self.issued):
            return True
        m = self.messages[self.issued % self.n]
        size = m.held + activations
        return self._admits(size + self._in_flight.most(m.transient), size + m.transient - self._freed)

    def has_room(self, activations: int) -> bool:
        """Return whether the next message fits beside ``activations`` and the excess, without waiting for any other."""
        m = self.messages[self.issued % self.n]
        return self.fits(m.held + activations + self.excess + self._in_flight.most(m.transient))

    def _admits(self, now: int, once_idle: int) -> bool:
        """Return whether bytes fit, with the excess counted as far as waiting can make room for it.

        - ``now``: bytes needed now.
        - ``once_idle``: bytes needed when all messages in flight are done. If these and the excess do not fit, waiting
          is in vain, and the excess is not counted.
        """
        if not self.excess or not self.fits(now):
            return self.fits(now)
        return self.fits(now + self.excess) or not self.fits(once_idle + self.excess)

    @property
    def _freed(self) -> int:
        """Other buffers' bytes that the issued messages free when done; computed only where there is excess."""
        if not self.excess:
            return 0
        return sum(self.messages[i % self.n].freed for i in range(self.done, self.issued) if i not in self._skipped)

    # -- states ---------------------------------------------------------------------------------------------------

    def issue(self) -> int | None:
        """Issue the next message: reserve its bytes. Return its index, or None for a message that is passed over."""
        index = self.issued
        self.issued += 1
        if self.is_skipped(index):
            self._skipped.add(index)
            self._pass_skipped()
            return None
        m = self.messages[index % self.n]
        self._in_flight.add(m.transient)
        self.reserved += m.held
        return index

    def next_start(self) -> int | None:
        """Return the index of the next message if it can start now, else None."""
        index = self.started
        if index == self.issued or self.done <= self.starts_after(index):
            return None
        return None if self.has_own_updates and self.landed < index else index

    def starts_after(self, index: int) -> int:
        """Return the message that must be done, with all before it, before this one starts; negative if there is none."""
        after, first = index - self.depth, index - index % self.n
        waits_for = self.messages[index - first].waits_for
        if waits_for < 0 or self.in_prologue(index):
            return after
        return max(after, first + waits_for)

    def start(self) -> None:
        """Put the next message on the link."""
        self.started += 1
        self._pass_skipped()

    def land(self) -> None:
        """End the collective of the oldest message on the link."""
        self.landed += 1
        self._pass_skipped()

    def finish(self) -> None:
        """End the oldest message in flight: release its bytes."""
        m = self.messages[self.done % self.n]
        self.done += 1
        self.landed = max(self.landed, self.done)
        self.reserved -= m.freed
        self._in_flight.remove()
        self._pass_skipped()

    def send_ahead(self, index: int) -> None:
        """Send a message that is not issued yet out of its turn, with nothing in flight: it is passed over later."""
        m = self.messages[index % self.n]
        self._skipped.add(index)
        self.reserved += m.held - m.freed

    def in_prologue(self, index: int) -> bool:
        """Return whether the message belongs to the prologue."""
        return index < (self.first_period + 1) * self.n

    def is_skipped(self, index: int) -> bool:
        """Return whether the message is passed over in its turn: the prologue has no use for it, or it was sent ahead."""
        return index in self._skipped or self.in_prologue(index) and not self.messages[index % self.n].in_prologue

    def _pass_skipped(self) -> None:
        """Pass over skipped messages: each is started, landed and done when all before it are."""
        skipped = self._skipped
        if not skipped:
            return
        while self.started < self.issued and self.started in skipped:
            self.started += 1
        while self.landed < self.started and self.landed in skipped:
            self.landed += 1
        while self.done < self.landed and self.done in skipped:
            skipped.discard(self.done)
            self.done += 1


class _Window:
    """The most bytes that ``depth`` consecutive messages among those not yet done can hold.

    Equals :func:`mdcs.plan.worst_case.max_in_flight_bytes` of all of them, updated message by message.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._waiting: deque[int] = deque()
        self._done = 0  # messages done since the start
        self._sums: deque[tuple[int, int]] = deque()  # windows of depth messages, bytes falling: (last message, bytes)

    def add(self, size: int) -> None:
        """Append a message that takes ``size`` bytes while in flight."""
        total = self._with_last(size)
        self._waiting.append(size)
        if len(self._waiting) >= self._depth:
            while self._sums and self._sums[-1][1] <= total:
                self._sums.pop()
            self._sums.append((self._done + len(self._waiting), total))

    def remove(self) -> None:
        """Remove the oldest message: it is done."""
        self._waiting.popleft()
        self._done += 1
        while self._sums and self._sums[0][0] < self._done + self._depth:
            self._sums.popleft()

    def most(self, upcoming: int = 0) -> int:
        """Return the most bytes, counting one more message of ``upcoming`` bytes at the end."""
        most = self._sums[0][1] if self._sums else sum(self._waiting)
        return max(most, self._with_last(upcoming))

    def _with_last(self, size: int) -> int:
        """Return ``size`` plus the bytes of the messages that can be in flight ahead of it."""
        ahead = min(len(self._waiting), self._depth - 1)
        return size + sum([self._waiting[-k] for k in range(1, ahead + 1)])
