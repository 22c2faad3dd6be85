"""Partitioned communication, nearest deadline first.

What ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019) do at run time, done ahead of
it: the link, whenever it is free, takes the block whose unit is needed first among those that are ready. The
order that this gives in the steady state becomes the plan. With unlimited memory and free updates it is optimal
for one link.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from mdcs.link import Kind, wire_bytes
from mdcs.plan import Op, Plan
from mdcs.schedulers.mix import Draft, Mix

_PERIODS = 4  # simulated; the orders of the last but one are the plan's


@dataclass(frozen=True)
class Priority:
    """``block_bytes`` 0: the link's block."""

    block_bytes: int = 0

    def schedule(self, mix: Mix) -> Plan:
        blocks = mix.cut(self.block_bytes or mix.profile.link.block)
        return mix.plan("priority", blocks, nearest_deadline_first(mix, blocks))


def nearest_deadline_first(mix: Mix, blocks: tuple[tuple[int, ...], ...]) -> list[Draft]:
    profile, period, link, opt = mix.profile, mix.period, mix.profile.link, mix.profile.optimizer
    length = period.length

    # Instances of (operation, block), by the absolute slot at which they can be issued and at which they are needed.
    opens: dict[int, list[tuple[int, Op, int]]] = {}
    needed: dict[int, list[tuple[Op, int, int]]] = {}
    for p in range(_PERIODS):
        for op in mix.ops:
            first, last = mix.window(op)
            for b in range(len(blocks[op.unit])):
                needed.setdefault(p * length + last, []).append((op, b, p))
                updated = op.kind is Kind.AG_F and op.micro == 0 and profile.units[op.unit].trainable
                if updated and mix.cross_iteration:
                    continue  # opened by its reduce-scatter; without cross_iteration by the barrier
                opens.setdefault(p * length + first, []).append((p, op, b))

    ready: list[tuple[int, bool, int, int, Op, int, int]] = []  # heap by deadline; reductions first
    waiting: list[tuple[float, int, Op, int, int]] = []  # gathers that wait for an update, by time
    sent: dict[tuple[Op, int, int], tuple[int, int]] = {}  # -> (unrolled slot, sequence)
    done: dict[tuple[Op, int, int], float] = {}
    free = now = 0.0
    order = 0

    def push(op: Op, block: int, p: int) -> None:
        heapq.heappush(ready, (p * length + mix.window(op)[1], op.kind.is_gather, op.unit, block, op, block, p))

    def send(slot: int, until: float) -> bool:
        """Start the most urgent block before ``until``; False if there is none."""
        nonlocal free, order
        begin = max(free, now)
        if not ready and waiting:
            begin = max(begin, waiting[0][0])
        if begin >= until:
            return False
        while waiting and waiting[0][0] <= begin:
            _, _, op, block, p = heapq.heappop(waiting)
            push(op, block, p)
        if not ready:
            return False
        *_, op, block, p = heapq.heappop(ready)
        width = profile.param_bytes if op.kind.is_gather else profile.grad_bytes
        elements = blocks[op.unit][block]
        wire = wire_bytes(op.kind, elements * width, profile.world, profile.reduce_scatter)
        alpha = link.alpha_of(op.kind) if link.depth == 1 else 0.0  # hidden behind the message before it
        free = begin + alpha + link.beta_of(op.kind) * wire
        order += 1
        done[op, block, p] = free
        sent[op, block, p] = slot - p * length, order
        if op.kind is Kind.RS and mix.cross_iteration:
            gather = Op(Kind.AG_F, op.unit, 0)
            update = elements / profile.world * opt.seconds_per_element + opt.seconds_per_run
            heapq.heappush(waiting, (free + update, order, gather, block, p))
        return True

    for q in range(period.turn, _PERIODS * length):
        for p, op, b in opens.get(q, ()):
            if p or op.kind.is_gather:
                push(op, b, p)
        if q < length:  # the prologue: nothing has been reduced yet
            for op, b, p in needed.get(q, ()):
                if (op, b, p) not in sent and op.kind.is_gather:
                    done[op, b, p] = now
        else:
            for op, b, p in needed.get(q, ()):
                while (op, b, p) not in done:
                    if not send(q, float("inf")):
                        raise AssertionError(f"{op} of period {p} cannot be sent by slot {q}")
                now = max(now, done[op, b, p])
        end = now + profile.slots[period.slots[q % length].place].seconds
        while send(q, end):
            pass
        now = end

    drafts = []
    for (op, b, p), (slot, seq) in sent.items():
        if p != _PERIODS - 2:
            continue
        first, last = mix.window(op)
        slot = min(max(slot, first), last)
        # At the head of a period, what was left over from the one before goes first.
        drafts.append((slot % length, slot < length, seq, Draft(op.kind, ((op.unit, b),), slot, op.micro)))
    drafts.sort(key=lambda d: d[:3])
    return [d for *_, d in drafts]
