"""The wire of a run: the queue of the plan's messages, and what compute may ask of the transport that sends them.

The queue has the order in which messages start, how many are in flight, and the bytes that they need. It is a pure
state machine without threads or clocks. A transport tells it what happens, and does what it allows:

    issue    compute has come to the message: its bytes are reserved
    start    its turn has come: it goes on the link
    land     its collective has ended and is unpacked
    update   its updates are done: its own buffers are free
    finish   compute comes behind it: what it frees of other buffers is free

Each state is reached in the plan's order, so one count per state is the whole state. On threads a state is reached when
it happens; updating and finishing are one there. On streams a state is reached when what is enqueued next comes behind
it: on the link for ``landed`` and ``updated``, in compute for ``done``.

A count, and the ``number`` of a message, is one of messages since the start of training: ``number`` is message ``number
% n`` of the plan, in period ``number // n``. Period 0 is the prologue: it only gathers what the first forward needs,
and passes over its other messages. Tests replay plans with this queue and compare with the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from mdcs.emulation import Pacer
from mdcs.plan.ledger import Ledger
from mdcs.plan.lifetimes import Admission
from mdcs.plan.plan import Plan
from mdcs.profile.link import ExecutionModel
from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import FailureChannel
from mdcs.runtime.executor import run_on_comm_stream
from mdcs.runtime.messages import Messages
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import named_range


class QueuedMessage(NamedTuple):
    """A message of the plan as the queue sees it, as in :class:`~mdcs.plan.schedule.Schedule` and ``Folded``."""

    waits_for: int
    in_prologue: bool
    held: int
    freed: int
    transient: int


class MessageQueue:
    """Order and admission of the messages of a plan, one period in wire order. Not thread-safe.

    - ``has_own_updates``: updates run beside the link: a message starts when the one before it has landed.
    - ``issued``, ``started``, ``landed``, ``updated``, ``done``: messages that have come so far.
    - ``first_period``: number of the prologue.
    """

    def __init__(self, messages: Sequence[QueuedMessage], admission: Admission, has_own_updates: bool = False) -> None:
        self.messages, self.n = messages, len(messages)
        self.admission, self.has_own_updates = admission, has_own_updates
        self._begin(0)

    def restart(self) -> int:
        """Forget the position in the plan, with nothing in flight. Return the number of the prologue that is next."""
        self._begin(self.issued // max(1, self.n) + 1)
        self.admission.restart()
        return self.first_period

    def _begin(self, period: int) -> None:
        self.first_period = period
        self.issued = self.started = self.landed = self.updated = self.done = period * self.n
        self._skipped: set[int] = set()  # messages that are passed over when their turn comes

    def admits_next(self, activations: int) -> bool:
        """Return whether the next message fits beside ``activations`` bytes of the slot; it does if it is skipped."""
        if self.is_skipped(self.issued):
            return True
        m = self.messages[self.issued % self.n]
        return self.admission.admits(m.held + activations, m.transient)

    def has_room(self, activations: int) -> bool:
        """Return whether the next message fits beside ``activations`` and the excess, without waiting for any other."""
        m = self.messages[self.issued % self.n]
        return self.admission.has_room(m.held + activations, m.transient)

    def issue(self) -> int | None:
        """Issue the next message: reserve its bytes. Return its number, or None for a message that is passed over."""
        number = self.issued
        self.issued += 1
        if self.is_skipped(number):
            self._skipped.add(number)
            self._pass_skipped()
            return None
        m = self.messages[number % self.n]
        self.admission.issue(m.held, m.transient, m.freed)
        return number

    def next_start(self) -> int | None:
        """Return the number of the next message if it can start now, else None."""
        number = self.started
        if number == self.issued or self.updated <= self.starts_after(number):
            return None
        return None if self.has_own_updates and self.landed < number else number

    def starts_after(self, number: int) -> int:
        """Return the message that must be updated, with all before it, before this one starts; negative: none."""
        after, first = number - self.admission.depth, number - number % self.n
        waits_for = self.messages[number - first].waits_for
        return after if waits_for < 0 or self.in_prologue(number) else max(after, first + waits_for)

    def start(self) -> None:
        """Put the next message on the link."""
        self.started += 1
        self._pass_skipped()

    def land(self) -> None:
        """End the collective of the oldest message on the link."""
        self.landed += 1
        self._pass_skipped()

    def update(self) -> None:
        """End the updates of the oldest message that has landed: its own buffers are free."""
        self.updated += 1
        self.landed = max(self.landed, self.updated)
        self.admission.update()
        self._pass_skipped()

    def finish(self) -> None:
        """Let compute come behind the oldest message: what it frees of other buffers is free."""
        if self.updated == self.done:
            self.update()
        self.admission.finish(self.messages[self.done % self.n].freed)
        self.done += 1
        self._pass_skipped()

    def send_ahead(self, number: int) -> None:
        """Send a message that is not issued yet out of its turn, with nothing in flight: it is passed over later."""
        m = self.messages[number % self.n]
        self._skipped.add(number)
        self.admission.reserve(m.held - m.freed)

    def in_prologue(self, number: int) -> bool:
        """Return whether the message belongs to the prologue."""
        return number < (self.first_period + 1) * self.n

    def is_skipped(self, number: int) -> bool:
        """Return whether the message is passed over in its turn: unused in the prologue, or sent ahead."""
        return number in self._skipped or self.in_prologue(number) and not self.messages[number % self.n].in_prologue

    def _pass_skipped(self) -> None:
        """Pass over skipped messages: each reaches every state when all before it have."""
        skipped = self._skipped
        if not skipped:
            return
        while self.started < self.issued and self.started in skipped:
            self.started += 1
        while self.landed < self.started and self.landed in skipped:
            self.landed += 1
        while self.updated < self.landed and self.updated in skipped:
            self.updated += 1
        while self.done < self.updated and self.done in skipped:
            skipped.discard(self.done)
            self.done += 1


def queue_for(plan: Plan, ledger: Ledger, execution: ExecutionModel, on_streams: bool = False) -> MessageQueue:
    """Return the queue of a plan, with the bytes of its ledger.

    ``on_streams``: gradients that a message has reduced stay until compute comes behind it, and make no room for its
    own buffers; without a budget the predicted peak is waited for, or gradients would pile up.
    """
    order, sizes, soft_cap = plan.schedule, ledger.folded, None
    if on_streams:
        sizes = sizes._replace(transient=[e.own_bytes for e in ledger.messages])
        soft_cap = None if plan.prediction is None else plan.prediction.peak_bytes
    messages = [QueuedMessage(*each) for each in zip(order.waits_for, order.in_prologue, *sizes, strict=True)]
    admission = Admission(plan.admissible, ledger.rest_bytes, execution.in_flight(plan.profile.link.depth), soft_cap)
    return MessageQueue(messages, admission, execution.has_own_updates)


# ---- the transport

Gradients = tuple[tuple[int, int], ...]
"""(unit, bytes of its full gradients) pairs."""


class Wire:
    """Sends the messages that the queue allows. The training thread calls it.

    - ``storages``: by unit. ``pacer``: of an emulated link, or None.
    - ``lock``: guards the queue and the byte account.
    - ``error``: the error that ended a thread of the transport, or None.
    """

    def __init__(
        self, context: RunContext, queue: MessageQueue, messages: Messages, pacer: Pacer | None,
        failures: FailureChannel,
    ) -> None:  # fmt: skip
        self.context, self.queue, self.messages, self.pacer, self.failures = context, queue, messages, pacer, failures
        self.storages, self.lock = messages.storages, context.account.lock
        self.error: BaseException | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin to send: make what the transport alone has."""

    @property
    def pool_bytes(self) -> int:
        """The most bytes that messages hold in memory that compute cannot use."""
        return 0

    def issue(self, activations: int) -> None:
        """Issue the next message once its bytes fit beside ``activations``."""

    def admit(self, size: int, what: str) -> None:
        """Let compute go on once ``size`` bytes of ``what`` fit beside all that is held. Call with the lock held."""

    def wait_for(self, count: int, what: str) -> None:
        """Let compute go on behind the first ``count`` messages. Call with the lock held."""

    def wait_for_norm(self, number: int) -> None:
        """Wait until the norm of the gradients that this message completes is known, or who reads it will wait."""

    def decide(self, number: int, applies: bool) -> None:
        """Let the updates of a held message be made, or drop them."""
        messages = self.messages
        with self.lock:
            messages.decided, messages.drops = number + 1, not applies
            self._decided(number)
            if messages.plan.messages[number % self.queue.n].blocking:
                self.wait_for(min(number + 1, self.queue.issued), messages.describe(number))

    def _decided(self, number: int) -> None:
        """Go on with a held message."""

    def check(self) -> None:
        """Raise the error of a thread, if there is one."""
        if self.error is not None:
            raise self.error

    def send_ahead(self, number: int) -> None:
        """Send a message out of its turn, with nothing in flight, and let compute come behind it."""

    def end_step(self) -> None:
        """Note that compute has reached the end of an iteration."""

    def stop(self) -> None:
        """End the transport after the issued messages."""

    def has_room(self, activations: int) -> bool:
        """Return whether the next message's bytes fit beside ``activations`` without waiting for messages in flight."""
        with self.lock:
            return self.queue.has_room(activations)

    def restart(self) -> int:
        """Restart the queue (:meth:`MessageQueue.restart`), and free what an iteration holds."""
        with self.lock:
            for storage in self.storages:
                storage.reset_iteration()
            self.context.account.restart()
            self.messages.restart(self.queue.restart())
        return self.queue.first_period

    def finish_iteration(self, period: int) -> None:
        """End an iteration early: finish the issued messages, then send the period's reductions that are not issued.

        All ranks are at the same slot here and have issued the same messages, so the order is the same on all ranks.
        """
        queue, plan = self.queue, self.context.plan
        with self.lock:
            self.wait_for(queue.issued, "the messages in flight")
        first = period * queue.n
        ahead = [  # none in the prologue, which skips all reductions
            number
            for number in range(max(queue.issued, first), first + self.messages.last_reduction + 1)
            if not plan.messages[number % queue.n].kind.is_gather and not queue.is_skipped(number)
        ]
        if not ahead:
            return
        # The plan has no room for reductions beside the units that are gathered ahead for the next forward: these are
        # freed meanwhile, and their bytes stay reserved.
        has_limit = queue.admission.cap is not None
        gathered = [storage for storage in self.storages if has_limit and storage.strategy.sharded and storage.is_full]
        for storage in gathered:
            storage.free()
        for number in ahead:
            self.send_ahead(number)
        for storage in gathered:
            self.gather(storage.unit)

    def gather(self, unit: int, to: UnitStorage | None = None) -> None:
        """Make a unit whole and up to date, or what this rank has of it in ``to``, outside of the plan. Collective."""
        storage = self.storages[unit]
        storage.allocate()
        with run_on_comm_stream(self.context.executor):
            storage.copy_shard_into_flat()
        self.start_gather(unit, storage.flat_param, storage.name, to)()

    def start_gather(self, unit: int, flat: Tensor, what: str, to: UnitStorage | None = None) -> Callable[[], Tensor]:
        """Begin to gather a tensor [elements of the unit] of which each rank has its parts; return what waits for it.
        """
        call, executor, messages = f"gather of {what}", self.context.executor, self.messages
        with self.context.place.during(call), run_on_comm_stream(executor):
            if to is None:
                works, put = messages.unshard_flat(unit, flat), lambda: None
            else:
                works, put = messages.recut_flat(unit, flat, to)

        def end() -> Tensor:
            with self.context.place.during(call), named_range(call), run_on_comm_stream(executor):
                for work in works:
                    work.wait()
                put()
            return flat

        return end

    def free_gradients(self, gradients: Gradients) -> None:
        """Free full gradients that are reduced."""
        for unit, _ in gradients:
            self.storages[unit].free_gradient()

    def stop_unclosed(self) -> None:
        """End a run that ends without close()."""
        self.failures.publish_uncaught()
        self.stop()
        self.failures.end()
