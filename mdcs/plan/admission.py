"""Admission: what may go on under a limit of bytes. A pure state machine without threads, clocks or devices.

Compute and messages ask before they take bytes, and each is told what the worst case by slot
(:mod:`mdcs.plan.worst_case`) has shown to be possible: waiting for messages that are issued always makes room in the end.
The replay's loops (:mod:`mdcs.simulator.kernel`) ask the same questions of arrays.
"""

from __future__ import annotations

from collections import deque


class Admission:
    """Bytes promised to slots and messages. Not thread-safe.

    - ``cap``: bytes that may be promised; None: no limit. ``at_rest``: bytes held between iterations.
    - ``depth``: messages that use their transient bytes at a time.
    - ``reserved``: bytes promised so far, those at rest included.
    - ``excess``: activation bytes beyond the profiled ones, in the slot that runs.
    """

    def __init__(self, cap: int | None, at_rest: int, depth: int) -> None:
        self.cap, self.at_rest, self.depth = cap, at_rest, depth
        self.excess = 0
        self.restart()

    def restart(self) -> None:
        """Forget all promises but the bytes at rest. No message may be in flight."""
        self.reserved = self.at_rest
        self._in_flight = _Window(self.depth)

    # ---- promises

    def reserve(self, size: int) -> None:
        """Promise bytes to compute; a negative size takes a promise back."""
        self.reserved += size

    def issue(self, held: int, transient: int, freed: int) -> None:
        """Promise the bytes of the next message, as in :class:`mdcs.plan.ledger.MessageBytes`."""
        self.reserved += held
        self._in_flight.add(transient, freed)

    def finish(self) -> None:
        """Take back the promise to the oldest message: it is done."""
        self.reserved -= self._in_flight.remove()

    # ---- questions

    def fits(self, size: int) -> bool:
        """Return whether ``size`` bytes fit beside what is promised, not counting messages in flight."""
        return self.cap is None or self.reserved + size <= self.cap

    def admits(self, size: int, transient: int = 0) -> bool:
        """Return whether ``size`` bytes fit beside all that is promised and in flight.

        - ``transient``: further bytes that are needed only while a message is in flight, for a message.

        The excess counts as far as waiting can make room for it. If it does not fit once all messages in flight are done,
        waiting is in vain, and it is not counted.
        """
        if self.cap is None:
            return True
        now = size + self._in_flight.most(transient)
        if not self.excess or not self.fits(now):
            return self.fits(now)
        once_idle = size + transient - self._in_flight.freed
        return self.fits(now + self.excess) or not self.fits(once_idle + self.excess)

    def has_room(self, size: int, transient: int = 0) -> bool:
        """Return whether the bytes of :meth:`admits` and the excess fit, without waiting for any message."""
        return self.fits(size + self.excess + self._in_flight.most(transient))


class _Window:
    """The most bytes that ``depth`` consecutive messages among those not yet done can hold.

    Equals :func:`mdcs.plan.worst_case.max_in_flight_bytes` of all of them, updated message by message.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._waiting: deque[tuple[int, int]] = deque()  # (transient, freed)
        self._done = 0  # messages done since the start
        self._sums: deque[tuple[int, int]] = deque()  # windows of depth messages, bytes falling: (last message, bytes)

    @property
    def freed(self) -> int:
        """Bytes of other buffers that the messages free when they are done."""
        return sum([freed for _, freed in self._waiting])

    def add(self, transient: int, freed: int) -> None:
        """Append a message that takes ``transient`` bytes while in flight."""
        total = self._with_last(transient)
        self._waiting.append((transient, freed))
        if len(self._waiting) >= self._depth:
            while self._sums and self._sums[-1][1] <= total:
                self._sums.pop()
            self._sums.append((self._done + len(self._waiting), total))

    def remove(self) -> int:
        """Remove the oldest message, and return the bytes that it frees."""
        _, freed = self._waiting.popleft()
        self._done += 1
        while self._sums and self._sums[0][0] < self._done + self._depth:
            self._sums.popleft()
        return freed

    def most(self, upcoming: int = 0) -> int:
        """Return the most bytes, counting one more message of ``upcoming`` bytes at the end."""
        most = self._sums[0][1] if self._sums else sum([transient for transient, _ in self._waiting])
        return max(most, self._with_last(upcoming))

    def _with_last(self, size: int) -> int:
        """Return ``size`` plus the bytes of the messages that can be in flight ahead of it."""
        ahead = min(len(self._waiting), self._depth - 1)
        return size + sum([self._waiting[-k][0] for k in range(1, ahead + 1)])
