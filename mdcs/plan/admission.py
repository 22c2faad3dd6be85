"""Admission: which bytes may be taken now, beside all that is promised and in flight. Pure numbers, without threads.

One object serves the runtime's queue on every device, and tests replay plans with it; the replay's loops
(:mod:`mdcs.simulator.kernel`) ask the same questions of arrays. The worst case by slot (:mod:`mdcs.plan.ledger`)
says that waiting for messages that are issued makes room in the end.

A message that is issued reserves what stays after it (``held``), and may need ``transient`` bytes of its own while it
is in flight; when it is done, it frees buffers of slots and earlier messages (``freed``). Only ``depth`` messages need
their own bytes at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Admission:
    """Bytes promised to messages and slots, under a limit. Not thread-safe.

    - ``cap``: bytes that may be reserved; None: no limit. ``soft_cap``: bytes above which messages are waited for
      although there is no limit; None: they are not.
    - ``at_rest``: bytes held between iterations. ``depth``: messages in flight.
    - ``reserved``: bytes promised, to messages and to slots. ``excess``: activation bytes beyond the profiled ones.
    """

    def __init__(self, cap: int | None, at_rest: int, depth: int, soft_cap: int | None = None) -> None:
        self.depth, self.at_rest, self.cap, self.excess = depth, at_rest, cap, 0
        self._limit = soft_cap if cap is None else cap
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight: only the bytes at rest are reserved."""
        self.reserved = self.at_rest
        self._freeing = 0  # bytes that the messages in flight free when they are done
        self._in_flight = InFlightBytes(self.depth)

    # -- questions ------------------------------------------------------------------------------------------------

    def fits(self, size: int) -> bool:
        """Return whether ``size`` bytes fit under the cap beside what is reserved, not counting messages in flight."""
        return self.cap is None or self.reserved + size <= self.cap

    def admits(self, size: int, transient: int = 0) -> bool:
        """Return whether ``size`` bytes fit beside everything reserved and in flight, and a message of ``transient``
        bytes.

        The excess is counted as far as waiting can make room for it: if the bytes would not fit beside it with nothing
        in flight, waiting is in vain.
        """
        if self._limit is None:
            return True
        room = self._limit - self.reserved - size - self._in_flight.most(transient)
        if room < 0 or not self.excess or room >= self.excess:
            return room >= 0
        return self.reserved + size + transient - self._freeing + self.excess > self._limit

    def has_room(self, size: int, transient: int) -> bool:
        """Return whether a message fits as in :meth:`admits`, beside all of the excess."""
        needed = self.reserved + size + self.excess
        return self._limit is None or needed + self._in_flight.most(transient) <= self._limit

    # -- events ---------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Promise bytes to compute; a negative size takes a promise back."""
        self.reserved += size

    def issue(self, held: int, transient: int, freed: int) -> None:
        """Promise the bytes of the next message."""
        self.reserved += held
        self._freeing += freed
        self._in_flight.add(transient)

    def update(self) -> None:
        """Take back what the oldest message needed for itself."""
        self._in_flight.remove()

    def finish(self, freed: int) -> None:
        """Take back what a message has freed of other buffers."""
        self.reserved -= freed
        self._freeing -= freed


class InFlightBytes:
    """The most bytes that ``depth`` consecutive messages among those in flight can hold, kept message by message."""

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


def max_in_flight_bytes(transient: Iterable[int], depth: int) -> int:
    """Return the most bytes that ``depth`` consecutive messages can hold in flight."""
    messages = InFlightBytes(depth)
    for size in transient:
        messages.add(size)
    return messages.most()
