"""Small changes to a plan: what a search by replays tries (:mod:`mdcs.planner.anneal`).

Every move gives another plan of the same job and budget, or None if it finds nothing to change. A move raises PlanError
where what it makes cannot be run; whether its bytes fit is not asked here.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Callable, Collection

from mdcs.plan.early import edge, in_order, parts_of_slot
from mdcs.plan.messages import Message, Plan
from mdcs.plan.mix import Mix
from mdcs.plan.period import Op
from mdcs.plan.strategy import Strategy, choices
from mdcs.plan.widths import sections_of
from mdcs.profile.link import Kind
from mdcs.simulator.recurrence import Trace

Move = Callable[[Plan, Trace, random.Random], Plan | None]
"""A change to a plan, whose trace shows where it stalls."""

_NEAR = (1, 1, 1, 2, 2, 3, 4, 6, 9, 14)  # how far messages go, in places: mostly a little
_MOST_PARTS = 8  # blocks of a unit


def fill_gap(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Send a later message where the link waits, the longest waits most often."""
    n = len(plan.messages)
    idle, last = [], trace.spans[-n - 1][1] if len(trace.spans) > n else 0.0
    for cost, (_, finish) in zip(trace.course.costs, trace.spans[-n:], strict=True):
        idle.append(max(0.0, finish - cost.transfer - cost.gap - last))
        last = finish
    if not any(idle):
        return None
    place = rng.choices(range(n), idle)[0]
    since = trace.spans[place - n][1] - trace.course.costs[place].transfer - idle[place]
    slot = max(0, bisect.bisect_right(trace.arrivals[-trace.slots - 1 : -1], since) - 1)
    return _moved(plan, min(n - 1, place + rng.choice((0, *_NEAR))), place, slot)


