"""The byte account: live and peak bytes by the categories of the ledger, kept as training goes on.

Every allocation and release of a registered buffer is booked under one lock together with the real one. The account's
categories therefore equal the allocator's to the byte. Admission counts promised bytes (:mod:`mdcs.runtime.message_queue`).
"""

from __future__ import annotations

import threading

from mdcs.plan.lifetimes import CATEGORIES


class ByteAccount:
    """Live and peak bytes of this rank. Not thread-safe by itself: call with ``lock`` (reentrant) held."""

    def __init__(self, lock: threading.RLock, at_rest: dict[str, int]) -> None:
        self.lock, self.at_rest = lock, at_rest
        self.restart()
        self.reset()

    def restart(self) -> None:
        """Reset to the bytes at rest: no message, gather or gradient is held."""
        self.live = dict.fromkeys(CATEGORIES, 0) | self.at_rest  # "activations": of the current slot, workspace included
        self._total = sum(self.at_rest.values())

    def reset(self) -> None:
        """Restart peaks and windows at the live bytes."""
        self.peak = self._now()
        self._window = self._now()

    def _now(self) -> dict[str, int]:
        return {**self.live, "total": self._total}

    def record(self, category: str, size: int) -> None:
        """Book allocated (positive) or freed (negative) bytes."""
        live = self.live[category] = self.live[category] + size
        total = self._total = self._total + size
        if size > 0:  # inlined: this runs several times per message
            for highest in (self.peak, self._window):
                if live > highest[category]:
                    highest[category] = live
                if total > highest["total"]:
                    highest["total"] = total

    def set_activations(self, activations: int) -> None:
        """Set the activations of the slot that compute enters (bytes besides the registered buffers)."""
        self.record("activations", activations - self.live["activations"])

    def take_window_peak(self) -> dict[str, int]:
        """Return the peaks by category since the last call."""
        out, self._window = self._window, self._now()
        return out
