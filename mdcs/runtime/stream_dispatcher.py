"""The dispatcher of a device that executes in order what the host enqueues: no threads, and no waits on the host.

When the training thread issues a message, it enqueues all of the message on the communication stream, from packing to
the updates that it completes, behind compute's present point. Work that needs the message waits for its end on the
device. The device's order is therefore that of the threaded dispatcher, while the host has moved on.

Lifetimes (the allocator sees only the host's order):

- A message's own buffers: memory of the communication stream, freed as soon as the message is enqueued. The next
  buffer there is used on the same stream, so later.
- Gathered parameters: memory of the compute stream, freed at the end of the slot that used them. The next gather into
  this memory starts behind an event recorded after the free.
- Full gradients: memory of the compute stream. The communication stream still reads them after the enqueue. They are
  freed once compute waits for the message's end on the device: when a slot needs the message, or its bytes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import Any, NamedTuple

from mdcs.plan.ledger import Ledger, MessageBytes
from mdcs.plan.message import Message
from mdcs.runtime.dispatcher import LISTEN_SECONDS, Dispatcher
from mdcs.runtime.errors import RunError

_STEPS_AHEAD = 2
"""Iterations that the host may be ahead of the device."""

Gradients = tuple[tuple[int, int], ...]
"""(unit, bytes of its gradients) pairs."""


class _Sent(NamedTuple):
    """An enqueued message that compute does not wait for yet: number, end, gradients to free after the wait."""

    number: int
    end: Any
    gradients: Gradients


def bytes_apart(ledger: Ledger) -> int:
    """Return the most bytes that a plan's messages hold in the communication stream's memory, apart from compute's."""
    return sum(e.shards_held for e in ledger.messages) + max((_own(e) for e in ledger.messages), default=0)


def _own(effect: MessageBytes) -> int:
    """Return the bytes that a message holds alone, until it ends. Its gradients are not included: they are freed later.
    """
    return effect.shards - effect.shards_held + max(effect.staging, effect.scratch)


class StreamDispatcher(Dispatcher):
    """Dispatcher by streams and events; see the module. Bytes are reserved and released in the host's order."""

    def _begin(self) -> None:
        self._sent: deque[_Sent | None] = deque()  # None: skipped
        self._gradients: Gradients = ()  # freed by the message that is being enqueued
        self._is_tight = False  # no room to keep the gradients until compute waits
        self._ends: deque[Any] = deque()  # marks of the ends of iterations
        self._own = [_own(e) for e in self.ledger.messages]
        # Without a budget: the predicted peak. Without any limit compute would wait only where a slot needs a message,
        # and gradients would pile up.
        predicted = self.plan.prediction
        self._wanted = self.account.cap if predicted is None or self.account.cap is not None else predicted.peak_bytes

    def issue(self, index: int, activations: int, mark: Any) -> None:
        """Enqueue the message; compute waits on the device for earlier messages, if this makes room."""
        i = index % self.n
        message, effect = self.plan.messages[i], self.ledger.messages[i]
        if self._in_prologue(index) and not self.plan.in_prologue(message) or index in self._skipped:
            self._skipped.discard(index)
            self._sent.append(None)
        else:
            self._is_tight = not self._make_room(effect.held + activations + self._own[i])
            if self._is_tight:
                self._insist(effect.held + activations + self._transient[i], f"bytes for {self.describe(i)}")
            self.account.reserve((effect.held,))
            self._enqueue(index, mark)
        self.issued = self.started = index + 1
        if message.blocking:
            self.wait_for(index + 1, self.describe(i))

    def has_room(self, index: int, activations: int) -> bool:
        """Return whether the message's bytes fit without a wait of compute on the device."""
        i = index % self.n
        return self._fits(self.ledger.messages[i].held + activations + self._own[i])

    def admit(self, size: int, what: str) -> None:
        """Make compute wait for messages until ``size`` bytes fit. Raises RunError if they do not fit after all."""
        if not self._make_room(size):
            self._insist(size, f"bytes for {what}")

    def wait_for(self, count: int, what: str) -> None:
        """Make compute wait for the first ``count`` messages."""
        while self.processed < count:
            self._let_compute_wait()

    def end_step(self) -> None:
        """Wait on the host for the end of an iteration ``_STEPS_AHEAD`` before, if necessary.

        Raises RunError when it does not come within ``timeout_s``, and when another rank has left.
        """
        self.check()
        self._ends.append(self.executor.mark())
        if len(self._ends) <= _STEPS_AHEAD:
            return
        end, deadline = self._ends.popleft(), time.monotonic() + self.timeout_s
        while not self.executor.wait(end, max(0.0, min(LISTEN_SECONDS, deadline - time.monotonic()))):
            heard = self.last_words.heard()
            if heard or time.monotonic() >= deadline:
                waited = "" if heard else f"{self.timeout_s:g} s "
                raise RunError(
                    f"rank {self.wire.rank}, step {self.step}: waited {waited}for the device to come to the end of step "
                    f"{self.step - _STEPS_AHEAD}{f' ({heard})' if heard else ''}"
                )

    def stop(self) -> None:
        """Wait up to 5 s for the messages in flight: their memory may be reused after this."""
        with contextlib.suppress(RuntimeError):  # the device may have failed
            with self.executor.communicating():
                end = self.executor.mark()
            self.executor.wait(end, 5.0)

    def _fits(self, size: int) -> bool:
        return self._wanted is None or self.account.reserved + size <= self._wanted

    def _make_room(self, size: int) -> bool:
        while not (fits := self._fits(size)) and self._sent:
            self._let_compute_wait()
        return fits

    def _insist(self, size: int, what: str) -> None:
        if not self.account.fits(size, 0):
            raise RunError(f"rank {self.wire.rank}, step {self.step}: {what} do not fit, and nothing is left to wait for")

    def _let_compute_wait(self) -> None:
        """Make compute wait for the oldest message that it does not wait for yet; then free the message's gradients."""
        sent = self._sent.popleft()
        if sent is not None:
            self.executor.after(sent.end)
            super()._free_gradients(sent.gradients)
            super()._release(sent.number % self.n)
        self.processed += 1

    def _enqueue(self, index: int, mark: Any) -> None:
        self._gradients = ()
        super()._send_now(index, mark)
        with self.executor.communicating():
            self._sent.append(_Sent(index, self.executor.mark(), self._gradients))

    # -- what is different inside of a message ------------------------------------------------------------------

    def _send_now(self, index: int, mark: Any) -> None:
        self._is_tight = False
        self._enqueue(index, mark)
        self._let_compute_wait()
        self.processed -= 1  # processed moves on when its turn comes: the message is in _skipped

    def _behind(self, index: int) -> Any:
        """Return a mark of compute now: since the issue, compute may have waited for the last user of this memory."""
        del self._marks[index]
        return self.executor.mark()

    def _free_gradients(self, gradients: Gradients) -> None:
        if self._is_tight and gradients:
            landed = self.executor.mark()
            with self.executor.computing():
                self.executor.after(landed)
            super()._free_gradients(gradients)
        else:
            self._gradients += gradients

    def _release(self, i: int) -> None:
        """Do nothing: bytes are released when compute waits for the message."""

    def _hold(self, index: int, message: Message) -> None:
        if self.pacer is not None:
            self.executor.pause(self.pacer.link.end(message.kind, self.plan.wire(message), 0.0, -math.inf))
