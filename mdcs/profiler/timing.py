"""Timing by one clock per machine. Nothing is timed by waiting for CUDA, which runs behind its process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch

from mdcs.runtime.executor import DeviceTimestamp as DeviceTimestamp
from mdcs.torch_compat import spin

_STALL_S = 40_000_000
"""Cycles of an empty kernel, some 20 ms: longer than the launches of the work that is timed."""


def machine_id() -> str:
    """Return a name of the machine, equal for all processes that share its clock and cores, in containers too (Linux).
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def stall_device(device: torch.device) -> None:
    """Keep a CUDA device idle for a while: work launched meanwhile is queued when it goes on, as in a step."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            spin(_STALL_S)


def seconds_per_call(device: torch.device, work: Callable[[], object], times: int) -> float:
    """Return seconds per call of ``work``, run ``times`` times in a row; on CUDA without launches and waits."""
    stall_device(device)
    begin = DeviceTimestamp(device)
    for _ in range(times):
        work()
    return begin.until(DeviceTimestamp(device)) / times
