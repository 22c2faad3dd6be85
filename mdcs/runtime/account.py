"""The byte account: what admission counts, in the ledger's numbers, and what the ledger predicts as it goes.

Every allocation and release of a registered buffer is booked under one lock together with the real one, so the
account's categories equal the allocator's to the byte. ``reserved`` runs ahead of ``live``: bytes are promised
when compute issues a message and taken when the message starts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from mdcs.plan.ledger import CATEGORIES


class Account:
    """Not thread-safe by itself: call with ``lock`` held."""

    def __init__(self, lock: threading.Condition, cap: int | None, at_rest: dict[str, int]) -> None:
        self.lock, self.cap, self.at_rest = lock, cap, at_rest
        self.restart()
        self.reset()

    def restart(self) -> None:
        """Nothing is held but what is at rest."""
        self.live = dict.fromkeys(CATEGORIES, 0) | self.at_rest
        self.reserved = sum(self.at_rest.values())
        self.activations = 0  # and workspace, of the slot compute is in

    def reset(self) -> None:
        """Peaks and windows start again from what is live."""
        self.peak = self._now()
        self._window = self._now()

    def _now(self) -> dict[str, int]:
        now = dict(self.live, activations=self.activations)
        now["total"] = sum(now.values())
        return now

    def book(self, category: str, size: int) -> None:
        """Allocated (positive) or freed (negative) bytes."""
        self.live[category] += size
        if size > 0:
            self._note()

    def enter(self, activations: int) -> None:
        """Compute enters a slot that needs so many bytes beside the registered buffers."""
        self.activations = activations
        self._note()

    def _note(self) -> None:
        now = self._now()
        for key, value in now.items():
            self.peak[key] = max(self.peak[key], value)
            self._window[key] = max(self._window[key], value)

    def window(self) -> dict[str, int]:
        """Peaks by category since the last call."""
        out, self._window = self._window, self._now()
        return out

    def fits(self, more: int, in_flight: int) -> bool:
        """Whether ``more`` bytes fit beside what is promised and the most that messages take ``in_flight``."""
        return self.cap is None or self.reserved + more + in_flight <= self.cap

    def reserve(self, sizes: Iterable[int]) -> None:
        """Promise bytes."""
        self.reserved += sum(sizes)

    def release(self, sizes: Iterable[int]) -> None:
        """Take promises back."""
        self.reserved -= sum(sizes)
