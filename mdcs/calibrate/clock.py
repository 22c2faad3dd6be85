"""The one clock of what is timed here, and whose it is. Nothing is timed by waiting for CUDA, which runs behind its process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

_HELD_BACK = 40_000_000
"""Cycles of a kernel that does nothing, some 20 ms: more than it takes to launch what is timed."""


def machine() -> str:
    """Names the machine whose clock and cores this process shares, containers and network namespaces of one alike (Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


class Mark:
    """A moment that nothing waits for: when ``device`` has done what its current stream was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._seconds = time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def until(self, later: Mark) -> float:
        """Seconds until another one, once that is reached."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1e3


def hold_back(device: torch.device) -> None:
    """Let a CUDA device do nothing for a while: it has what is launched meanwhile ready when it goes on, as in a step."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(_HELD_BACK)


def back_to_back(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Seconds of ``work`` on a device that does it so many times in a row; on CUDA neither launching nor waiting is in them."""
    hold_back(device)
    begin = Mark(device)
    for _ in range(times):
        work()
    return begin.until(Mark(device)) / times
