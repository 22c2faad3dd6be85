"""Messages on a device that does in order what the host enqueues: no thread, and nothing that the host waits for.

The training thread enqueues a message when it issues it, from packing to the updates that it completes, on the communication
stream, behind the point that compute has come to. What needs a message waits for its end on the device. So the device does
what the dispatcher of threads does, in the same order; the host has gone on.

Memory is the allocator's, which knows the host's order only. A message's own buffers are of the communication stream's
memory and freed as soon as all is enqueued: what is put there next comes behind them. Gathered parameters and gradients are
of compute's memory, beside activations. Parameters are freed at the end of the slot that used them, for the message that
puts others there starts behind it. A gradient is still to be sent when the host has enqueued that: it is freed when compute
has been told to wait for the message, which is when a slot needs the message, or the bytes.
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
"""Iterations whose end the host may have enqueued and the device not come to."""

Gradients = tuple[tuple[int, int], ...]
"""Units, and the bytes of their gradients."""


class _Sent(NamedTuple):
    """A message that compute has not been told to wait for: where it ends, and whose gradients are free then."""

    number: int
    end: Any
    gradients: Gradients


def bytes_apart(ledger: Ledger) -> int:
    """The most that a plan's messages have of the communication stream's memory, which compute cannot have meanwhile."""
    return sum(e.shards_held for e in ledger.messages) + max((_own(e) for e in ledger.messages), default=0)


def _own(effect: MessageBytes) -> int:
    """Of a message, and of no other after it. Beside its gradients: they are freed later here, not before the update."""
    return effect.shards - effect.shards_held + max(effect.staging, effect.scratch)


class StreamDispatcher(Dispatcher):
    """See the module. Bytes are promised and taken back in the host's order."""

    def _begin(self) -> None:
        self._sent: deque[_Sent | None] = deque()  # None: skipped
        self._gradients: Gradients = ()  # of the message that is being enqueued
        self._is_tight = False  # there is no room to keep them
        self._ends: deque[Any] = deque()  # of iterations
        self._own = [_own(e) for e in self.ledger.messages]
        # Without a budget, what the plan was predicted to take: nobody else would ever make compute wait for a gradient.
        predicted = self.plan.prediction
        self._wanted = self.account.cap if predicted is None or self.account.cap is not None else predicted.peak_bytes

    def issue(self, index: int, activations: int, mark: Any) -> None:
        """Enqueue the message; compute waits for others on the device, if that makes room for it."""
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
        """Whether the message's bytes fit without compute waiting for others on the device."""
        i = index % self.n
        return self._fits(self.ledger.messages[i].held + activations + self._own[i])

    def admit(self, size: int, what: str) -> None:
        """Let compute wait for messages until ``size`` bytes fit. Raises RunError if they do not when all are done."""
        if not self._make_room(size):
            self._insist(size, f"bytes for {what}")

    def wait_for(self, count: int, what: str) -> None:
        """Let compute wait for the first ``count`` messages."""
        while self.processed < count:
            self._let_compute_wait()

    def end_step(self) -> None:
        """Wait, if it must be, for the end of an iteration some before.

        Raises RunError when it does not come in ``timeout_s``, and when another rank has left meanwhile.
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
        """Wait a little for what is in flight: its memory may be given away after this."""
        with contextlib.suppress(RuntimeError):  # of a device that has failed
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
        """For the oldest message that it has not waited for, whose gradients are free then."""
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
        self.processed -= 1  # its turn is yet to come

    def _behind(self, index: int) -> Any:
        """Where compute is by now: it may have been told to wait for what had the memory that the message was given."""
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
        """When compute waits for the message."""

    def _hold(self, index: int, message: Message) -> None:
        if self.pacer is not None:
            self.executor.pause(self.pacer.link.end(message.kind, self.plan.wire(message), 0.0, -math.inf))
