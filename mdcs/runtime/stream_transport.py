"""Sends messages on streams of a device that executes in order what the host enqueues: without threads and waits.

When the training thread issues a message, it enqueues all of it behind compute's present point:

    communication stream    pack, collective, unpack, norm    one message after the other
    update stream           update                            behind the message's end on the communication stream

Events order the streams. Only a message that gathers what was updated waits for an update, and a message waits for the
updates of those ``depth`` before it, which bounds their memory (:meth:`MessageQueue.starts_after`). Compute waits for a
message's end where a slot needs it, or its bytes.

The queue's states are reached in the order of the streams: a message has started and landed once it is enqueued, is
updated once the communication stream waits for its update, and done once compute waits for its end.

Memory is freed in the host's order, and given away in the order of the stream that it was allocated on. So each free
below stands behind a wait of that stream for whoever used the memory last; the reason is at the line.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mdcs.plan.lifetimes import max_in_flight_bytes
from mdcs.runtime.messages import Transfer, Update
from mdcs.runtime.thread_transport import LISTEN_SECONDS
from mdcs.runtime.wire import Gradients, Wire
from mdcs.torch_compat import named_range

_STEPS_AHEAD = 2
"""Iterations that the host may be ahead of the device."""


class StreamTransport(Wire):
    """Enqueues messages; see the module. What fails here fails in the training thread: there is no other."""

    def _begin(self) -> None:
        self.executor = self.context.executor
        # messages that compute does not wait for yet: (end, gradients to free after the wait)
        self._sent: deque[tuple[Any, Gradients]] = deque()
        self._updating: deque[Update] = deque()  # updates that the communication stream does not wait for yet
        self._ends: deque[Any] = deque()  # marks of the ends of iterations
        # enqueues the updates that wait for the loop, and ends their message
        self._held: Callable[[], None] | None = None

    @property
    def pool_bytes(self) -> int:
        """The most bytes that messages hold in the other streams' memory, apart from compute's."""
        messages = self.context.ledger.messages
        in_flight = max_in_flight_bytes([e.own_bytes for e in messages], self.queue.admission.depth)
        return sum(e.shards_held for e in messages) + in_flight

    # -- what compute asks for ------------------------------------------------------------------------------------

    def issue(self, activations: int) -> None:
        """Enqueue the next message. Compute waits on the device for earlier messages, if this makes room."""
        queue, messages, number = self.queue, self.messages, self.queue.issued
        while not (has_room := queue.admits_next(activations)) and self._wait_oldest():
            pass
        if not has_room:  # unless its gradients are freed before its updates need memory, as worst cases count
            effect = self.context.ledger.messages[number % queue.n]
            self._assert_fits(effect.held + activations + effect.transient, f"bytes for {messages.describe(number)}")
        if queue.issue() is not None:
            self._wait_for_updates(queue.starts_after(number) + 1)
            assert queue.next_start() == number
            queue.start()
            self._send(number, frees_gradients=not has_room)
            queue.land()
        if messages.plan.messages[number % queue.n].blocking and not messages.is_held(number):
            self.wait_for(number + 1, messages.describe(number))

    def admit(self, size: int, what: str) -> None:
        """Make compute wait for messages until ``size`` bytes fit. Raises RunError if they do not fit after all."""
        while not self.queue.admission.admits(size):
            if not self._wait_oldest():
                return self._assert_fits(size, f"bytes for {what}")

    def wait_for(self, count: int, what: str) -> None:
        """Make compute wait for the first ``count`` messages."""
        with named_range("wait", what):
            while self.queue.done < count:
                self._wait_oldest_on_compute()

    def _decided(self, number: int) -> None:
        """Enqueue the updates of a held message, or its end without them."""
        held, self._held = self._held, None
        if held is not None:
            try:
                held()
            except Exception as e:
                self.messages.raise_error(number, e)

    def send_ahead(self, number: int) -> None:
        """Send a message out of its turn, and let compute wait for it."""
        self.queue.send_ahead(number)
        self._send(number, frees_gradients=False)
        if self._updating:
            self._wait_for_update()
        end, gradients = self._sent.pop()
        self.executor.wait_event(end)
        self.free_gradients(gradients)

    def restart(self) -> int:
        """Forget the position in the plan, with nothing in flight: the next period is a prologue. Return its number."""
        self._wait_for_updates(self._enqueued)
        return super().restart()

    def end_step(self) -> None:
        """Wait on the host for the end of an iteration ``_STEPS_AHEAD`` before the one that ends, if necessary. Raises
        RunError when it does not come within ``timeout_s``, and when another rank has left.
        """
        self._ends.append(self.executor.record_event())
        if len(self._ends) <= _STEPS_AHEAD:
            return
        end, place, timeout_s = self._ends.popleft(), self.context.place, self.context.timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.executor.wait(end, max(0.0, min(LISTEN_SECONDS, deadline - time.monotonic()))):
            if (reason := self.failures.peer_failure()) or time.monotonic() >= deadline:
                step = place.step - 1 - _STEPS_AHEAD
                raise place.error(
                    f"{reason}. This rank waited for the GPU to finish step {step}" if reason else
                    f"the GPU has not finished step {step} after {timeout_s:g} s: look at the other ranks' logs, or "
                    "pass a longer timeout_s="
                )  # fmt: skip

    def stop(self) -> None:
        """Wait up to 5 s for the messages in flight: their memory may be reused after this."""
        with contextlib.suppress(RuntimeError):  # the device may have failed
            self._wait_for_updates(self._enqueued)
            with self.executor.on_comm_stream():
                end = self.executor.record_event()
            self.executor.wait(end, 5.0)

    # -- bytes, in the host's order -------------------------------------------------------------------------------

    @property
    def _enqueued(self) -> int:
        """Number of messages that are enqueued with their updates: all but one that waits for the loop."""
        return self.queue.landed - (self._held is not None)

    def _wait_oldest(self) -> bool:
        """Make a stream wait for the oldest update or message that it does not wait for yet; False: there is none."""
        if self.queue.updated < self._enqueued:
            self._wait_for_updates(self.queue.updated + 1)
        elif self._sent:
            self._wait_oldest_on_compute()
        else:
            return False
        return True

    def _assert_fits(self, size: int, what: str) -> None:
        if not self.queue.admission.fits(size):
            raise self.context.place.error(
                f"the budget has no room for {what}: plan with a larger budget, or more reserve"
            )

    def _wait_oldest_on_compute(self) -> None:
        """Make compute wait for the oldest message that it does not wait for yet; then free what that has used."""
        end, gradients = self._sent.popleft()
        self.executor.wait_event(end)
        # Compute's memory, which the other streams have read: what compute allocates next comes behind this wait.
        self.free_gradients(gradients)
        # The communication stream's memory: whatever is enqueued there next starts behind a later mark of compute.
        if self._updates(self.queue.done):
            self.messages.free_shards(self._updating.popleft())
        self.queue.finish()

    def _wait_for_updates(self, count: int) -> None:
        """Make the communication stream wait for the updates of the first ``count`` messages; free their shards."""
        while self.queue.updated < count:
            if self._updates(self.queue.updated):
                self._wait_for_update()
            self.queue.update()

    def _updates(self, number: int) -> bool:
        """Return whether the oldest update that the communication stream does not wait for is this message's."""
        return bool(self._updating) and self._updating[0].transfer.number == number

    def _wait_for_update(self) -> None:
        with self.executor.on_comm_stream():
            update = self._updating.popleft()
            self.executor.wait_event(update.end)
            # The communication stream's memory, which the update has read: the next message's buffers get it behind
            # this wait. The same holds for the factor on the gradients, which ends with ``update``.
            self.messages.free_shards(update)

    # -- one message ----------------------------------------------------------------------------------------------

    def _send(self, number: int, frees_gradients: bool) -> None:
        """Enqueue a message. ``frees_gradients``: there is no room to keep its gradients until compute waits for it."""
        messages, executor, begun = self.messages, self.executor, time.perf_counter()
        try:
            transfer = messages.prepare(number)  # on compute's stream, which uses and frees it
            # Behind the allocation: compute may have waited for the last user of that memory just before.
            here = self._mark_compute()
            with executor.on_comm_stream():
                executor.wait_event(here)
                self._communicate(transfer)
                end = executor.record_event()
            unfreed = self._free_or_keep(transfer.bytes.gradients_after_link, end, frees_gradients)
            if (update := messages.completed_update(transfer)) is not None:
                end = self._scale(update, end)

            def finish() -> None:
                last = end if update is None else self._update(update, end)
                after = self._free_or_keep(transfer.bytes.gradients_after_update, last, frees_gradients)
                self._sent.append((last, unfreed + after))

            if messages.is_held(number):
                self._held = finish
            else:
                finish()
        except Exception as e:
            messages.raise_error(number, e)
        else:
            self.context.recorder.enqueued(transfer.step, time.perf_counter() - begun)

    def _mark_compute(self) -> Any:
        return self.executor.record_event()

    def _communicate(self, transfer: Transfer) -> None:
        messages, executor = self.messages, self.executor
        messages.launch(transfer)
        for work in transfer.works:
            work.wait()  # of gloo; NCCL's collectives are on this stream
        if self.pacer is not None:
            message = transfer.message
            executor.sleep(self.pacer.link.end(message.kind, messages.plan.wire(message), 0.0, -math.inf))
        messages.land(transfer)  # frees staging: memory of this stream, whose next user is on it, too

    def _scale(self, update: Update, landed: Any) -> Any:
        """Enqueue what the factor on the gradients needs. Return the point behind it."""
        if not self.messages.scale.is_needed:
            self.messages.find_scale(update)
            return landed
        # The norm's all-reduces go on the communication stream: collectives of two communicators side by side, in an
        # order that may differ between ranks, can block each other.
        with self.executor.on_comm_stream():
            self.messages.find_scale(update)
            return self.executor.record_event()

    def _update(self, update: Update, landed: Any) -> Any:
        """Enqueue the update on its own stream, so that the next collective does not wait for it. Return its end."""
        executor = self.executor
        with executor.on_update_stream():
            executor.wait_event(landed)
            self.messages.update(update)
            update.end = executor.record_event()
        self._updating.append(update)
        return update.end

    def _free_or_keep(self, gradients: Gradients, end: Any, frees: bool) -> Gradients:
        """Return gradients to free when compute waits for the message; or let it wait now, and free them."""
        if not frees or not gradients:
            return gradients
        self.executor.wait_event(end)
        self.free_gradients(gradients)
        return ()
