"""The queue of a plan's messages: the order in which they start, how many are in flight, and the bytes they need.

A pure state machine without torch, threads or clocks. A transport tells it what happens, and does what it allows:

    issue    compute has come to the message: its bytes are reserved
    start    its turn has come: it goes on the link
    land     its collective has ended and is unpacked
    finish   its updates are done: its bytes are released

Each state is reached in the plan's order, so one count per state is the whole state. A count is a number of messages
since the start of training; message ``index`` is message ``index % n`` of the plan, in period ``index // n``. Period 0
is the prologue: it only gathers what the first forward needs, and passes over its other messages.

A message starts after the message ``depth`` before it is done, and after the message that it waits for is done
(:meth:`MessageQueue.starts_after`). The host's threads check this before they start a message. On CUDA a stream waits
for these events instead. Tests replay plans with this queue and compare with the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mdcs.plan.admission import Admission
from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan


class QueuedMessage(NamedTuple):
    """A message of the plan as the queue sees it.

    - ``waits_for``: index in the plan of the message that must be done before this one starts, or -1.
    - ``in_prologue``: whether the prologue sends it.
    - ``held``: bytes that it allocates and that stay after it.
    - ``freed``: bytes of slots and earlier messages that it frees when it is done.
    - ``transient``: bytes that it needs only while it is in flight.
    """

    waits_for: int
    in_prologue: bool
    held: int
    freed: int
    transient: int


def queued_messages(plan: Plan, ledger: Ledger) -> list[QueuedMessage]:
    """Return the messages of a plan, with the bytes of its ledger."""
    return [
        QueuedMessage(after, plan.in_prologue(m), e.held, e.freed, e.transient)
        for m, after, e in zip(plan.messages, plan.waits_for, ledger.messages, strict=True)
    ]


class MessageQueue:
    """FIFO and byte admission of the messages of a plan. Not thread-safe.

    - ``messages``: one period, in wire order.
    - ``depth``: messages in flight, from their start until they are done.
    - ``cap``, ``at_rest``: bytes, as in :class:`~mdcs.plan.admission.Admission`.
    - ``has_own_updates``: updates run beside the link, which then carries one message at a time: a message starts when
      the one before it has landed.
    - ``issued``, ``started``, ``landed``, ``done``: messages that have come so far, since the start of training.
    - ``admission``: the bytes promised, to messages and to slots.
    - ``first_period``: number of the prologue.
    """

    def __init__(
        self,
        messages: Sequence[QueuedMessage],
        depth: int,
        *,
        cap: int | None = None,
        at_rest: int = 0,
        has_own_updates: bool = False,
    ) -> None:
        self.messages, self.n, self.depth = messages, len(messages), depth
        self.has_own_updates, self.admission = has_own_updates, Admission(cap, at_rest, depth)
        self._begin(0)

    def restart(self) -> int:
        """Forget the position in the plan: the next period is a prologue. Return its number.

        Nothing may be in flight. Only the bytes at rest stay reserved.
        """
        self.admission.restart()
        self._begin(self.issued // max(1, self.n) + 1)
        return self.first_period

    def _begin(self, period: int) -> None:
        self.first_period = period
        self.issued = self.started = self.landed = self.done = period * self.n
        self._skipped: set[int] = set()  # messages that are passed over when their turn comes

    def admits_next(self, activations: int) -> bool:
        """Return whether the next message fits beside ``activations`` bytes of the slot; it does if it is skipped."""
        m = self.messages[self.issued % self.n]
        return self.is_skipped(self.issued) or self.admission.admits(m.held + activations, m.transient)

    def has_room(self, activations: int) -> bool:
        """Return whether the next message fits beside ``activations`` and the excess, without waiting for any other."""
        m = self.messages[self.issued % self.n]
        return self.admission.has_room(m.held + activations, m.transient)

    # -- states ---------------------------------------------------------------------------------------------------

    def issue(self) -> int | None:
        """Issue the next message: reserve its bytes. Return its index, or None for a message that is passed over."""
        index = self.issued
        self.issued += 1
        if self.is_skipped(index):
            self._skipped.add(index)
            self._pass_skipped()
            return None
        m = self.messages[index % self.n]
        self.admission.issue(m.held, m.transient, m.freed)
        return index

    def next_start(self) -> int | None:
        """Return the index of the next message if it can start now, else None."""
        index = self.started
        if index == self.issued or self.done <= self.starts_after(index):
            return None
        return None if self.has_own_updates and self.landed < index else index

    def starts_after(self, index: int) -> int:
        """Return the message that must be done, with all before it, before this one starts; negative if there is none."""
        after, first = index - self.depth, index - index % self.n
        waits_for = self.messages[index - first].waits_for
        if waits_for < 0 or self.in_prologue(index):
            return after
        return max(after, first + waits_for)

    def start(self) -> None:
        """Put the next message on the link."""
        self.started += 1
        self._pass_skipped()

    def land(self) -> None:
        """End the collective of the oldest message on the link."""
        self.landed += 1
        self._pass_skipped()

    def finish(self) -> None:
        """End the oldest message in flight: release its bytes."""
        self.done += 1
        self.landed = max(self.landed, self.done)
        self.admission.finish()
        self._pass_skipped()

    def send_ahead(self, index: int) -> None:
        """Send a message that is not issued yet out of its turn, with nothing in flight: it is passed over later."""
        m = self.messages[index % self.n]
        self._skipped.add(index)
        self.admission.reserve(m.held - m.freed)

    def in_prologue(self, index: int) -> bool:
        """Return whether the message belongs to the prologue."""
        return index < (self.first_period + 1) * self.n

    def is_skipped(self, index: int) -> bool:
        """Return whether the message is passed over in its turn: the prologue has no use for it, or it was sent ahead."""
        return index in self._skipped or self.in_prologue(index) and not self.messages[index % self.n].in_prologue

    def _pass_skipped(self) -> None:
        """Pass over skipped messages: each is started, landed and done when all before it are."""
        skipped = self._skipped
        if not skipped:
            return
        while self.started < self.issued and self.started in skipped:
            self.started += 1
        while self.landed < self.started and self.landed in skipped:
            self.landed += 1
        while self.done < self.landed and self.done in skipped:
            skipped.discard(self.done)
            self.done += 1

