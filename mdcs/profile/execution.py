"""Execution of messages by a backend: declared by the backend, stored in the profile, replayed by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

UPDATES = ("cores", "link", "stream")


@dataclass(frozen=True)
class ExecutionModel:
    """Resources and waits of a message after its bytes have come.

    ``updates`` says where unpacking and updates run:

    - ``cores``: on threads that serve one message after the other, while the link carries up to ``Link.depth`` messages
      (gloo on CPU).
    - ``link``: on the stream of the collectives. The next message starts when the update is done.
    - ``stream``: updates on a stream of their own. The next message starts when this one is unpacked, and while at most
      one update of the messages before is not done (:mod:`mdcs.runtime.stream_transport`).

    A host that enqueues ahead of its device takes ``host_seconds_per_message`` and ``host_seconds_per_slot``: no
    message or slot starts before the host has enqueued it, and with each step the host begins where the device is, as
    in a loop that reads its loss. 0 where the host's time is part of what was measured.

    Raises ValueError for another value of ``updates`` and for negative seconds.
    """

    updates: str = "cores"
    host_seconds_per_message: float = 0.0
    host_seconds_per_slot: float = 0.0

    def __post_init__(self) -> None:
        if self.updates not in UPDATES:
            raise ValueError(f"execution updates must be one of {', '.join(UPDATES)}, got {self.updates!r}")
        if min(self.host_seconds_per_message, self.host_seconds_per_slot) < 0:
            raise ValueError("execution host seconds must be >= 0")

    @property
    def has_own_updates(self) -> bool:
        """Whether updates run beside the link, which then carries one message at a time."""
        return self.updates == "stream"

    def in_flight(self, link_depth: int) -> int:
        """Return the messages from their start until they are done, on a link that carries ``link_depth`` at a time."""
        return {"cores": link_depth, "link": 1, "stream": 2}[self.updates]
