"""Sends messages with host threads, several in flight, and finishes them in the plan's order.

The *starter* starts messages: gloo copies the payload on the calling thread, which would block compute or an update.
The *finisher* waits for the oldest message, unpacks it, runs the updates that it completes, and frees its buffers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from mdcs.runtime.errors import RunError
from mdcs.runtime.messages import Transfer
from mdcs.runtime.wire import Wire
from mdcs.torch_compat import named_range

LISTEN_SECONDS = 0.5
"""Seconds between checks, while waiting, whether another rank has left."""
_ALIKE = "Run equally many steps on every rank, or pass parallelize(…, timeout_s=) a longer time"


class ThreadTransport(Wire):
    """The starter and the finisher, and the training thread's interface to them."""

    def _begin(self) -> None:
        self._stop = False
        self._in_flight: deque[Transfer] = deque()
        self._work = threading.Condition(self.lock)  # what the finisher waits for
        self._ready = threading.Condition(self.lock)  # what the starter waits for
        self._progress = threading.Condition(self.lock)  # the training thread waits on this
        self._awaited: Callable[[], bool] | None = None  # the condition that it waits for
        self._scaled = 0  # messages up to the last one whose norm is known
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"mdcs-{name}", daemon=True)
            for name, work in (("starter", self._start_all), ("finisher", self._finish_all))
        ]
        for thread in self._threads:
            thread.start()

    # -- called by the training thread --------------------------------------------------------------------------

    def issue(self, activations: int) -> None:
        """Issue the next message, waiting for messages in flight until its bytes fit, and let it start."""
        queue, messages = self.queue, self.messages
        with self.lock:
            if not queue.admits_next(activations):
                self.wait(lambda: queue.admits_next(activations), f"bytes for {messages.describe(queue.issued)}")
            number = queue.issued
            queue.issue()
        self._start_ready()
        if messages.plan.messages[number % queue.n].blocking and not messages.is_held(number):
            with self.lock:
                self.wait_for(number + 1, messages.describe(number))

    def admit(self, size: int, what: str) -> None:
        """Wait until ``size`` bytes of compute fit beside all that is held. Call with the lock held."""
        if not self.queue.admission.admits(size):
            self.wait(lambda: self.queue.admission.admits(size), f"bytes for {what}")

    def wait_for(self, count: int, what: str) -> None:
        """Wait until the first ``count`` messages are done. Call with the lock held."""
        if self.queue.done < count:
            self.wait(lambda: self.queue.done >= count, what)

    def wait_for_norm(self, number: int) -> None:
        """Wait until the norm of the gradients that this message completes is known."""
        with self.lock:
            self.wait(lambda: self._scaled > number or self.queue.done > number, "the gradients' norm")

    def _decided(self, number: int) -> None:
        self._work.notify()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready``. Call with the lock held exactly once. Raises RunError after the context's
        ``timeout_s``, when a thread has failed, and when another rank has left.
        """
        queue, timeout_s = self.queue, self.context.timeout_s
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.check()
            self._awaited = lambda: self.error is not None or ready()
            with named_range("wait", what):
                in_time = self._progress.wait_for(self._awaited, min(LISTEN_SECONDS, deadline - time.monotonic()))
            self._awaited = None
            if in_time:
                continue
            self.lock.release()  # the store may answer late or never: let the other threads go on meanwhile
            try:
                reason = self.failures.peer_failure()
            finally:
                self.lock.acquire()
            if not ready() and (reason or time.monotonic() >= deadline):
                first = what if queue.done == queue.issued else self.messages.describe(queue.done)
                if first != what:
                    what = f"{what}; the first message that is not done: {first}"
                raise self.context.place.error(
                    f"{reason}. This rank waited for it ({what})" if reason else
                    f"waited {timeout_s:g} s for the other ranks ({what}). {_ALIKE}"
                )  # fmt: skip
        self.check()

    def send_ahead(self, number: int) -> None:
        """Send a message out of its turn, with nothing in flight, and wait for it."""
        with self.lock:
            self.queue.send_ahead(number)
        self._finish(self._start(number))

    def stop(self) -> None:
        """End the threads after the issued messages. If all ranks stop at the same slot, none misses a peer."""
        with self.lock:
            self._stop = True
            self._wake_all()
        deadline = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- starting -----------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        while True:
            with self.lock:
                while (number := self._next()) is None and not self._has_ended():
                    self._ready.wait()
            if number is None:
                return
            transfer = self._start(number)
            with self.lock:
                self._in_flight.append(transfer)
                self.queue.start()
                self._work.notify()

    def _start_ready(self) -> None:
        """Let the starter start the messages that can start now. Without the lock."""
        with self.lock:
            if self._next() is not None:
                self._ready.notify()

    def _next(self) -> int | None:
        """Return the number of the next message if it may start now, else None.

        It waits until the last step of the message before it is on the link. Before that step it would be done later by
        its own bytes, and nothing would be on the link while the finisher updates with it.
        """
        if self.error is not None:
            return None
        is_behind = self._in_flight and not all(work.is_in_last_step for work in self._in_flight[-1].works)
        return None if is_behind else self.queue.next_start()

    def _start(self, number: int) -> Transfer:
        try:
            transfer = self.messages.prepare(number)
            if self.pacer is not None:
                self.pacer.started(number)
            self.messages.launch(transfer)
            return transfer
        except Exception as e:
            self._raise(number, e)

    # -- both threads -------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._fail(e)

    def _raise(self, number: int, error: Exception) -> NoReturn:
        try:
            self.messages.raise_error(number, error)
        except RunError as named:
            self._fail(named)
            raise

    def _fail(self, e: BaseException) -> None:
        """Keep the first error; every thread stops for it."""
        with self.lock:
            self.error = self.error or (e if isinstance(e, RunError) else RunError(str(e)))
            self._wake_all()

    def _has_ended(self) -> bool:
        return self.error is not None or self._stop and self.queue.done == self.queue.issued

    def _wake_all(self) -> None:
        for waited_for in (self._work, self._ready, self._progress):
            waited_for.notify()

    # -- the finisher -------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        while True:
            with self.lock:
                while not self._in_flight and not self._has_ended():
                    self._work.wait()
                if not self._in_flight:
                    return
            self._finish(self._in_flight[0], self._start_ready)
            with self.lock:
                self._in_flight.popleft()
                self.queue.finish()
                if self._awaited is not None and self._awaited():
                    self._progress.notify()
                if self._stop:
                    self._wake_all()
            self._start_ready()

    def _finish(self, transfer: Transfer, begun: Callable[[], None] = lambda: None) -> None:
        messages, number, message = self.messages, transfer.number, transfer.message
        try:
            for work in transfer.works:
                work.wait(begun)
            if self.pacer is not None:
                self.pacer.hold(number, message.kind, messages.plan.wire(message))
            messages.land(transfer)
            self.free_gradients(transfer.bytes.gradients_after_link)
            if (update := messages.completed_update(transfer)) is not None:
                messages.find_scale(update)
                self._hold(number)
                messages.update(update)
                messages.free_shards(update)
            self.free_gradients(transfer.bytes.gradients_after_update)
        except Exception as e:
            self._raise(number, e)

    def _hold(self, number: int) -> None:
        """Wait for the loop to decide on the updates of a message; the end of the run drops them."""
        messages = self.messages
        with self.lock:
            self._scaled = number + 1
            if self._awaited is not None and self._awaited():
                self._progress.notify()
            while messages.is_held(number) and self.error is None:
                if self._stop:
                    messages.decided, messages.drops = number + 1, True
                    return
                self._work.wait()
