"""The wire of a run: the queue, the messages, and what compute may ask of the transport that sends them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mdcs.emulation import Pacer
from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import FailureChannel
from mdcs.runtime.executor import run_on_comm_stream
from mdcs.runtime.message_queue import MessageQueue
from mdcs.runtime.messages import Messages

Gradients = tuple[tuple[int, int], ...]
"""(unit, bytes of its full gradients) pairs."""


class Wire(ABC):
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

    @abstractmethod
    def _begin(self) -> None:
        """Begin to send: make what the transport alone has."""

    @property
    def pool_bytes(self) -> int:
        """The most bytes that messages hold in memory that compute cannot use."""
        return 0

    @abstractmethod
    def issue(self, activations: int) -> None:
        """Issue the next message once its bytes fit beside ``activations``."""

    @abstractmethod
    def admit(self, size: int, what: str) -> None:
        """Let compute go on once ``size`` bytes of ``what`` fit beside all that is held. Call with the lock held."""

    @abstractmethod
    def wait_for(self, count: int, what: str) -> None:
        """Let compute go on behind the first ``count`` messages. Call with the lock held."""

    @abstractmethod
    def wait_for_norm(self, number: int) -> None:
        """Wait until the norm of the gradients that this message completes is known."""

    @abstractmethod
    def decide(self, number: int, applies: bool) -> None:
        """Let the updates of a held message be made, or drop them."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error of a thread, if there is one."""

    @abstractmethod
    def send_ahead(self, number: int) -> None:
        """Send a message out of its turn, with nothing in flight, and let compute come behind it."""

    @abstractmethod
    def end_step(self) -> None:
        """Note that compute has reached the end of an iteration."""

    @abstractmethod
    def stop(self) -> None:
        """End the transport after the issued messages."""

    def has_room(self, activations: int) -> bool:
        """Return whether the next message's bytes fit beside ``activations`` without waiting for messages in flight."""
        with self.lock:
            return self.queue.has_room(activations)

    def restart(self) -> int:
        """Forget the position in the plan, with nothing in flight, and free what an iteration holds: the next period
        is a prologue. Return its number."""
        with self.lock:
            for storage in self.storages:
                storage.reset_iteration()
            self.context.account.restart()
            self.messages.restart(self.queue.restart())
        return self.queue.first_period

    def finish_iteration(self, period: int) -> None:
        """End an iteration before its time: finish the issued messages, then send the period's reductions that are not
        issued.

        All ranks are at the same slot here and have issued the same messages, so the order is the same on all ranks.
        """
        queue, plan = self.queue, self.context.plan
        with self.lock:
            self.wait_for(queue.issued, "the messages in flight")
        if period <= queue.first_period:
            return  # the prologue reduces nothing
        first = period * queue.n
        ahead = [
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

    def gather(self, unit: int) -> None:
        """Make a unit whole and up to date, outside of the plan. Collective."""
        storage, executor = self.storages[unit], self.context.executor
        storage.allocate()
        with self.context.during(f"gather of {storage.name}"), run_on_comm_stream(executor):
            for b in range(len(storage.blocks)):
                storage.copy_shard_into_flat(b)
            executor.wait_works(self.messages.unshard_flat(unit, storage.flat_param))

    def free_gradients(self, gradients: Gradients) -> None:
        """Free full gradients that are reduced."""
        for unit, _ in gradients:
            self.storages[unit].free_gradient()

    def stop_unclosed(self) -> None:
        """End a run that ends without close()."""
        self.failures.publish_uncaught()
        self.stop()
        self.failures.end()
