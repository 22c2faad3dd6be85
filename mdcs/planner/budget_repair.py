"""Fit a schedule to a byte budget: gathers as late as the bytes ask for, and if that is not enough, tighter messages.

The planner makes these changes, so that admission at run time never changes the order on the wire and no plan can
deadlock (:func:`mdcs.plan.ledger.check`). The last resort is the sequential schedule, by which mixes are judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from mdcs.plan.ledger import Ledger, worst_case_bytes_by_slot
from mdcs.plan.period import Op, blocks_by_readiness
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message, buffer_of
from mdcs.planner.schedulers import StrategyAssignment, sequential
from mdcs.simulator.simulate import replay

_AHEAD = (4, 2, 1)  # slots


def repair(plan: Plan, budget: int) -> Plan:
    """Return the plan with ``budget`` (bytes, reserve included) and issue slots that fit it. Raises PlanError when even
    the latest gathers and the earliest reductions do not.
    """
    cap = budget - plan.reserve
    over = _over(plan, Ledger(plan), cap)
    if not over:
        return dataclasses.replace(plan, budget=budget)
    for tighter in _tightened(plan):
        latest = delay_gathers(tighter, 0)
        over = _over(latest, Ledger(latest), cap)
        if not over:
            return dataclasses.replace(_delayed(tighter, cap) or latest, budget=budget)
    q, excess = over[0]
    raise PlanError(
        f"slot {q} ({plan.period.name(q)}) needs {budget + excess} bytes of {budget}, "
        f"with every gather as late and every reduction as early as can be"
    )


def fastest_repair(plan: Plan, budget: int) -> Plan:
    """Return the plan within ``budget`` (bytes, reserve included). Raises PlanError as :func:`repair` does.

    If it must change, return the fastest of several variants by replay: :func:`repair`, with gathers at most a few
    slots before they are needed, with reductions as early as possible, and with fused messages split. A schedule made
    without a budget gathers as early as it can, far earlier than hiding the gathers needs. Bytes gathered that early
    are missing for gradients, whose reductions then wait for each other.
    """
    found = [repair(plan, budget)]
    if found[0].messages == plan.messages:
        return found[0]
    apart = at_once = reduce_when_ready(plan)
    while (split := _split(apart)) is not None:
        apart = split
    starts = [plan]
    starts += [each for each in (at_once, reduce_when_ready(apart)) if each not in starts]
    for each in starts:
        for other in (each, *(delay_gathers(each, ahead) for ahead in _AHEAD)):
            if other is not plan:
                with contextlib.suppress(PlanError):
                    found.append(repair(other, budget))
    return min(found, key=lambda each: replay(each).period_s)


def delay_gathers(plan: Plan, ahead: int) -> Plan:
    """Return the plan with every gather at most ``ahead`` slots before it is needed."""
    unmoved = zip(plan.messages, plan.schedule.slot, plan.schedule.needed_by, strict=True)
    return _moved(plan, [max(slot, need - ahead) if m.kind.is_gather else slot for m, slot, need in unmoved])


def reduce_when_ready(plan: Plan) -> Plan:
    """Return the plan with every reduction at the slot at which it is ready.

    In a slot reductions come before gathers, and those of one unit follow each other: the last frees the gradient.
    """
    unmoved = zip(plan.messages, plan.schedule.slot, plan.table.first, strict=True)
    moved = _moved(plan, [slot if m.kind.is_gather else first for m, slot, first in unmoved]).messages
    place: dict[tuple[int, int], int] = {}  # (slot, unit) -> its first message
    for i, m in enumerate(moved):
        place.setdefault((m.slot, m.parts[0][0]), i)
    messages = sorted(
        moved, key=lambda m: (m.slot, m.kind.is_gather, 0 if m.kind.is_gather else place[m.slot, m.parts[0][0]])
    )
    return dataclasses.replace(plan, messages=tuple(messages))


def _tightened(plan: Plan) -> Iterator[Plan]:
    """Yield the plan, then with reductions at once, then with one fused message more split, then one unit more whole,
    and last the sequential schedule of its mix.

    A message that is split needs less staging. A unit that is whole needs less optimizer state: each block has its own,
    with a few bytes of overhead. The last block of a unit is reduced beside the shards of the others.
    """
    yield plan
    plan = reduce_when_ready(plan)
    yield plan
    while (split := _split(plan)) is not None:
        plan = reduce_when_ready(split)
        yield plan
    for u in sorted(range(len(plan.blocks)), key=lambda u: -len(plan.blocks[u])):
        if len(plan.blocks[u]) > 1:
            plan = reduce_when_ready(with_block_sizes(plan, u, (sum(plan.blocks[u]),)))
            yield plan
    last = sequential(StrategyAssignment(plan.job, plan.strategies))
    yield dataclasses.replace(plan, blocks=last.blocks, messages=last.messages)


def with_block_sizes(plan: Plan, unit: int, sizes: tuple[int, ...]) -> Plan:
    """Return the plan with blocks of these sizes (elements) for ``unit``. Its gathers are sent where the first old
    block was, its reductions where the last was.
    """
    blocks = (*plan.blocks[:unit], sizes, *plan.blocks[unit + 1 :])
    at: dict[Op, Message] = {}
    for m in plan.messages:
        op = Op(m.kind, unit, m.micro)
        if any(u == unit for u, _ in m.parts) and not (op.kind.is_gather and op in at):
            at[op] = m
    messages: list[Message] = []
    for m in plan.messages:
        if not any(u == unit for u, _ in m.parts):
            messages.append(m)
            continue
        kept = tuple([p for p in m.parts if p[0] != unit])
        here = at[Op(m.kind, unit, m.micro)] is m
        parts = kept + tuple([(unit, b) for b in blocks_by_readiness(plan.profile, unit, sizes) if here])
        if len(m.parts) > 1 and parts:  # stays fused
            messages.append(dataclasses.replace(m, parts=parts))
        else:
            messages += [dataclasses.replace(m, parts=(part,)) for part in parts]
    return dataclasses.replace(plan, blocks=blocks, messages=tuple(messages))


def _split(plan: Plan) -> Plan | None:
    """Return the plan with its largest fused message split by unit, or by block if it has one unit. None: no such."""
    fused = [m for m in plan.messages if len(m.parts) > 1]
    if not fused:
        return None
    largest = max(fused, key=plan.payload)
    units = dict.fromkeys(u for u, _ in largest.parts)
    pieces = [tuple([part for part in largest.parts if part[0] == u]) for u in units]
    if len(units) == 1:
        pieces = [(part,) for part in largest.parts]
    at = plan.messages.index(largest)
    split = (dataclasses.replace(largest, parts=piece) for piece in pieces)
    return dataclasses.replace(plan, messages=(*plan.messages[:at], *split, *plan.messages[at + 1 :]))


def _over(plan: Plan, ledger: Ledger, cap: int) -> list[tuple[int, int]]:
    """Return (slot, excess bytes) of the slots that need more than ``cap`` bytes."""
    return [(q, need - cap) for q, need in enumerate(worst_case_bytes_by_slot(plan, ledger)) if need > cap]


def _delayed(plan: Plan, cap: int) -> Plan | None:
    """Return the plan with gathers as late as ``cap`` bytes ask for. None if later gathers are not enough."""
    length = plan.period.length
    while over := _over(plan, ledger := Ledger(plan), cap):
        gathers: list[tuple[int, int, int, Op]] = []  # slot, need, bytes, operation
        s = plan.schedule
        for p, m in enumerate(plan.messages):
            for unit in sorted({u for u, _ in m.parts}) if m.kind.is_gather else ():
                op = Op(m.kind, unit, m.micro)
                buffer = buffer_of(plan.period, op)
                if s.opened_by[buffer] == p and ledger.buffer_bytes[buffer]:
                    gathers.append((s.slot[p], s.needed_by[p], ledger.buffer_bytes[buffer], op))
        late: dict[Op, int] = {}
        for q, excess in over:  # gathers that are issued before the slot and needed only after it move behind it
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
            for _, size, op, later in sorted(ahead, reverse=True):  # what is needed last moves first
                if excess <= 0:
                    break
                late[op] = later
                excess -= size
        if not late:
            return None
        slots = []
        for m, slot, needed_by in zip(plan.messages, s.slot, s.needed_by, strict=True):
            moved = max([slot, *(late.get(Op(m.kind, unit, m.micro), 0) for unit, _ in m.parts)])
            slots.append(min(moved, needed_by) if m.kind.is_gather else slot)
        plan = _moved(plan, slots)
    return plan


def _moved(plan: Plan, slots: list[int]) -> Plan:
    """Return the plan with new unrolled slots, in order of slot. Moved messages go behind the others of their slot."""
    moved = zip(plan.messages, slots, plan.schedule.slot, strict=True)
    ordered = sorted(moved, key=lambda each: (plan.period.place(each[1], each[0].kind), each[1] != each[2]))
    new = ((m, slot % plan.period.length) for m, slot, _ in ordered)
    messages = tuple(m if m.slot == slot else dataclasses.replace(m, slot=slot) for m, slot in new)
    return dataclasses.replace(plan, messages=messages)
