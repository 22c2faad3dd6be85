"""When departures from a plan are enough for a new one, which all ranks must decide alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mdcs.runtime.engine import Engine


class DepartingSteps:
    """Compares the ranks' numbers of steps that departed from the plan with ``limit``; None: there is none.

    A step's numbers are on the way while the next step runs, so that no rank waits for them.
    """

    def __init__(self, engine: Engine, limit: int | None) -> None:
        self._recorder, self._place, self._limit = engine.recorder, engine.place, limit
        # Not host_group, whose collectives have another size: a rank with a step more would end the process.
        self._group = None if limit is None else engine.groups.new_group()
        self._most = torch.frombuffer(bytearray(8), dtype=torch.int64)  # not of the allocator, whose bytes are the budget's
        self._under_way: Any = None

    def are_enough(self) -> bool:
        """Return whether a rank had reached the limit a step ago. Collective, after every step."""
        if self._limit is None:
            return False
        if self._group is None:
            return self._recorder.departing >= self._limit
        if self._under_way is not None:
            with self._place.during("the number of departing steps"):
                self._under_way.wait()
        enough = int(self._most) >= self._limit
        self._most.fill_(self._recorder.departing)
        self._under_way = dist.all_reduce(self._most, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return enough
