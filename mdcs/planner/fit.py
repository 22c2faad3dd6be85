"""Fit a schedule to a byte budget: later gathers, earlier reductions, split messages.

These changes take the place of decisions at run time. Admission therefore never has to change the order on the wire,
and no plan can deadlock (:func:`mdcs.plan.worst_case.check`). Every change moves the plan towards the sequential schedule
of its mix, whose peak is the smallest of the mix.
"""

from __future__ import annotations

import contextlib
import dataclasses

from mdcs.plan.ledger import Ledger
from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.plan.period import Op
from mdcs.plan.validity import PlanError
from mdcs.plan.widths import by_width
from mdcs.plan.worst_case import needs
from mdcs.simulator.simulate import replay

_AHEAD = (4, 2, 1)  # slots


def fit(plan: Plan, budget: int) -> Plan:
    """Return the plan with ``budget`` (bytes, reserve included) and issue slots that fit it.

    Raises PlanError when even the latest gathers and the earliest reductions do not fit.
    """
    cap = budget - plan.reserve
    while True:
        ledger = Ledger(plan)
        over = [(q, need.bytes - cap) for q, need in enumerate(needs(plan, ledger)) if need.bytes > cap]
        if not over:
            return dataclasses.replace(plan, budget=budget)
        q, excess = over[0]
        messages = (
            _later_gathers(plan, ledger, over)
            or _reductions_first(plan, q)
            or _earlier_reductions(plan, q)
            or _split(plan, q)
        )
        if messages is None:
            coarser = _merge_blocks(plan)
            if coarser is not None:
                plan = coarser
                continue
            messages = _units_together(plan, q)
        if messages is None:
            raise PlanError(
                f"slot {q} ({plan.period.name(q)}) needs {budget + excess} bytes of {budget}, "
                f"with every gather as late and every reduction as early as can be"
            )
        plan = dataclasses.replace(plan, messages=messages)


def fastest_fit(plan: Plan, budget: int) -> Plan:
    """Return the plan within ``budget`` (bytes, reserve included).

    If it must change, return the fastest of several variants by replay.

    Variants: the changes of :func:`fit`, with gathers at most a few slots before they are needed, and with reductions
    as early as possible. A schedule made without a budget gathers as early as it can, far earlier than hiding the
    gathers needs. Bytes gathered that early are missing for gradients, whose reductions then wait for each other.

    Raises PlanError as :func:`fit` does.
    """
    found = [fit(plan, budget)]
    if found[0].messages == plan.messages:
        return found[0]
    at_once = _earlier_reductions(plan, 0)
    orders = [plan] if at_once is None else [plan, dataclasses.replace(plan, messages=at_once)]
    for other in (*orders[1:], *(_gathered_later(each, ahead) for each in orders for ahead in _AHEAD)):
        with contextlib.suppress(PlanError):
            found.append(fit(other, budget))
    return min(found, key=lambda each: replay(each).period_s)


def _gathered_later(plan: Plan, ahead: int) -> Plan:
    """Return the plan with every gather at most ``ahead`` slots before it is needed."""
    slots = []
    for m in plan.messages:
        need = plan.need(m) if m.kind.is_gather else None
        slots.append(plan.unrolled(m) if need is None else max(plan.unrolled(m), need - ahead))
    return dataclasses.replace(plan, messages=_moved(plan, slots))


def _moved(plan: Plan, slots: list[int]) -> tuple[Message, ...]:
    """Return the messages with new unrolled slots, in order of slot. Moved messages go behind the others of their slot.
    """
    length, turn = plan.period.length, plan.period.turn

    def key(item: tuple[Message, int]) -> tuple[int, bool, bool]:
        message, slot = item
        at_barrier = not plan.cross_iteration and slot % length == turn
        return slot % length, at_barrier and message.kind.is_gather, slot != plan.unrolled(message)

    ordered = sorted(zip(plan.messages, slots, strict=True), key=key)
    return tuple(m if m.slot == s % length else dataclasses.replace(m, slot=s % length) for m, s in ordered)


def _later_gathers(plan: Plan, ledger: Ledger, over: list[tuple[int, int]]) -> tuple[Message, ...] | None:
    """Return the messages with later gathers, so that the slots in ``over`` fit. None if no gather can be later.

    - ``over``: (slot, excess bytes). For each slot in turn, gathers that are issued before it and needed only after it
      move behind it. The gather that is needed last moves first, until the excess is gone. The walk stops at the first
      slot without such a gather.
    """
    length = plan.period.length
    gathers: list[tuple[int, int, int, Op]] = []  # slot, need, bytes, operation
    for message, effect in zip(plan.messages, ledger.messages, strict=True):
        for unit, size in effect.full:
            op = Op(message.kind, unit, message.micro)
            gathers.append((plan.unrolled(message), min(plan.period.window(op)[1], plan.need(message) or 0), size, op))
    late: dict[Op, int] = {}
    for q, excess in over:
        ahead: list[tuple[int, int, Op, int]] = []  # need, bytes, operation, new slot
        for slot, last, size, op in gathers:
            for at in (q, q + length):
                later = min(at + 1, last)  # a gather that slot q needs can still move behind the reductions of q
                if at <= last and slot < later:
                    if late.get(op, slot) < later:
                        ahead.append((last, size, op, later))
                    else:  # already moved, for an earlier slot
                        excess -= size
        if excess > 0 and not ahead:
            break
        for _, size, op, later in sorted(ahead, reverse=True):
            if excess <= 0:
                break
            late[op] = later
            excess -= size
    if not late:
        return None
    slots = []
    for m in plan.messages:
        slot = max([plan.unrolled(m), *(late.get(Op(m.kind, unit, m.micro), 0) for unit, _ in m.parts)])
        slots.append(min(slot, plan.need(m) or slot) if m.kind.is_gather else plan.unrolled(m))
    return _moved(plan, slots)


