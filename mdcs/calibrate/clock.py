"""The one clock of what is timed here."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds on this process's clock, once ``device`` has done what it was given: CUDA runs behind its process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
