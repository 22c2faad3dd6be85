"""Stop a job that continues later (`launch.preemption`): its ranks agree at a step's end that one was told to stop."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from launch import preemption

_EVERY_S = 1.0
_MOST_STEPS = 1000


class Stop:
    """Lets the ranks agree about once a second.

    All ranks count the same number of steps between two exchanges. The slowest rank's step time decides how many.
    """

    def __init__(self, step: int) -> None:
        """Make the process group; all ranks must call this. `step` steps are done already."""
        self._said = torch.zeros(2, dtype=torch.float64)
        self._group = dist.new_group(backend="gloo")
        self._last, self._since, self._next = step, time.monotonic(), step + 1

    def asked(self, step: int) -> bool:
        """Whether any rank was told to stop. The answer is the same on all ranks."""
        if step < self._next:
            return False
        now = time.monotonic()
        self._said[0], self._said[1] = float(preemption.asked.is_set()), (now - self._since) / (step - self._last)
        dist.all_reduce(self._said, op=dist.ReduceOp.MAX, group=self._group)
        told, step_s = self._said.tolist()
        self._last, self._since, self._next = step, now, step + min(max(1, int(_EVERY_S / max(step_s, 1e-6))), _MOST_STEPS)
        return bool(told)