def _reductions_first(plan: Plan, q: int) -> tuple[Message, ...] | None:
    """Return the messages with reductions before gathers at slot q: a reduction frees gradients.

    None if nothing changes.
    """
    messages = tuple(sorted(plan.messages, key=lambda m: (m.slot, m.slot == q and m.kind.is_gather)))
    return messages if messages != plan.messages else None


def _earlier_reductions(plan: Plan, q: int) -> tuple[Message, ...] | None:
    """Return the messages with every reduction of slot q and later moved to the slot at which it is ready.

    None if nothing changes.
    """
    before = [plan.unrolled(m) for m in plan.messages]
    slots = [
        max(plan.period.window(Op(m.kind, u, m.micro))[0] for u, _ in m.parts)
        if not m.kind.is_gather and slot >= q
        else slot
        for m, slot in zip(plan.messages, before, strict=True)
    ]
    return _moved(plan, slots) if slots != before else None


def _split(plan: Plan, q: int) -> tuple[Message, ...] | None:
    """Return the messages with one fused message split by unit, or by block if it has one unit.

    None without a fused message.

    The message is the largest of those issued or needed at slot q, otherwise the largest of all.
    """
    fused = [m for m in plan.messages if len(m.parts) > 1]
    if not fused:
        return None

    def concern(m: Message) -> tuple[bool, int]:
        return m.slot == q or (plan.need(m) or -1) % plan.period.length == q, plan.payload(m)

    target = max(fused, key=concern)
    units = list(dict.fromkeys(u for u, _ in target.parts))
    if len(units) > 1:
        pieces = [tuple(p for p in target.parts if p[0] == unit) for unit in units]
    else:
        pieces = [(part,) for part in target.parts]
    out: list[Message] = []
    for m in plan.messages:
        out += [dataclasses.replace(m, parts=piece) for piece in pieces] if m is target else [m]
    return tuple(out)


def _units_together(plan: Plan, q: int) -> tuple[Message, ...] | None:
    """Return the messages with the reductions at slot q grouped by unit, blocks in order. None if nothing changes.

    The last reduction of a unit frees its gradient, so a unit of several types frees it earlier.
    """
    first: dict[int, int] = {}
    for i, m in enumerate(plan.messages):
        if m.slot == q and not m.kind.is_gather:
            first.setdefault(m.parts[0][0], i)

    def key(item: tuple[int, Message]) -> tuple[int, int]:
        i, m = item
        unit, block = m.parts[0]
        return (first[unit], block) if m.slot == q and not m.kind.is_gather else (i, 0)

    messages = tuple(m for _, m in sorted(enumerate(plan.messages), key=key))
    return messages if messages != plan.messages else None


def _merge_blocks(plan: Plan) -> Plan | None:
    """Return the plan with the unit that has most blocks as a whole. None if no unit is partitioned.

    Each block has its own optimizer state, with a few bytes of overhead. The whole unit is sent where its last block
    was.
    """
    layouts = plan.profile.layouts
    unit = max(range(len(layouts)), key=lambda u: len(plan.blocks[u]) - len(layouts[u].sizes))
    whole = layouts[unit].sizes
    if len(plan.blocks[unit]) == len(whole):
        return None
    blocks = (*plan.blocks[:unit], whole, *plan.blocks[unit + 1 :])
    keep: dict[Op, Message] = {}
    for m in plan.messages:
        if any(u == unit for u, _ in m.parts):
            op = Op(m.kind, unit, m.micro)
            if op not in keep or plan.unrolled(m) >= plan.unrolled(keep[op]):
                keep[op] = m
    messages = []
    for m in plan.messages:
        parts = tuple(p for p in m.parts if p[0] != unit)
        if keep.get(Op(m.kind, unit, m.micro)) is m:
            parts += tuple((unit, b) for b in range(len(whole)))
        alike = by_width(plan.profile, blocks, m.kind, parts) if parts else ()
        messages += [dataclasses.replace(m, parts=each) for each in alike]
    return dataclasses.replace(plan, blocks=blocks, messages=tuple(messages))
