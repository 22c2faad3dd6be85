"""The one clock of what is timed here."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds on this process's clock, once ``device`` has done what it was given: CUDA runs behind its process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Mark:
    """A moment that nothing waits for: when ``device`` has done what its current stream was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._seconds = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def until(self, later: Mark) -> float:
        """Seconds until another one, once that is reached."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1e3
