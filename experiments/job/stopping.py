"""A job that is told to stop, and goes on later (`launch.preemption`): at a step's end its ranks agree that one was told."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from launch import preemption

_EVERY_S = 1.0
_MOST_STEPS = 1000


class Stop:
    """The ranks talk of it about once a second, after steps that all count alike: what the slowest needs says how many."""

    def __init__(self, step: int) -> None:
        """Called by all ranks; `step` has been made already."""
        self._said = torch.zeros(2, dtype=torch.float64)
        self._group = dist.new_group(backend="gloo")
        self._last, self._since, self._next = step, time.monotonic(), step + 1

    def asked(self, step: int) -> bool:
        """Whether a rank was told to stop; the same answer on all of them."""
        if step < self._next:
            return False
        now = time.monotonic()
        self._said[0], self._said[1] = float(preemption.asked.is_set()), (now - self._since) / (step - self._last)
        dist.all_reduce(self._said, op=dist.ReduceOp.MAX, group=self._group)
        told, step_s = self._said.tolist()
        self._last, self._since, self._next = step, now, step + min(max(1, int(_EVERY_S / max(step_s, 1e-6))), _MOST_STEPS)
        return bool(told)
