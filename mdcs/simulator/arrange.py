"""Input of a replay from an order of messages, for a search that compares thousands of orders.

A plan is validated, stored and run. An order is only the messages by number, with the issue slot of each. These loops
compute the values that depend on the order: which message waits for which, which allocates a buffer, which is the last
to need a gradient. :class:`mdcs.plan.plan.Plan` and :class:`mdcs.plan.ledger.Ledger` compute the same values for
one plan. Tests check that both agree.
"""

from __future__ import annotations

from typing import NamedTuple

from mdcs.plan.worst_case import fill_demands
from mdcs.simulator.kernel import MessageArrays, Numbers


class MessageTable(NamedTuple):
    """The values of all messages, by number, that do not depend on their order. Slots are unrolled, sizes are bytes."""

    reduces: Numbers  # whether it is a reduce-scatter or an all-reduce
    scatters: Numbers  # whether it is a reduce-scatter
    is_forward: Numbers  # whether it is an all-gather before forward
    is_backward: Numbers  # whether it is an all-gather before backward
    follows_update: Numbers  # whether it gathers parameters that the same period has updated
    blocking: Numbers
    first: Numbers  # first slot of its window
    last: Numbers  # slot that needs it
    early: Numbers  # fraction of the slot before ``first`` after which its gradients are ready
    alpha: Numbers
    gap: Numbers
    transfer: Numbers
    copy: Numbers
    update: Numbers
    idle: Numbers
    lost: Numbers  # compute seconds lost, without copying and updating
    lost_per_work: Numbers  # compute seconds lost per second of copying and updating
    until_landed: Numbers  # bytes from its start until it has landed
    until_updated: Numbers  # bytes from its start until its update is done
    updating: Numbers  # bytes during its update
    begin: Numbers  # the parts of message i are begin[i] to begin[i + 1] - 1
    block: Numbers  # by part: its block, counted over all units
    unit: Numbers  # by part
    buffer: Numbers  # by part: the buffer that it is gathered into, or -1
    buffer_bytes: Numbers  # by buffer: bytes from its first gather on; 0 if the unit is whole at rest
    gradient_bytes: Numbers  # by unit: bytes until its last reduction
    trained: Numbers  # by unit
    replicated: Numbers  # by unit: whether it is dp
    forward: Numbers  # by unit: the first slot of its first forward pass
    blocks: int
    barrier: bool  # whether the last reduction updates all units


BY_MESSAGE = MessageTable._fields[: MessageTable._fields.index("buffer_bytes")]
"""Fields with one number per message or part. The other fields depend on the job or on the mix."""


