"""The stream transport by itself: what compute waits for, by the queue's own rule."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from mdcs.plan.lifetimes import Admission
from mdcs.runtime.stream_transport import StreamTransport
from mdcs.runtime.wire import MessageQueue, QueuedMessage

GRADIENTS = ((0, 30),)


class Streams:
    """Marks are numbered; ``compute`` and ``link`` are those that each of the two has waited for."""

    def __init__(self) -> None:
        self.marks, self.compute, self.link = 0, list[int](), list[int]()
        self.current = self.compute

    def record_event(self) -> int:
        self.marks += 1
        return self.marks

    def wait_event(self, mark: int) -> None:
        self.current.append(mark)

    def on_comm_stream(self) -> Any:
        return nullcontext()


def transport_of(admission: Admission, frees: tuple[tuple[int, int], ...] = ()) -> tuple[StreamTransport, Streams, list[Any]]:
    """A transport of two messages that need 10 bytes each beside the gradients that they free, and what it has freed."""
    freed: list[Any] = []
    streams, size = Streams(), sum(size for _, size in frees)
    effect = SimpleNamespace(gradients_after_link=frees, gradients_after_update=(), held=0, transient=0)
    messages: Any = SimpleNamespace(
        storages=[SimpleNamespace(free_gradient=lambda: freed.append(0))],
        plan=SimpleNamespace(messages=[SimpleNamespace(blocking=False)] * 2),
        is_held=lambda number: False, describe=str,
        prepare=lambda number: SimpleNamespace(number=number, step=1, bytes=effect, works=[]),
        launch=lambda transfer: None, land=lambda transfer: None, completed_update=lambda transfer: None,
    )  # fmt: skip
    context: Any = SimpleNamespace(
        account=SimpleNamespace(lock=threading.RLock()), executor=streams, ledger=SimpleNamespace(messages=[effect] * 2),
        recorder=SimpleNamespace(enqueued=lambda period, seconds: None),
    )
    queue = MessageQueue([QueuedMessage(-1, True, 0, size, 10)] * 2, admission, has_own_updates=True)
    failures: Any = None
    return StreamTransport(context, queue, messages, None, failures), streams, freed


def test_an_excess_is_waited_for_as_on_threads():
    admission = Admission(100, 40, depth=2)
    transport, streams, _ = transport_of(admission)
    transport.issue(0)
    waits = len(streams.compute)
    transport.admit(40, "a slot")
    assert len(streams.compute) == waits  # 40 + 40 + 10 fit
    admission.excess = 15
    transport.admit(40, "a slot")  # the message's own bytes make room for it, once the link comes behind the message
    assert len(streams.compute) == waits and transport.queue.updated == 1 and transport.queue.done == 0


def test_compute_waits_for_a_message_whose_gradients_it_needs_the_bytes_of():
    admission = Admission(100, 40, depth=2)
    transport, streams, freed = transport_of(admission, GRADIENTS)
    admission.reserve(30)
    transport.issue(0)
    assert transport.has_room(10) and not transport.has_room(11) and freed == []
    transport.admit(40, "a slot")
    assert freed == [0] and transport.queue.done == 1 and admission.reserved == 40


def test_gradients_are_freed_with_their_message_where_there_is_no_room_to_keep_them():
    admission = Admission(75, 40, depth=2)
    transport, _, freed = transport_of(admission, GRADIENTS)
    admission.reserve(30)
    transport.issue(0)  # in the worst case they make room for the message's own buffers
    assert freed == [0]
