"""Partitioned communication, nearest deadline first: a policy over the replay.

ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019) do this at run time. Here it is done in
advance. Whenever the link is free, it takes the ready block whose unit is needed first. The resulting order in steady
state becomes the plan. It is optimal for one link, with unlimited memory and free updates.

The replay of a plan says when compute arrives at each slot, with all that messages cost. The order that follows is
replayed again, because it moves these times (:func:`settled`).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.early import in_order
from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.plan.period import Op
from mdcs.planner.schedulers.wfbp import Blocks, ready_slot
from mdcs.profile.link import GATHER, Kind
from mdcs.simulator.simulate import Steady, steady_state, undelayed

_ROUNDS = 3  # orders made from each first times, the later ones from the replay of the plan before
_PERIODS = 4  # of the list schedule; the plan takes the order of the last but one

Windows = dict[Op, tuple[int, int]]
"""For every operation, the first slot at which it is sent and the slot at which it must be done (unrolled)."""


@dataclass(frozen=True)
class Priority(Blocks):
    """Blocks, sent in the order in which their units are needed, among the ready ones."""

    name: ClassVar[str] = "priority"

    def schedule(self, mix: Mix) -> Plan:
        """Return the settled nearest-deadline order (:func:`settled`)."""
        return settled(mix, self.name, self.cut(mix))


def settled(mix: Mix, name: str, blocks: tuple[tuple[int, ...], ...], windows: Windows | None = None) -> Plan:
    """Return the fastest plan by replay, without a budget, of several rounds of :func:`nearest_deadline_first`.

    - ``windows``: windows narrower than the mix's own. A gather then holds its buffer later, and a reduction frees its
      gradient earlier.

    The rounds begin twice: with the times of a plan that sends blocks when they are ready, and with those of compute alone.
    """
    windows = windows or {op: mix.window(op) for op in mix.ops}
    first = [
        Message(op.kind, ((op.unit, b),), min(max(ready_slot(mix, op), windows[op][0]), windows[op][1]), micro=op.micro)
        for op in mix.ops for b in in_order(mix.profile, op.unit, blocks[op.unit])
    ]  # fmt: skip
    first.sort(key=lambda m: (m.slot, m.kind.is_gather))
    best = mix.plan(name, blocks, first)
    shortest = steady_state(best)
    for times in (shortest, undelayed(mix.period)):
        plan: Plan | None = None
        for _ in range(_ROUNDS):
            before, plan = plan, mix.plan(name, blocks, nearest_deadline_first(mix, blocks, windows, times))
            if plan in (before, best):
                break
            times = steady_state(plan)
            if times.period_s < shortest.period_s:
                best, shortest = plan, times
    return best


def nearest_deadline_first(mix: Mix, blocks: Sequence[tuple[int, ...]], windows: Windows, times: Steady) -> list[Message]:
    """Return messages: whenever the link is free, send the ready block with the nearest deadline.

    - ``times``: when compute arrives at the slots.
    """
    length, job, depth = mix.period.length, mix.job, mix.profile.link.depth
    arrivals = [times.arrival(q) for q in range(_PERIODS * length)]
    released: list[tuple[float, int, int, tuple[int, bool, int, int], Op, int, int]] = []  # heap by time

    def release(at: float, op: Op, block: int, place: int, p: int) -> None:
        first, last = (p * length + slot for slot in windows[op])
        if first < len(arrivals):
            urgency = last, op.kind.is_gather, op.unit, place
            heapq.heappush(released, (max(at, arrivals[first]), first, len(released), urgency, op, block, p))

    costs = {
        (op, b): job.cost.message(op.kind, size, width=mix.profile.width(blocks, op.kind, (op.unit, b)))
        for op in mix.ops for b, size in enumerate(blocks[op.unit])
    }  # fmt: skip
    orders = [in_order(mix.profile, u, own) for u, own in enumerate(blocks)]
    for p in range(_PERIODS):
        for op in mix.ops:
            updated = op.kind.plain is Kind.AG_F and op.micro == 0 and mix.profile.units[op.unit].trainable
            if not (updated and job.cross_iteration):  # otherwise its reduce-scatter releases it
                for place, b in enumerate(orders[op.unit]):
                    release(0.0, op, b, place, p)
    ready: list[tuple[tuple[int, bool, int, int], Op, int, int]] = []  # heap by deadline; reductions first
    sent: list[tuple[int, Op, int, int]] = []  # slot, operation, block, period
    free = 0.0
    while released or ready:
        while released and (released[0][0] <= free or not ready):
            free = max(free, released[0][0])
            *_, urgency, op, b, p = heapq.heappop(released)
            heapq.heappush(ready, (urgency, op, b, p))
        urgency, op, b, p = heapq.heappop(ready)
        slot = bisect.bisect_right(arrivals, free) - 1
        sent.append((min(slot, urgency[0]), op, b, p))
        cost = costs[op, b]
        free += (cost.alpha if depth == 1 else cost.gap) + cost.transfer  # latency hides behind the message before it
        if op.kind in GATHER and job.cross_iteration:
            release(free + cost.copy + cost.update, Op(GATHER[op.kind], op.unit, 0), b, urgency[3], p)
    return _of_one_period(sent, length)


def _of_one_period(sent: Sequence[tuple[int, Op, int, int]], length: int) -> list[Message]:
    """Return the blocks in the order in which they were sent in the last period but one."""
    chosen: dict[tuple[Op, int], int] = {}  # -> unrolled slot
    for in_period in (lambda slot, p: slot // length == _PERIODS - 2, lambda slot, p: p == _PERIODS - 2):
        for slot, op, b, p in sent:  # the second time: blocks not sent in that period, as the order has not settled yet
            if in_period(slot, p):
                chosen.setdefault((op, b), slot - p * length)
    messages = [Message(op.kind, ((op.unit, b),), slot, micro=op.micro) for (op, b), slot in chosen.items()]
    return sorted(messages, key=lambda m: m.slot % length)