def hasten(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Send earlier what compute waits for, the longest waits most often."""
    waits = [b - a for a, b in zip(trace.arrivals[-trace.slots - 1 : -1], trace.begins[-trace.slots :], strict=True)]
    awaited = [q for q, (_, _, done, _) in enumerate(trace.course.slots) if waits[q] > 0 and done >= 0]
    if not awaited:
        return None
    q = rng.choices(awaited, [waits[q] for q in awaited])[0]
    i = trace.course.slots[q][2]
    place = max(0, i - rng.choice(_NEAR))
    return _moved(plan, i, place, plan.messages[place].slot)


def shift(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Send a message a few places or slots earlier or later."""
    i = rng.randrange(len(plan.messages))
    far = rng.choice(_NEAR) * rng.choice((-1, 1))
    if rng.random() < 0.5:
        place = min(len(plan.messages), max(0, i + far))
        return _moved(plan, i, place, rng.choice((0, plan.period.length)))
    first, last = plan.windows[i]
    slot = min(last, max(first, plan.unrolled(plan.messages[i]) + far)) % plan.period.length
    slots = [m.slot for m in plan.messages]
    ends = bisect.bisect_left(slots, slot), bisect.bisect_right(slots, slot)
    return _moved(plan, i, rng.choice((*ends, rng.randint(*ends))), slot)


def swap(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Let two messages near each other change places."""
    i = rng.randrange(len(plan.messages))
    j = i + rng.choice(_NEAR)
    if j >= len(plan.messages):
        return None
    messages = list(plan.messages)
    a, b = messages[i], messages[j]
    messages[i], messages[j] = dataclasses.replace(b, slot=a.slot), dataclasses.replace(a, slot=b.slot)
    return dataclasses.replace(plan, messages=tuple(messages))


def shift_run(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Issue several neighbours, all or those of one kind, a slot or two earlier or later."""
    begin, far = rng.randrange(len(plan.messages)), rng.choice((-2, -1, 1, 2))
    what = rng.choice((None, True, False))
    length, slots = plan.period.length, {}
    for i in range(begin, min(len(plan.messages), begin + rng.choice((2, 3, 4, 6, 8)))):
        message, (first, last) = plan.messages[i], plan.windows[i]
        if what is None or message.kind.is_gather is what:
            slots[i] = min(last, max(first, plan.unrolled(message) + far)) % length
    if not slots:
        return None
    messages = [dataclasses.replace(m, slot=slots[i]) if i in slots else m for i, m in enumerate(plan.messages)]
    return dataclasses.replace(plan, messages=tuple(sorted(messages, key=lambda m: m.slot)))


def restrategize(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Another strategy for a unit, or for two: often the second takes the first one's, so that bytes stay about the same."""
    units = range(len(plan.strategies))
    u = rng.choice(units)
    changes = {u: rng.choice([k for k in choices(plan.profile) if k is not plan.strategies[u]])}
    if len(units) > 1 and rng.random() < 0.6:
        v = u + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4)) if rng.random() < 0.5 else rng.choice(units)
        if v in units and v != u:
            changes[v] = plan.strategies[u] if rng.random() < 0.7 else rng.choice(choices(plan.profile))
    strategies = Mix(plan.job, tuple(changes.get(u, k) for u, k in enumerate(plan.strategies))).strategies
    return None if strategies == plan.strategies else _rebuilt(plan, changes, strategies, plan.blocks, rng)


def recut(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Send a unit in twice as many blocks, or half as many."""
    u = rng.randrange(len(plan.blocks))
    now = len(plan.blocks[u])
    count = rng.choice((now * 2, now // 2, now // 2))
    total, step = plan.padded(u), 16 * plan.world  # of which a block has a multiple
    if not 1 <= count <= _MOST_PARTS or total < step * count:
        return None
    cuts = [total * b // count // step * step for b in range(1, count)]
    inner = [edge(plan.profile, u, cut, step, total // count) for cut in cuts]
    sizes = tuple(b - a for a, b in itertools.pairwise([0, *inner, total]))
    return _rebuilt(plan, (u,), plan.strategies, (*plan.blocks[:u], sizes, *plan.blocks[u + 1 :]), rng)


def fuse_or_split(plan: Plan, trace: Trace, rng: random.Random) -> Plan | None:
    """Send a message and the next of its kind as one, or a fused one in two."""
    i = rng.randrange(len(plan.messages))
    a, messages = plan.messages[i], list(plan.messages)
    if len(a.parts) > 1:
        cut = rng.randrange(1, len(a.parts))
        messages[i : i + 1] = [dataclasses.replace(a, parts=a.parts[:cut]), dataclasses.replace(a, parts=a.parts[cut:])]
        return dataclasses.replace(plan, messages=tuple(messages))
    near = range(i + 1, min(len(messages), i + 6))
    j = next((j for j in near if (messages[j].kind, messages[j].micro) == (a.kind, a.micro)), None)
    if j is None:
        return None
    b = messages[j]
    if a.kind.is_gather:  # one that is gathered early is freed no earlier; a late one is late for both
        messages[i] = dataclasses.replace(a, parts=a.parts + b.parts)
        del messages[j]
    else:
        messages[j] = dataclasses.replace(b, parts=a.parts + b.parts)
        del messages[i]
    return dataclasses.replace(plan, messages=tuple(messages))


MOVES: dict[Move, float] = {
    fill_gap: 3, hasten: 1, shift: 5, swap: 3, shift_run: 2, restrategize: 3, recut: 0.2, fuse_or_split: 0.2,
}  # fmt: skip
"""All moves, and how often each is tried."""

SCHEDULE_MOVES = {move: often for move, often in MOVES.items() if move is not restrategize}
"""Those that leave the strategies as they are."""


def joined(plan: Plan, unit: int, *, apart: bool) -> Plan | None:
    """The plan with pairs of a unit's blocks as one: those that follow each other whatever they are sent for. None without any.

    Unless ``apart``, only blocks whose gradients come together. A pair is reduced where its last, gathered where its first was.
    """
    sent: dict[int, dict[tuple[Kind, int], int]] = {b: {} for b in range(len(plan.blocks[unit]))}
    for i, m in enumerate(plan.messages):
        for u, b in m.parts:
            if u == unit:
                stays = len(m.parts) > 1 or m.blocking
                sent[b][m.kind, m.micro] = -2 * i - 2 if stays else i  # which is no neighbour of anything
    parts = parts_of_slot(plan.profile, unit, plan.blocks[unit])
    sections = sections_of(plan.profile.layouts[unit], plan.blocks[unit])
    first, b = set[int](), 0  # of pairs
    while b + 1 < len(parts):
        neighbours = bool(sent[b]) and all(abs(i - sent[b + 1][op]) == 1 for op, i in sent[b].items())
        if neighbours and sections[b] == sections[b + 1] and (apart or parts[b] == parts[b + 1]):
            first.add(b)
            b += 1
        b += 1
    if not first:
        return None
    number = list(itertools.accumulate([b - 1 not in first for b in range(len(parts))]))  # of a block in the new plan, from 1
    messages = []
    for i, m in enumerate(plan.messages):
        (u, b), *more = m.parts
        if u == unit and not more and (b in first or b - 1 in first):
            other = sent[b + 1 if b in first else b - 1][m.kind, m.micro]
            if (i < other) is not m.kind.is_gather:
                continue
        messages.append(dataclasses.replace(m, parts=tuple([(v, number[c] - 1 if v == unit else c) for v, c in m.parts])))
    sizes = [0] * number[-1]
    for b, size in enumerate(plan.blocks[unit]):
        sizes[number[b] - 1] += size
    blocks = (*plan.blocks[:unit], tuple(sizes), *plan.blocks[unit + 1 :])
    return dataclasses.replace(plan, blocks=blocks, messages=tuple(messages))


# ---- what moves are made of


def _moved(plan: Plan, i: int, place: int, slot: int) -> Plan | None:
    """Message ``i`` before the one at ``place``, issued at ``slot`` or as near to it as neighbours and window allow."""
    messages, length = list(plan.messages), plan.period.length
    message = messages.pop(i)
    place -= place > i
    low = messages[place - 1].slot if place else 0
    high = messages[place].slot if place < len(messages) else length - 1
    slot = min(high, max(low, slot))
    first, last = plan.windows[i]
    if not (first <= slot <= last or first <= slot + length <= last):
        inside = [q for q in range(low, high + 1) if first <= q <= last or first <= q + length <= last]
        if not inside:
            return None
        slot = min(inside, key=lambda q: abs(q - slot))
    if place == i and slot == message.slot:
        return None
    messages.insert(place, dataclasses.replace(message, slot=slot))
    return dataclasses.replace(plan, messages=tuple(messages))


def _rebuilt(
    plan: Plan,
    units: Collection[int],
    strategies: tuple[Strategy, ...],
    blocks: tuple[tuple[int, ...], ...],
    rng: random.Random,
) -> Plan:
    """The plan with these strategies and blocks, which differ for ``units``: an operation that was sent stays where it was (its
    first block, of gathers; its last, of reductions), a new one is sent when it is ready, or shortly before it is needed.
    """
    mix = Mix(plan.job, strategies)
    new = dict.fromkeys(op for op in mix.ops if op.unit in units)
    at: dict[Op, Message] = {}
    for m in plan.messages:
        for op in dict.fromkeys(Op(m.kind, u, m.micro) for u, _ in m.parts):
            if op in new and not (op.kind.is_gather and op in at):
                at[op] = m
    messages: list[Message] = []
    for m in plan.messages:
        kept = tuple([p for p in m.parts if p[0] not in units])
        own = [op for op, here in at.items() if here is m]
        parts = kept + tuple([(op.unit, b) for op in own for b in in_order(plan.profile, op.unit, blocks[op.unit])])
        if len(m.parts) > 1 and parts:  # stays fused
            messages.append(dataclasses.replace(m, parts=parts))
        else:
            messages += [dataclasses.replace(m, parts=(part,)) for part in parts]
    for op in new:
        if op not in at:
            first, last = mix.window(op)
            slot = max(first, last - rng.choice((1, 2, 3, 4, 6, 8))) if op.kind.is_gather else first
            slot %= plan.period.length
            slots = [m.slot for m in messages]
            place = rng.randint(bisect.bisect_left(slots, slot), bisect.bisect_right(slots, slot))
            order = in_order(plan.profile, op.unit, blocks[op.unit])
            messages[place:place] = [Message(op.kind, ((op.unit, b),), slot, micro=op.micro) for b in order]
    return dataclasses.replace(plan, strategies=strategies, blocks=blocks, messages=tuple(messages))
