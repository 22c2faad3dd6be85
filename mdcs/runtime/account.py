"""The byte account: the numbers of the ledger that admission counts, kept as training goes on.

Every allocation and release of a registered buffer is booked under one lock together with the real one. The account's
categories therefore equal the allocator's to the byte. ``reserved`` runs ahead of ``live``: bytes are promised when
compute issues a message, and taken when the message starts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from mdcs.plan.lifetimes import CATEGORIES


class Account:
    """Live, reserved and peak bytes of this rank. Not thread-safe by itself: call with ``lock`` (reentrant) held."""

    def __init__(self, lock: threading.RLock, cap: int | None, at_rest: dict[str, int]) -> None:
        self.lock, self.cap, self.at_rest = lock, cap, at_rest
        self.excess = 0  # activation bytes beyond the profiled ones, held by compute or about to be allocated
        self.restart()
        self.reset()

    def restart(self) -> None:
        """Reset to the bytes at rest: no message, gather or gradient is held."""
        self.live = dict.fromkeys(CATEGORIES, 0) | self.at_rest  # "activations": of the current slot, workspace included
        self.reserved = self._total = sum(self.at_rest.values())

    def reset(self) -> None:
        """Restart peaks and windows at the live bytes."""
        self.peak = self._now()
        self._window = self._now()

    def _now(self) -> dict[str, int]:
        return {**self.live, "total": self._total}

    def book(self, category: str, size: int) -> None:
        """Book allocated (positive) or freed (negative) bytes."""
        live = self.live[category] = self.live[category] + size
        total = self._total = self._total + size
        if size > 0:  # inlined: this runs several times per message
            for highest in (self.peak, self._window):
                if live > highest[category]:
                    highest[category] = live
                if total > highest["total"]:
                    highest["total"] = total

    def enter(self, activations: int) -> None:
        """Set the activations of the slot that compute enters (bytes besides the registered buffers)."""
        self.book("activations", activations - self.live["activations"])

    def window(self) -> dict[str, int]:
        """Return the peaks by category since the last call."""
        out, self._window = self._window, self._now()
        return out

    def fits(self, more: int, in_flight: int) -> bool:
        """Return whether ``more`` bytes fit beside the reserved bytes and the peak of the messages ``in_flight``
        (bytes).
        """
        return self.cap is None or self.reserved + more + in_flight <= self.cap

    def admits(self, more: int, in_flight: int, once_idle: int) -> bool:
        """Return whether ``more`` bytes fit, with :attr:`excess` counted as far as waiting can make room for it.

        ``once_idle``: bytes held when all messages in flight are done, minus the bytes held now (may be negative). If
        ``more`` and the excess would not fit even then, waiting is in vain, and the excess is not counted.
        """
        if not self.excess or not self.fits(more, in_flight):
            return self.fits(more, in_flight)
        return self.fits(more + self.excess, in_flight) or not self.fits(more + self.excess, once_idle)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Promise bytes."""
        self.reserved += sum(sizes)

    def release(self, sizes: Iterable[int]) -> None:
        """Take promises back."""
        self.reserved -= sum(sizes)


class InFlight:
    """The most bytes that ``depth`` consecutive messages among those not yet done can hold.

    Equals :func:`mdcs.plan.worst_case.most_in_flight` of all of them, updated message by message.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._waiting: deque[int] = deque()
        self._done = 0  # messages done since the start
        self._sums: deque[tuple[int, int]] = deque()  # windows of depth messages, bytes falling: (last message, bytes)

    def add(self, size: int) -> None:
        """Append a message that takes ``size`` bytes while in flight."""
        total = self._behind(size)
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
        return max(most, self._behind(upcoming))

    def _behind(self, size: int) -> int:
        """Return the bytes of a message of ``size`` and the messages that can be in flight ahead of it."""
        ahead = min(len(self._waiting), self._depth - 1)
        return size + sum([self._waiting[-k] for k in range(1, ahead + 1)])
