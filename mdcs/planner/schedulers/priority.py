"""Partitioned communication, nearest deadline first.

ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019) do this at run time. Here it is done in
advance. Whenever the link is free, it takes the ready block whose unit is needed first. The resulting order in steady
state becomes the plan. It is optimal for one link, with unlimited memory and free updates.

Messages slow compute down, so real slots are longer than the profiled ones and leave more time for messages. The order
is therefore computed again with the slot times of a replay of the plan (:func:`settled`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.early import in_order
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Draft, Mix
from mdcs.plan.period import Op
from mdcs.plan.widths import width_of
from mdcs.planner.schedulers.wfbp import Blocks
from mdcs.profile.contents import Contention
from mdcs.profile.link import GATHER, Kind
from mdcs.simulator.simulate import steady_state

_ROUNDS = 3  # plans made from the replay of the plan before
_PERIODS = 4  # simulated periods; the plan takes the order of the last but one


@dataclass(frozen=True)
class Priority(Blocks):
    """Blocks, sent in the order in which their units are needed, among the ready ones."""

    name: ClassVar[str] = "priority"

    def schedule(self, mix: Mix) -> Plan:
        """Return the settled nearest-deadline order (:func:`settled`)."""
        return settled(mix, self.name, self.cut(mix))


def settled(mix: Mix, name: str, blocks: tuple[tuple[int, ...], ...], windows: Windows | None = None) -> Plan:
    """Return the fastest plan by replay, without a budget, of several rounds of :func:`nearest_deadline_first`.

    The first round uses the profiled slot times. Every later round uses the slot times in the replay of the plan
    before.
    """
    plan = best = mix.plan(name, blocks, nearest_deadline_first(mix, blocks, windows))
    if mix.profile.contention == Contention():  # without contention the first order already had the right slot times
        return plan
    now = shortest = steady_state(plan)
    for _ in range(_ROUNDS):
        seconds = [end - begin for _, begin, end in now.slots]
        plan = mix.plan(name, blocks, nearest_deadline_first(mix, blocks, windows, seconds))
        now = steady_state(plan)
        if now.period_s < shortest.period_s:
            best, shortest = plan, now
    return best


Instance = tuple[Op, int, int]
"""(operation, block of its unit, period of the operation's window)."""


Windows = dict[Op, tuple[int, int]]
"""For every operation, the first slot at which it is sent and the slot at which it must be done (unrolled)."""


def nearest_deadline_first(
    mix: Mix,
    blocks: tuple[tuple[int, ...], ...],
    windows: Windows | None = None,
    seconds: Sequence[float] | None = None,
) -> list[Draft]:
    """Return drafts: walk the slots, and whenever the link is free send the ready block with the nearest deadline.

    - ``windows``: windows narrower than the mix's own. A gather then holds its buffer later, and a reduction frees its
      gradient earlier.
    - ``seconds``: seconds of the period's slots, if not the profiled ones.
    """
    length, turn = mix.period.length, mix.period.turn
    seconds = seconds or [mix.profile.slots[slot.place].seconds for slot in mix.period.slots]
    windows = windows or {op: mix.window(op) for op in mix.ops}
    opens, needed = _calendar(mix, blocks, windows)
    link = _Link(mix, blocks, windows)
    now = 0.0
    for q in range(turn, _PERIODS * length):
        for op, b, p in opens.get(q, ()):
            if p or op.kind.is_gather:
                link.open(op, b, p)
        link.permit(q)
        for op, b, p in needed.get(q, ()):
            if q < length:  # the prologue: nothing has been reduced yet
                if op.kind.is_gather:
                    link.done.setdefault((op, b, p), now)
                continue
            while (op, b, p) not in link.done:
                if not link.send(q, now, float("inf")):
                    raise AssertionError(f"{op} of period {p} cannot be sent by slot {q}")
            now = max(now, link.done[op, b, p])
        now = link.run(q, now, seconds[q % length])
    return _drafts(mix, link)


def _calendar(
    mix: Mix, blocks: tuple[tuple[int, ...], ...], windows: Windows
) -> tuple[dict[int, list[Instance]], dict[int, list[Instance]]]:
    """Return the instances that become ready, and those that are needed, at each slot since the first period began."""
    opens: dict[int, list[Instance]] = {}
    needed: dict[int, list[Instance]] = {}
    for p in range(_PERIODS):
        for op in mix.ops:
            first, last = (p * mix.period.length + slot for slot in windows[op])
            updated = op.kind.plain is Kind.AG_F and op.micro == 0 and mix.profile.units[op.unit].trainable
            for b in range(len(blocks[op.unit])):
                needed.setdefault(last, []).append((op, b, p))
                if not (updated and mix.cross_iteration):  # otherwise its reduce-scatter makes it ready
                    opens.setdefault(first, []).append((op, b, p))
    return opens, needed


class _Link:
    """The link in virtual time. It takes the ready block that is needed first."""

    def __init__(self, mix: Mix, blocks: tuple[tuple[int, ...], ...], windows: Windows) -> None:
        self.mix, self.blocks, self.windows = mix, blocks, windows
        self.done: dict[Instance, float] = {}
        self.sent: dict[Instance, int] = {}  # -> slot since the first period began; in the order of sending
        self._began = self._free = 0.0  # begin and end of the last message
        self._ready: list[tuple[int, bool, int, int, int, Op, int]] = []  # heap by deadline; reductions first
        orders = [in_order(mix.profile, u, own) for u, own in enumerate(blocks)]
        self._places = [{b: place for place, b in enumerate(order)} for order in orders]
        self._waiting: list[tuple[float, int, Op, int, int]] = []  # gathers that wait for an update; heap by time
        self._updated: dict[int, list[Instance]] = {}  # slot -> updated gathers whose window begins there

    def permit(self, slot: int) -> None:
        for op, block, p in self._updated.pop(slot, ()):
            self.open(op, block, p)

    def _take_updated(self, slot: int, now: float) -> None:
        """Make gathers ready whose update is done and whose window has begun."""
        while self._waiting and self._waiting[0][0] <= now:
            op, block, p = heapq.heappop(self._waiting)[2:]
            first = p * self.mix.period.length + self.windows[op][0]
            if first <= slot:
                self.open(op, block, p)
            else:
                self._updated.setdefault(first, []).append((op, block, p))

    def open(self, op: Op, block: int, p: int) -> None:
        deadline = p * self.mix.period.length + self.windows[op][1]
        place = self._places[op.unit][block]
        heapq.heappush(self._ready, (deadline, op.kind.is_gather, op.unit, place, block, op, p))

    def run(self, slot: int, now: float, work: float) -> float:
        """Send messages while compute runs for ``work`` seconds, slowed by them. Return when compute ends."""
        slowdown = 1 + self.mix.profile.interference
        busy_until = self._free  # end of the message in flight
        while True:
            beside = max(0.0, busy_until - now)
            if work * slowdown <= beside:
                return now + work * slowdown
            now, work = now + beside, work - beside / slowdown
            if not self.send(slot, now, now + work):
                return now + work
            alone = max(0.0, self._began - now)
            now, work, busy_until = now + alone, work - alone, self._free

    def send(self, slot: int, now: float, until: float) -> bool:
        """Start the most urgent block at ``now`` or later, but before ``until``. Return False if there is none."""
        begin = max(self._free, now)
        while not self._ready and self._waiting and self._waiting[0][0] < until:
            begin = max(begin, self._waiting[0][0])
            self._take_updated(slot, begin)
        if begin >= until:
            return False
        self._take_updated(slot, begin)
        if not self._ready:
            return False
        *_, block, op, p = heapq.heappop(self._ready)
        width = width_of(self.mix.profile, self.blocks, op.kind, (op.unit, block))
        cost = self.mix.job.cost.message(op.kind, self.blocks[op.unit][block], width=width)
        before = cost.alpha if self.mix.profile.link.depth == 1 else cost.gap  # latency hides behind the message before it
        self._began, self._free = begin, begin + before + cost.transfer
        self.done[op, block, p] = self._free
        self.sent[op, block, p] = slot
        if op.kind in GATHER and self.mix.cross_iteration:
            updated = self._free + cost.copy + cost.update
            heapq.heappush(self._waiting, (updated, len(self.sent), Op(GATHER[op.kind], op.unit, 0), block, p))
        return True


def _drafts(mix: Mix, link: _Link) -> list[Draft]:
    """Return the blocks in the order in which they were sent in the last period but one."""
    length, period = mix.period.length, _PERIODS - 2
    chosen: dict[tuple[Op, int], int] = {}  # -> unrolled slot
    for (op, b, p), sent in link.sent.items():
        if sent // length == period:
            chosen.setdefault((op, b), sent - p * length)
    for (op, b, p), sent in link.sent.items():  # blocks not sent in that period, because the order has not settled yet
        if p == period:
            chosen.setdefault((op, b), sent - p * length)
    drafts = [Draft(op.kind, ((op.unit, b),), slot, op.micro) for (op, b), slot in chosen.items()]
    return sorted(drafts, key=lambda draft: draft.slot % length)
