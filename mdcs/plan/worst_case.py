"""The worst case by slot: bytes that must be free for a plan to run *with any timing*.

Compute may wait for messages issued so far, never for later ones. A plan that needs no more than its budget cannot
deadlock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mdcs.plan.ledger import Ledger
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.profile.link import Kind


class Need(NamedTuple):
    """Bytes that must fit at a slot.

    - ``arrival``: when compute arrives, while it waits for messages.
    - ``running``: while the slot runs.
    """

    arrival: int
    running: int

    @property
    def bytes(self) -> int:
        """The larger of the two."""
        return max(self.arrival, self.running)


class SlotLimits:
    """For each slot, the number of messages issued (``issued``) and surely done (``done``) when it begins.

    Counts are unrolled: a ``done`` of 0 or less refers to messages of the previous period. Messages end in FIFO order,
    so a slot that waits for one message waits for all before it.
    """

    def __init__(self, plan: Plan) -> None:
        n, length = len(plan.messages), plan.period.length
        issues = [0] * length
        for m in plan.messages:
            issues[m.slot] += 1
        self.issued = list(itertools.accumulate(issues))
        done_at = [-n] * length
        for i, (m, (first, last)) in enumerate(zip(plan.messages, plan.windows, strict=True)):
            if not m.blocking and m.kind.plain is Kind.RS:
                continue  # no slot needs it: its gather follows and is needed instead
            # The slot that needs the message, counted from the period in which the message is issued.
            waits = m.slot if m.blocking else last if m.slot >= first else last - length
            periods, at = divmod(waits, length)
            if i + 1 - periods * n > done_at[at]:
                done_at[at] = i + 1 - periods * n
        if not plan.cross_iteration:
            # The last reduction updates every unit, so forward of a dp unit waits for it.
            last = max((i for i, m in enumerate(plan.messages) if not m.kind.is_gather), default=-1)
            for u, unit in enumerate(plan.profile.units):
                if unit.trainable and plan.strategies[u] is Strategy.dp:
                    first = plan.period.forward(u, 0)[0]
                    done_at[first] = max(done_at[first], last + 1)
        best = max((d - n for d in done_at), default=-n)
        self.done: list[int] = []
        for d in done_at:
            best = max(best, d)
            self.done.append(best)


def most_in_flight(transient: Sequence[int], depth: int) -> int:
    """Return the most bytes that ``depth`` consecutive messages can hold in flight."""
    if len(transient) <= depth:
        return sum(transient)
    return max(sum(transient[i : i + depth]) for i in range(len(transient) - depth + 1))


def walk(plan: Plan) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (period, slot, messages issued there) in the order in which compute arrives.

    Period 0 is the prologue: it starts at the turn and only gathers. Period 1 is the first, period 2 the steady one.
    """
    issued = SlotLimits(plan).issued
    for period in range(3):
        sent = 0
        for q in range(plan.period.turn if period == 0 else 0, plan.period.length):
            yield period, q, [i for i in range(sent, issued[q]) if period or plan.in_prologue(plan.messages[i])]
            sent = issued[q]


def needs(plan: Plan, ledger: Ledger | None = None) -> list[Need]:
    """Return the bytes needed at each slot: the larger of prologue and steady period, with all earlier messages done.

    Compute can always wait for messages that are issued. Therefore admission cannot deadlock if these bytes fit.
    - ``ledger``: the plan's ledger, if the caller has it.
    """
    ledger = ledger or Ledger(plan)
    issued: list[list[tuple[bool, int, int]]] = [[] for _ in ledger.slots]  # in the prologue?, peak bytes, net bytes
    for m, e in zip(plan.messages, ledger.messages, strict=True):
        issued[m.slot].append((plan.in_prologue(m), e.held + e.transient, e.held - e.freed))
    slots = [(own, s.live, s.allocated, s.peak, s.freed) for own, s in zip(issued, ledger.slots, strict=True)]
    turn, held = plan.period.turn, ledger.rest_bytes
    by_turn = [each for own in issued[: turn + 1] for each in own]
    begun = [(by_turn, *slots[turn][1:]), *slots[turn + 1 :]]
    out: list[Need] = []
    prologue: list[Need] = []
    for period in range(3):  # in the order of :func:`walk`
        out = []
        for messages, live, allocated, peak, freed in slots if period else begun:
            arrival = 0
            for in_prologue, most, left in messages:
                if period or in_prologue:
                    if held + most + live > arrival:
                        arrival = held + most + live
                    held += left
            held += allocated
            out.append(Need(arrival, held + peak))
            held -= freed
        prologue = prologue or out
    for q, other in enumerate(prologue, turn):  # at the turn it issues the gathers that later periods issue before
        out[q] = Need(max(out[q].arrival, other.arrival), max(out[q].running, other.running))
    return out


def smallest_budget(plan: Plan) -> int:
    """Return the smallest budget (bytes, reserve included) under which the plan runs with any timing."""
    return max(need.bytes for need in needs(plan)) + plan.reserve


def check(plan: Plan) -> None:
    """Raise PlanError, naming the cycle, if admission under the plan's budget could deadlock."""
    if plan.budget is None:
        return
    for q, need in enumerate(needs(plan)):
        if need.bytes + plan.reserve > plan.budget:
            blocking = [
                f"{m.kind} of {', '.join(plan.profile.units[u].name for u, _ in m.parts)}"
                for m in plan.messages
                if m.slot <= q and (plan.need(m) or 0) > q
            ]
            raise PlanError(
                f"cycle: slot {q} ({plan.period.name(q)}) needs {need.bytes + plan.reserve} of {plan.budget} bytes, "
                f"and what holds them is freed only after it"
                + (f" (gathered ahead: {'; '.join(blocking[:4])})" if blocking else "")
            )
