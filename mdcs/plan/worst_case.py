"""The worst case by slot: bytes that must be free for a plan to run *with any timing*.

Compute may wait for messages issued so far, never for later ones. A plan that needs no more than its budget cannot
deadlock.
"""

from __future__ import annotations

from typing import NamedTuple

from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Folded, Numbers, Schedule
from mdcs.plan.validity import PlanError


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


def worst_case_bytes_by_slot(plan: Plan, ledger: Ledger | None = None) -> list[SlotDemand]:
    """Return the bytes needed at each slot: the larger of prologue and steady period, with all earlier messages done.

    Compute can always wait for messages that are issued. Therefore admission cannot deadlock if these bytes fit.
    - ``ledger``: the plan's ledger, if the caller has it.
    """
    ledger = ledger or Ledger(plan)
    slots, length = ledger.slots, plan.period.length
    arrival, running = [0] * length, [0] * length
    fill_demands(
        plan.period.turn, ledger.rest_bytes, [s.live for s in slots], [s.peak for s in slots],
        [s.allocated for s in slots], [s.freed for s in slots], plan.schedule, ledger.folded, arrival, running,
    )  # fmt: skip
    return list(map(SlotDemand, arrival, running))


def fill_demands(
    turn: int, rest: int, live: Numbers, peak: Numbers, allocated: Numbers, released: Numbers, s: Schedule,
    sizes: Folded, arrival: Numbers, running: Numbers,
) -> None:  # fmt: skip
    """Fill ``arrival`` and ``running`` with the needs of each slot (:class:`SlotDemand`).

    A loop over numbers, which :mod:`mdcs.simulator.machine_code` compiles for searches.

    - ``turn``: first forward slot, where the prologue starts. ``rest``: bytes at rest.
    - by slot: ``live``, ``peak``, ``allocated``, ``released``, as in :class:`~mdcs.plan.ledger.SlotBytes`.
    """
    length, now = len(arrival), rest
    for q in range(length):
        arrival[q] = running[q] = 0
    for period in range(3):  # prologue, first and steady period
        for q in range(turn if period == 0 else 0, length):
            most = 0
            for i in range(0 if q == 0 or (period == 0 and q == turn) else s.issued[q - 1], s.issued[q]):
                if period > 0 or s.in_prologue[i]:
                    most = max(most, now + sizes.held[i] + sizes.transient[i] + live[q])
                    now += sizes.held[i] - sizes.freed[i]
            now += allocated[q]
            if period != 1:
                arrival[q], running[q] = max(arrival[q], most), max(running[q], now + peak[q])
            now -= released[q]


def min_feasible_budget(plan: Plan) -> int:
    """Return the smallest budget (bytes, reserve included) under which the plan runs with any timing."""
    return max(need.bytes for need in worst_case_bytes_by_slot(plan)) + plan.reserve


def check(plan: Plan) -> None:
    """Raise PlanError, naming the cycle, if admission under the plan's budget could deadlock."""
    allowed = plan.admissible
    if allowed is None:
        return
    for q, need in enumerate(worst_case_bytes_by_slot(plan)):
        if need.bytes > allowed:
            blocking = [
                f"{m.kind} of {', '.join(plan.profile.units[u].name for u, _ in m.parts)}"
                for m, needed_by in zip(plan.messages, plan.schedule.needed_by, strict=True)
                if m.slot <= q < needed_by
            ]
            raise PlanError(
                f"cycle: slot {q} ({plan.period.name(q)}) needs {need.bytes + plan.reserve} of "
                f"{allowed + plan.reserve} bytes, and what holds them is freed only after it"
                + (f" (gathered ahead: {'; '.join(blocking[:4])})" if blocking else "")
            )
