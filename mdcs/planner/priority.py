"""Partitioned communication, nearest deadline first: a policy over the replay.

ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019) do this at run time, here it is done ahead:
whenever the link is free, it takes the ready block whose unit is needed first. The order in steady state becomes the
plan. It is optimal for one link, with unlimited memory and free updates.

The replay of a plan says when compute arrives at each slot, with all that messages cost. The order that follows is
replayed again, because it moves these times (:func:`settled`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mdcs.options import option
from mdcs.plan.period import Op, blocks_by_readiness
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.planner.schedulers import Blocks, StrategyAssignment, ready_slot
from mdcs.profile.link import GATHER, Kind
from mdcs.simulator.simulate import Steady, replay, undelayed

COARSER = 8  # saturation blocks in a coarse block: plans with few messages leave time for more replays
_ROUNDS = 3  # orders made from each first times, the later ones from the replay of the plan before
_WORSE = 2  # sizes of blocks in a row that are slower than the best: smaller ones are not tried
_MOST = 128  # messages of a plan whose units are cut finer: more of them leave little to gain
_SMALLEST, _GAIN = 64 << 10, 0.005  # bytes of a block that is tried, and the relative gain that is worth more messages
_PERIODS = 4  # of the list schedule; the plan takes the order of the last but one

Windows = dict[Op, tuple[int, int]]
"""For every operation, the first slot at which it is sent and the slot at which it must be done (unrolled)."""


class _Block(NamedTuple):
    """One block of an operation in one period. The most urgent is the least."""

    urgency: tuple[int, bool, int, int]  # deadline (slot), whether a gather, unit, place among the unit's blocks
    op: Op
    number: int
    period: int


@dataclass(frozen=True)
class Priority(Blocks):
    """Blocks, sent in the order in which their units are needed, among the ready ones."""

    name: ClassVar[str] = "priority"
    block_mib: float | None = option(
        None, "size of a block, MiB; null: the fastest by replay, or, where that is as fast, the largest", above=0,
    )  # fmt: skip

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the settled nearest-deadline order (:func:`settled`)."""
        best = settled(mix, self.name, self.partition(mix))
        if self.block_mib is not None:
            return best
        step_s, size, own = replay(best).period_s, mix.profile.block, best.blocks
        for coarser in (2 * size, 4 * size, COARSER * size):
            if (blocks := mix.partition(coarser)) != best.blocks:
                plan = settled(mix, self.name, blocks)
                if (now_s := replay(plan).period_s) * (1 - _GAIN) > step_s:
                    break
                best, step_s = plan, min(step_s, now_s)
        blocks, worse = own, 0 if best.blocks == own else _WORSE
        while worse < _WORSE and (size := size // 2) >= _SMALLEST and len(best.messages) <= _MOST:
            if (finer := mix.partition(size)) != blocks:
                blocks, plan = finer, settled(mix, self.name, finer)
                if (now_s := replay(plan).period_s) < step_s * (1 - _GAIN):
                    best, step_s, worse = plan, now_s, 0
                else:
                    worse += 1
        return best


def settled(
    mix: StrategyAssignment, name: str, blocks: tuple[tuple[int, ...], ...], windows: Windows | None = None
) -> Plan:
    """Return the fastest plan by replay, without a budget, of several rounds of :func:`nearest_deadline_first`.

    The first rounds let compute wait for messages. Then come rounds with the arrivals of the replay of a plan that
    sends blocks when they are ready, unless ``windows`` are given, narrower than the mix's own: a gather then holds its
    buffer later, and a reduction frees its gradient earlier.
    """
    within = windows or {op: mix.period.window(op) for op in mix.ops}

    def ordered(times: Steady, waits: bool) -> Plan:
        return mix.plan(name, blocks, nearest_deadline_first(mix, blocks, within, times, waits=waits))

    plan = best = ordered(undelayed(mix.period), True)
    times = shortest = replay(plan).steady()
    for waits in (True, False) if windows is None else (True,):
        if not waits:
            ready = [
                Message(op.kind, ((op.unit, b),), ready_slot(mix, op), micro=op.micro)
                for op in mix.ops for b in blocks_by_readiness(mix.profile, op.unit, blocks[op.unit])
            ]  # fmt: skip
            ready.sort(key=lambda m: (m.slot, m.kind.is_gather))
            times = replay(mix.plan(name, blocks, ready)).steady()
        for _ in range(_ROUNDS - waits):
            before, plan = plan, ordered(times, waits)
            if plan in (before, best):
                break
            times = replay(plan).steady()
            if times.period_s < shortest.period_s:
                best, shortest = plan, times
    return best


def nearest_deadline_first(
    mix: StrategyAssignment, blocks: Sequence[tuple[int, ...]], windows: Windows, times: Steady, *, waits: bool = True
) -> list[Message]:
    """Return messages: whenever the link is free, send the ready block with the nearest deadline.

    - ``times``: when compute arrives at the slots, and how long they take. ``waits``: whether compute waits at a slot
      for the blocks that are needed there, and arrives later at all that follow.
    """
    length, depth = mix.period.length, mix.profile.link.depth
    sizes = [(op, b, size) for op in mix.ops for b, size in enumerate(blocks[op.unit])]
    costs = {(op, b): mix.job.cost.message(op.kind, ((op.unit, size),)) for op, b, size in sizes}
    orders = [blocks_by_readiness(mix.profile, u, own) for u, own in enumerate(blocks)]
    # slot -> blocks whose window begins there, and when they are ready
    opening: dict[int, list[tuple[float, _Block]]] = {}
    needed: dict[int, list[_Block]] = {}  # slot -> blocks that it waits for
    for p in range(_PERIODS):
        for op in mix.ops:
            first, last = (p * length + slot for slot in windows[op])
            is_updated = op.kind.plain is Kind.AG_F and op.micro == 0 and mix.profile.units[op.unit].trainable
            for place, b in enumerate(orders[op.unit]):
                block = _Block((last, op.kind.is_gather, op.unit, place), op, b, p)
                needed.setdefault(last, []).append(block)
                if not is_updated:  # otherwise its reduce-scatter makes it ready
                    opening.setdefault(first, []).append((0.0, block))
    released: list[tuple[float, _Block]] = []  # heap by time
    ready: list[_Block] = []  # heap by deadline; reductions first
    done: dict[_Block, float] = {}
    sent: list[tuple[int, _Block]] = []
    now = free = 0.0

    def send(slot: int, until: float) -> bool:
        """Send the most urgent block, if the link is free and a block ready before ``until``."""
        nonlocal free
        while released and (released[0][0] <= free or (not ready and released[0][0] < until)):
            at, block = heapq.heappop(released)
            free = max(free, at)
            heapq.heappush(ready, block)
        if not ready or free >= until:
            return False
        block = heapq.heappop(ready)
        cost = costs[block.op, block.number]
        sent.append((min(slot, block.urgency[0]), block))  # a block may be late for arrivals that are given
        free += (cost.alpha if depth == 1 else cost.gap) + cost.transfer  # latency hides behind the message before it
        done[block] = free
        if block.op.kind in GATHER:
            at, gather = free + cost.copy + cost.update, Op(GATHER[block.op.kind], block.op.unit, 0)
            first, last = (block.period * length + each for each in windows[gather])
            follower = _Block((last, True, *block.urgency[2:]), gather, block.number, block.period)
            if first > slot:
                opening.setdefault(first, []).append((at, follower))
            else:
                heapq.heappush(released, (at, follower))
        return True

    for q in range(_PERIODS * length):
        for at, block in opening.pop(q, ()):
            heapq.heappush(released, (max(at, now), block))
        for block in needed.get(q, ()) if waits else ():
            while block not in done:
                if not send(q, math.inf):
                    raise AssertionError(f"{block.op} of period {block.period} cannot be sent by slot {q}")
            now = max(now, done[block])
        begin, end = times.slots[q % length][1:]
        ends = now + (end - begin) if waits else times.arrival(q + 1)
        while send(q, ends):
            pass
        now = ends
    while send(_PERIODS * length - 1, math.inf):  # what the link did not come to
        pass
    return _of_one_period(sent, length)


def _of_one_period(sent: Sequence[tuple[int, _Block]], length: int) -> list[Message]:
    """Return the blocks in the order in which they were sent in the last period but one."""
    chosen: dict[tuple[Op, int], int] = {}  # -> unrolled slot
    last = _PERIODS - 2
    in_period = [each for each in sent if each[0] // length == last]
    # Then blocks that were not sent in that period, as the order has not settled yet.
    for slot, block in (*in_period, *(each for each in sent if each[1].period == last)):
        chosen.setdefault((block.op, block.number), slot - block.period * length)
    messages = [Message(op.kind, ((op.unit, b),), slot, micro=op.micro) for (op, b), slot in chosen.items()]
    return sorted(messages, key=lambda m: m.slot % length)