def place(s: MessageTable, turn: int, order: Numbers, slots: Numbers, issued: Numbers, needed: Numbers) -> bool:
    """Fill ``issued`` and ``needed``, and return whether the order is valid.

    - ``issued[q]``: number of messages issued by slot q.
    - ``needed[q]``: number of messages that must be done when slot q begins (unrolled).

    An order is valid if all messages lie in their windows and nothing is gathered before its update.
    """
    n, length = len(order), len(issued)
    reduced = [False] * s.blocks
    last_reduction = -1
    for q in range(length):
        issued[q], needed[q] = 0, -n
    for p in range(n):
        i, slot = order[p], slots[p]
        later = 0 if slot >= s.first[i] else length  # in its window, the issue slot lies in the next period
        if slot + later > s.last[i] or (p > 0 and slot < slots[p - 1]):
            return False
        issued[slot] += 1
        if s.blocking[i] or not s.scatters[i]:  # no slot needs a reduce-scatter: its gather is needed instead
            waits = slot if s.blocking[i] else s.last[i] - later
            needed[waits % length] = max(needed[waits % length], p + 1 - waits // length * n)
        if s.reduces[i]:
            last_reduction = p
        for k in range(s.begin[i], s.begin[i + 1]):
            if s.reduces[i]:
                reduced[s.block[k]] = True
            elif s.follows_update[i] and s.trained[s.unit[k]] and not reduced[s.block[k]]:
                return False
    if s.barrier:
        for p in range(last_reduction + 1):
            i = order[p]
            if s.reduces[i] and slots[p] > turn:
                return False
            for k in range(s.begin[i], s.begin[i + 1]):
                if s.follows_update[i] and s.trained[s.unit[k]]:
                    return False
        for u in range(len(s.forward)):
            if s.trained[u] and s.replicated[u]:
                needed[s.forward[u]] = max(needed[s.forward[u]], last_reduction + 1)
    best = -n
    for q in range(length):
        best = max(best, needed[q] - n)
    for q in range(length):
        best = max(best, needed[q])
        needed[q] = best
        issued[q] += issued[q - 1] if q > 0 else 0
    return True


def arrange(s: MessageTable, turn: int, length: int, order: Numbers, slots: Numbers, m: MessageArrays) -> None:
    """Fill ``m`` with the messages of an order that :func:`place` found valid. ``length``: slots of the period."""
    n, last_reduction = len(order), -1
    reduced_at = [-1] * s.blocks
    last_of = [-1] * len(s.gradient_bytes)  # by unit: its last reduction
    first_of, first_slot = [-1] * len(s.buffer_bytes), [0] * len(s.buffer_bytes)  # by buffer: its first gather
    all_scratch, all_updates, shards_kept, replicated = 0, 0.0, 0, 0
    for p in range(n):
        i = order[p]
        slot = slots[p] if slots[p] >= s.first[i] else slots[p] + length
        if s.reduces[i]:
            last_reduction = p
            all_scratch, all_updates = max(all_scratch, s.updating[i]), all_updates + s.update[i]
        for k in range(s.begin[i], s.begin[i + 1]):
            if s.reduces[i]:
                reduced_at[s.block[k]] = last_of[s.unit[k]] = p
            elif s.buffer[k] >= 0 and (first_of[s.buffer[k]] < 0 or slot < first_slot[s.buffer[k]]):
                first_of[s.buffer[k]], first_slot[s.buffer[k]] = p, slot
    slot_before, so_far = -1, 0.0
    for p in range(n):
        i, slot = order[p], slots[p]
        if slot != slot_before:
            slot_before, so_far = slot, 0.0
        if so_far < 1:
            so_far = max(so_far, s.early[i]) if slot == s.first[i] and s.reduces[i] and not s.blocking[i] else 1.0
        full = gradients = 0
        waits_for = -1
        for k in range(s.begin[i], s.begin[i + 1]):
            u, b = s.unit[k], s.buffer[k]
            if s.reduces[i] and last_of[u] == p:
                gradients += s.gradient_bytes[u]
                last_of[u] = -1  # counts the gradient once, even if the message has several parts of the unit
                if s.replicated[u]:
                    replicated += s.gradient_bytes[u]
            if s.follows_update[i]:
                waits_for = max(waits_for, reduced_at[s.block[k]])
            if not s.reduces[i] and b >= 0 and first_of[b] == p:
                full += s.buffer_bytes[b]
                first_of[b] = -1
        update, scratch, shards_freed = s.update[i], s.updating[i], s.until_updated[i]
        landed = gradients if s.scatters[i] else 0  # gradient bytes freed before the update; ``updated``: after it
        updated = gradients - landed
        if s.barrier:
            shards_kept += s.until_updated[i]
            is_last = p == last_reduction
            update, scratch, shards_freed = (all_updates, all_scratch, shards_kept) if is_last else (0.0, 0, 0)
            updated = replicated if is_last else 0
            waits_for = last_reduction if waits_for >= 0 else -1
        own = min(s.until_updated[i], shards_freed)
        m.slot[p], m.blocking[p], m.waits_for[p], m.early[p] = slot, s.blocking[i], waits_for, so_far
        m.in_prologue[p] = s.is_forward[i] or (s.is_backward[i] and slot >= turn)
        m.alpha[p], m.gap[p], m.transfer[p], m.idle[p] = s.alpha[i], s.gap[i], s.transfer[i], s.idle[i]
        m.copy[p], m.update[p], m.lost[p] = s.copy[i], update, s.lost[i] + s.lost_per_work[i] * (s.copy[i] + update)
        m.held[p] = full + s.until_updated[i] - own
        m.freed[p] = shards_freed - own + landed + updated
        m.transient[p] = own + max(s.until_landed[i], scratch - landed)


LOOPS = (place, arrange, fill_demands)
"""Functions that :func:`mdcs.simulator.machine_code.compile_loops` compiles."""
