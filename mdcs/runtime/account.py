"""The byte account: what admission counts, in the ledger's numbers, and what the ledger predicts as it goes.

Every allocation and release of a registered buffer is booked under one lock together with the real one, so the
account's categories equal the allocator's to the byte. ``reserved`` runs ahead of ``live``: bytes are promised
when compute issues a message and taken when the message starts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from mdcs.plan.ledger import CATEGORIES


class Account:
    """Not thread-safe by itself: call with ``lock`` held, which the thread that holds it may take again."""

    def __init__(self, lock: threading.RLock, cap: int | None, at_rest: dict[str, int]) -> None:
        self.lock, self.cap, self.at_rest = lock, cap, at_rest
        self.excess = 0  # bytes of activations beyond the profile's, which compute has or is about to take
        self.restart()
        self.reset()

    def restart(self) -> None:
        """Nothing is held but what is at rest."""
        self.live = dict.fromkeys(CATEGORIES, 0) | self.at_rest  # activations: and workspace, of the slot compute is in
        self.reserved = self._total = sum(self.at_rest.values())

    def reset(self) -> None:
        """Peaks and windows start again from what is live."""
        self.peak = self._now()
        self._window = self._now()

    def _now(self) -> dict[str, int]:
        return {**self.live, "total": self._total}

    def book(self, category: str, size: int) -> None:
        """Allocated (positive) or freed (negative) bytes."""
        live = self.live[category] = self.live[category] + size
        total = self._total = self._total + size
        if size > 0:  # written out, for it is done several times a message
            for highest in (self.peak, self._window):
                if live > highest[category]:
                    highest[category] = live
                if total > highest["total"]:
                    highest["total"] = total

    def enter(self, activations: int) -> None:
        """Compute enters a slot that needs so many bytes beside the registered buffers."""
        self.book("activations", activations - self.live["activations"])

    def window(self) -> dict[str, int]:
        """Peaks by category since the last call."""
        out, self._window = self._window, self._now()
        return out

    def fits(self, more: int, in_flight: int) -> bool:
        """Whether ``more`` bytes fit beside what is promised and the most that messages take ``in_flight``."""
        return self.cap is None or self.reserved + more + in_flight <= self.cap

    def admits(self, more: int, in_flight: int, once_idle: int) -> bool:
        """Whether they fit beside :attr:`excess` as well; or without it, where no waiting makes room for it: when all that is in
        flight is done, ``once_idle`` bytes are held more than now (fewer: negative).
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
    """The most bytes that ``depth`` neighbours among the messages not yet done can hold, kept up message by message: what
    :func:`mdcs.plan.ledger.most_in_flight` says of all of them.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._waiting: deque[int] = deque()
        self._done = 0  # messages ever
        self._sums: deque[tuple[int, int]] = deque()  # of depth neighbours, falling: (number of the last of them, bytes)

    def add(self, size: int) -> None:
        """One more message takes so many bytes while in flight, the last to be sent."""
        total = self._behind(size)
        self._waiting.append(size)
        if len(self._waiting) >= self._depth:
            while self._sums and self._sums[-1][1] <= total:
                self._sums.pop()
            self._sums.append((self._done + len(self._waiting), total))

    def remove(self) -> None:
        """The first of them is done."""
        self._waiting.popleft()
        self._done += 1
        while self._sums and self._sums[0][0] < self._done + self._depth:
            self._sums.popleft()

    def most(self, upcoming: int = 0) -> int:
        """Bytes; with one more message of ``upcoming`` bytes behind them."""
        most = self._sums[0][1] if self._sums else sum(self._waiting)
        return max(most, self._behind(upcoming))

    def _behind(self, size: int) -> int:
        """Of a message and those that can be in flight ahead of it."""
        ahead = min(len(self._waiting), self._depth - 1)
        return size + sum([self._waiting[-k] for k in range(1, ahead + 1)])
