"""The schedule: what waits for what in an order of messages, as a struct of arrays.

The loops below turn a plan's messages, or another order of the same messages in a search, into the numbers that
everything else reads: validity, ledger, worst case, the runtime's queue and the replay. They use only numbers and
sequences of numbers, so that :mod:`mdcs.simulator.simulate` can compile them for searches.

The barrier is data: ``updated_by`` of a reduction is the message whose end runs its update: itself, or with a barrier
the last reduction of the period.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mdcs.plan.period import Op, Period, block_ready_fractions
from mdcs.profile.link import Kind

Numbers = Any
"""A list of numbers, or an array when the loops are compiled."""


@dataclass(frozen=True)
class Message:
    """One collective on the wire.

    - ``parts``: (unit, block) pairs of one type: of several units if it is fused, one block if a unit is partitioned.
    - ``slot``: index into the period. The message may start when compute arrives there; a reduction earlier, once its
      gradients are ready (:attr:`Schedule.ready`).
    - ``blocking``: compute waits at the slot until the message is done, before anything else is issued.
    - ``micro``: the micro-step whose slots use the message.
    """

    kind: Kind
    parts: tuple[tuple[int, int], ...]
    slot: int
    blocking: bool = False
    micro: int = 0


class Schedule(NamedTuple):
    """The consequences of an order of messages. Messages are indices in wire order, slots are unrolled.

    By message:

    - ``slot``: issue slot, on the scale of its window. ``blocking``: as in :class:`Message`.
    - ``waits_for``: the message that must be done before it starts (its end updates what is gathered), or -1.
    - ``updated_by``: the message whose end runs the update of a reduction; -1 for a gather.
    - ``ready``: the fraction of the slot before its own after which a reduction may leave, as DDP's buckets do: its
      gradients are ready then, if all messages ahead of it are issued and its bytes fit. 1: at its own slot.
    - ``needed_by``: the slot that cannot start before it is done; -1 for a reduce-scatter, whose gather is needed.
    - ``in_prologue``: whether it is sent before the first iteration: a gather for forward, issued in a backward slot.

    By slot: ``issued``, the number of messages issued by then; ``required``, the number that must be done when the slot
    begins (0 or less: in the period before). Messages end in order: who waits for one waits for all before it.

    By buffer (:func:`buffer_of`) ``opened_by``, the message that allocates it; by unit ``closed_by``, its last
    reduction. An operation's first message allocates, its last one frees. -1: none.
    """

    slot: Numbers
    waits_for: Numbers
    updated_by: Numbers
    ready: Numbers
    needed_by: Numbers
    blocking: Numbers
    in_prologue: Numbers
    issued: Numbers
    required: Numbers
    opened_by: Numbers
    closed_by: Numbers


class MessageTable(NamedTuple):
    """The values of messages, by number, that do not depend on their order."""

    reduces: Numbers  # whether it is a reduce-scatter or an all-reduce
    scatters: Numbers  # whether it is a reduce-scatter
    blocking: Numbers
    first: Numbers  # first slot of its window
    last: Numbers  # last slot of its window
    needed_by: Numbers  # slot that needs it, or -1
    early: Numbers  # fraction of the slot before ``first`` after which its gradients are ready
    prologue_from: Numbers  # the prologue sends it if it is issued at this slot or later
    begin: Numbers  # the parts of message i are begin[i] to begin[i + 1] - 1
    unit: Numbers  # by part
    block: Numbers  # by part: its block, counted over all units; -1 for a gather of what is not updated
    buffer: Numbers  # by part: the buffer that it is gathered into, or -1
    blocks: int
    update_slot: int  # reductions issued up to this slot are updated after the last reduction; -1: none


class MessageSeconds(NamedTuple):
    """Seconds of one message, or of messages as columns: by number, or in wire order, where ``update`` is all updates
    that its end runs, and ``lost`` includes what copying and updating cost.
    """

    alpha: Numbers  # latency on the link
    gap: Numbers  # pause after the previous message
    transfer: Numbers  # time of its bytes on the link
    copy: Numbers  # summing and unpacking
    update: Numbers
    idle: Numbers  # ``transfer`` while nothing computes
    lost: Numbers  # compute time lost while something computes beside it


class SizeTable(NamedTuple):
    """Bytes that do not depend on the order of messages: those of messages, by number, and those of units."""

    until_landed: Numbers  # from its start until it has landed
    until_updated: Numbers  # from its start until its update is done
    updating: Numbers  # during its update
    buffer_bytes: Numbers  # by buffer: from its first gather on; 0 if the unit is whole at rest
    gradient_bytes: Numbers  # by unit: until its last reduction has landed (reduce-scatter) or is done (all-reduce)


class Folded(NamedTuple):
    """Bytes of messages in wire order.

    - ``held``: bytes that it allocates and that stay after it. ``transient``: the most beside these while in flight.
    - ``freed``: bytes of slots and earlier messages that it frees when it is done.
    """

    held: Numbers
    freed: Numbers
    transient: Numbers


# ---- loops

NO_SLOT, BACKWARDS, OUTSIDE, STALE = 1, 2, 3, 4
"""Why it cannot run: no such slot; before the message ahead; outside of the window; gathered before its update."""
REASONS = 5


def arrange(t: MessageTable, turn: int, order: Numbers, slots: Numbers, s: Schedule) -> int:
    """Fill the schedule of an order: messages by number, and the slot at which each is issued.

    Return 0, or for an order that cannot run REASONS times the place of the first such message, plus the reason.
    """
    reduces, first, needed_by, begin, block, buffer = t.reduces, t.first, t.needed_by, t.begin, t.block, t.buffer
    slot_of, updated_by, opened_by, required = s.slot, s.updated_by, s.opened_by, s.required
    n, length = len(order), len(s.issued)
    reduced_at = [-1] * t.blocks
    for q in range(length):
        s.issued[q], required[q] = 0, -n
    for b in range(len(opened_by)):
        opened_by[b] = -1
    for u in range(len(s.closed_by)):
        s.closed_by[u] = -1
    last_reduction = n - 1
    while last_reduction >= 0 and not reduces[order[last_reduction]]:
        last_reduction -= 1
    slot_before, so_far = 0, 0.0
    for p in range(n):
        i, slot = order[p], slots[p]
        if slot < 0 or slot >= length:
            return REASONS * p + NO_SLOT
        if slot < slot_before:
            return REASONS * p + BACKWARDS
        later = 0 if slot >= first[i] else length  # in its window, the issue slot lies in the next period
        if slot + later > t.last[i]:
            return REASONS * p + OUTSIDE
        if slot > slot_before or p == 0:
            slot_before, so_far = slot, 0.0
        if so_far < 1:
            so_far = max(so_far, t.early[i]) if slot == first[i] and reduces[i] and not t.blocking[i] else 1.0
        update = -1
        if reduces[i]:
            update = last_reduction if slot <= t.update_slot else p
        waits_for = -1
        for k in range(begin[i], begin[i + 1]):
            if reduces[i]:
                reduced_at[block[k]] = s.closed_by[t.unit[k]] = p
                continue
            if block[k] >= 0:
                reduction = reduced_at[block[k]]
                if reduction < 0 or updated_by[reduction] >= p:
                    return REASONS * p + STALE
                waits_for = max(waits_for, updated_by[reduction])
            b = buffer[k]
            if b >= 0 and (opened_by[b] < 0 or slot + later < slot_of[opened_by[b]]):
                opened_by[b] = p
        s.issued[slot] += 1
        if t.blocking[i]:
            required[slot] = max(required[slot], p + 1)
        if needed_by[i] >= 0:
            needed, done = needed_by[i] - later, update if reduces[i] else p
            required[needed % length] = max(required[needed % length], done + 1 - needed // length * n)
        slot_of[p], s.waits_for[p], updated_by[p], s.ready[p] = slot + later, waits_for, update, so_far
        s.needed_by[p], s.blocking[p], s.in_prologue[p] = needed_by[i], t.blocking[i], slot >= t.prologue_from[i]
    best = -n
    for q in range(length):
        best = max(best, s.required[q] - n)
    for q in range(length):
        best = max(best, s.required[q])
        s.required[q] = best
        s.issued[q] += s.issued[q - 1] if q > 0 else 0
    return 0


def fold_seconds(
    by_number: MessageSeconds, lost_per_work: float, order: Numbers, s: Schedule, out: MessageSeconds
) -> None:
    """Fill the seconds of messages in wire order.

    - ``by_number``: seconds by number. ``lost_per_work``: compute seconds lost per second of copying and updating.
    """
    for p in range(len(order)):
        i = order[p]
        out.alpha[p], out.gap[p], out.transfer[p] = by_number.alpha[i], by_number.gap[i], by_number.transfer[i]
        out.copy[p], out.idle[p], out.update[p] = by_number.copy[i], by_number.idle[i], 0.0
    for p in range(len(order)):
        if s.updated_by[p] >= 0:
            out.update[s.updated_by[p]] += by_number.update[order[p]]
    for p in range(len(order)):
        out.lost[p] = by_number.lost[order[p]] + lost_per_work * (out.copy[p] + out.update[p])


def fold_bytes(t: MessageTable, sizes: SizeTable, order: Numbers, s: Schedule, out: Folded) -> None:
    """Fill the bytes of messages in wire order.

    Gradient shards stay until the update that reads them; updates run one after another, so the largest scratch counts.
    """
    n = len(order)
    scratch, landed = [0] * n, [0] * n  # bytes of its updates; gradient bytes freed before them
    for p in range(n):
        out.held[p], out.freed[p] = 0, 0
    for b in range(len(s.opened_by)):
        if s.opened_by[b] >= 0:
            out.held[s.opened_by[b]] += sizes.buffer_bytes[b]
    for u in range(len(s.closed_by)):
        p = s.closed_by[u]
        if p >= 0:
            if t.scatters[order[p]]:
                landed[p] += sizes.gradient_bytes[u]
                out.freed[p] += sizes.gradient_bytes[u]
            else:
                out.freed[s.updated_by[p]] += sizes.gradient_bytes[u]
    for p in range(n):
        i, update = order[p], s.updated_by[p]
        if update >= 0:
            scratch[update] = max(scratch[update], sizes.updating[i])
            if update != p:
                out.held[p] += sizes.until_updated[i]
                out.freed[update] += sizes.until_updated[i]
    for p in range(n):
        i = order[p]
        own = sizes.until_updated[i] if s.updated_by[p] == p else 0
        out.transient[p] = own + max(sizes.until_landed[i], scratch[p] - landed[p])


# ---- values of messages

BY_MESSAGE = MessageTable._fields[: MessageTable._fields.index("begin")]
"""The columns of a :class:`MessageTable` that have a value per message."""


MessageValues = tuple[tuple[Any, ...], tuple[tuple[int, int], ...], int]


def message_values(period: Period, message: Message, blocks: Sequence[tuple[int, ...]]) -> MessageValues:
    """Return values of a message that do not depend on its slot and its place. ``blocks``: those of each unit.

    - its values in the columns :data:`BY_MESSAGE`;
    - by part the buffer that it is gathered into (or -1), and 1 if the block is updated in the same period (reduced, or
      gathered behind its update), else 0;
    - the elements of all its blocks, padding included.
    """
    parts = message.parts
    sizes = (blocks[parts[0][0]],) if len(parts) == 1 else tuple([blocks[u] for u, _ in parts])
    return _message_values(period, message.kind, parts, message.micro, message.blocking, sizes)


@lru_cache(maxsize=1 << 14)  # the plans that a planner compares share most of their messages
def _message_values(
    period: Period, kind: Kind, parts: tuple[tuple[int, int], ...], micro: int, blocking: bool,
    sizes: tuple[tuple[int, ...], ...],
) -> MessageValues:  # fmt: skip
    ops = [Op(kind, u, micro) for u, _ in parts]
    windows = [period.window(op) for op in ops]
    first, last = max([opens for opens, _ in windows]), min([closes for _, closes in windows])
    plain, profile, early = kind.plain, period.profile, 1.0
    if not kind.is_gather and profile.has_gradient_times:
        early = max(
            block_ready_fractions(profile, u, own)[b]
            for (u, b), own, (opens, _) in zip(parts, sizes, windows, strict=True)
            if opens == first
        )
    needed_by = -1 if plain is Kind.RS else min(map(period.needed_by, ops))
    prologue_from = 0 if plain is Kind.AG_F else period.turn if plain is Kind.AG_B else period.length
    updated = not kind.is_gather or (plain is Kind.AG_F and micro == 0)
    return (
        (int(not kind.is_gather), int(plain is Kind.RS), int(blocking), first, last, needed_by, early, prologue_from),
        tuple([(buffer_of(period, op), int(updated and profile.units[op.unit].trainable)) for op in ops]),
        sum([own[b] for (_, b), own in zip(parts, sizes, strict=True)]),
    )


def buffer_of(period: Period, op: Op) -> int:
    """Return the number of the buffer that an operation gathers into, or -1."""
    if not op.kind.is_gather:
        return -1
    return 2 * (op.unit * period.micro_steps + op.micro) + (op.kind.plain is Kind.AG_B)


def message_table(period: Period, blocks: Sequence[tuple[int, ...]], messages: Sequence[Message]) -> MessageTable:
    """Return the table of a plan's messages, numbered in wire order."""
    starts = [0, *itertools.accumulate(map(len, blocks))]  # number of each unit's first block
    begin, rows = [0], list[tuple[Any, ...]]()
    units, numbers, buffers = list[int](), list[int](), list[int]()
    for m in messages:
        row, parts, _ = message_values(period, m, blocks)
        rows.append(row)
        for (u, b), (buffer, is_updated) in zip(m.parts, parts, strict=True):
            units.append(u)
            numbers.append(starts[u] + b if is_updated else -1)
            buffers.append(buffer)
        begin.append(len(units))
    columns = {name: [row[i] for row in rows] for i, name in enumerate(BY_MESSAGE)}
    return MessageTable(
        **columns, begin=begin, unit=units, block=numbers, buffer=buffers, blocks=starts[-1],
        update_slot=period.update_slot,
    )


def empty_schedule(messages: int, period: Period) -> Schedule:
    """Return a schedule for so many messages, to be filled by :func:`arrange`."""
    n, length, units = messages, period.length, len(period.profile.units)
    return Schedule(
        [0] * n, [0] * n, [0] * n, [0.0] * n, [0] * n, [0] * n, [0] * n, [0] * length, [0] * length,
        [0] * (2 * units * period.micro_steps), [0] * units,
    )  # fmt: skip
