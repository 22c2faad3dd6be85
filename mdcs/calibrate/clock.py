"""The one clock of what is timed here, and whose it is."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch


def now(device: torch.device) -> float:
    """Seconds on this process's clock, once ``device`` has done what it was given: CUDA runs behind its process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def machine() -> str:
    """Names the machine whose clock and cores this process shares, containers and network namespaces of one alike (Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
