"""The worst case by slot: bytes that must be free for a plan to run *with any timing*.

Compute may wait for messages issued so far, never for later ones. A plan that needs no more than its budget cannot
deadlock.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.profile.link import Kind

Numbers = Any
"""A list of numbers, or an array."""


class SlotDemand(NamedTuple):
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


class SlotDependencies:
    """For each slot, the number of messages issued (``issued_through``) and surely done (``required_through``) when it begins.

    Counts are unrolled: a ``required_through`` of 0 or less refers to messages of the previous period. Messages end in
    FIFO order, so a slot that waits for one message waits for all before it.
    """

    def __init__(self, plan: Plan) -> None:
        n, length = len(plan.messages), plan.period.length
        issues = [0] * length
        for m in plan.messages:
            issues[m.slot] += 1
        self.issued_through = list(itertools.accumulate(issues))
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
        self.required_through: list[int] = []
        for d in done_at:
            best = max(best, d)
            self.required_through.append(best)


def worst_case_bytes_by_slot(plan: Plan, ledger: Ledger | None = None) -> list[SlotDemand]:
    """Return the bytes needed at each slot: the larger of prologue and steady period, with all earlier messages done.

    Compute can always wait for messages that are issued. Therefore admission cannot deadlock if these bytes fit.
    - ``ledger``: the plan's ledger, if the caller has it.
    """
    ledger = ledger or Ledger(plan)
    issued = [0] * plan.period.length
    for m in plan.messages:
        issued[m.slot] += 1
    arrival, running = [0] * len(issued), [0] * len(issued)
    fill_demands(
        plan.period.turn,
        ledger.rest_bytes,
        [s.live for s in ledger.slots],
        [s.peak for s in ledger.slots],
        [s.allocated for s in ledger.slots],
        [s.freed for s in ledger.slots],
        [plan.in_prologue(m) for m in plan.messages],
        [e.held for e in ledger.messages],
        [e.transient for e in ledger.messages],
        [e.freed for e in ledger.messages],
        list(itertools.accumulate(issued)),
        arrival,
        running,
    )
    return list(map(SlotDemand, arrival, running))


def fill_demands(
    turn: int, rest: int, live: Numbers, peak: Numbers, allocated: Numbers, released: Numbers, in_prologue: Numbers,
    held: Numbers, transient: Numbers, freed: Numbers, issued: Numbers, arrival: Numbers, running: Numbers,
) -> None:  # fmt: skip
    """Fill ``arrival`` and ``running`` with the needs of each slot (:class:`Need`).

    A loop over numbers, which :mod:`mdcs.simulator.machine_code` compiles for searches.

    - ``turn``: first forward slot, where the prologue starts. ``rest``: bytes at rest.
    - by slot: ``live``, ``peak``, ``allocated``, ``released``, as in :class:`~mdcs.plan.ledger.SlotBytes`, and
      ``issued``: the number of messages issued by then.
    - by message: ``in_prologue``, ``held``, ``transient``, ``freed``, as in :class:`~mdcs.plan.ledger.MessageBytes`.
    """
    length, now = len(issued), rest
    for q in range(length):
        arrival[q] = running[q] = 0
    for period in range(3):  # prologue, first and steady period
        for q in range(turn if period == 0 else 0, length):
            most = 0
            for i in range(0 if q == 0 or (period == 0 and q == turn) else issued[q - 1], issued[q]):
                if period > 0 or in_prologue[i]:
                    most = max(most, now + held[i] + transient[i] + live[q])
                    now += held[i] - freed[i]
            now += allocated[q]
            if period != 1:
                arrival[q], running[q] = max(arrival[q], most), max(running[q], now + peak[q])
            now -= released[q]


def min_feasible_budget(plan: Plan) -> int:
    """Return the smallest budget (bytes, reserve included) under which the plan runs with any timing."""
    return max(need.bytes for need in worst_case_bytes_by_slot(plan)) + plan.reserve


def check(plan: Plan) -> None:
    """Raise PlanError, naming the cycle, if admission under the plan's budget could deadlock."""
    if plan.budget is None:
        return
    for q, need in enumerate(worst_case_bytes_by_slot(plan)):
        if need.bytes + plan.reserve > plan.budget:
            blocking = [
                f"{m.kind} of {', '.join(plan.profile.units[u].name for u, _ in m.parts)}"
                for m in plan.messages
                if m.slot <= q and (plan.needed_by(m) or 0) > q
            ]
            raise PlanError(
                f"cycle: slot {q} ({plan.period.name(q)}) needs {need.bytes + plan.reserve} of {plan.budget} bytes, "
                f"and what holds them is freed only after it"
                + (f" (gathered ahead: {'; '.join(blocking[:4])})" if blocking else "")
            )
