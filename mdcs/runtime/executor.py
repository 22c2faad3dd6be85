"""All device code: what the runtime needs of a CPU or a CUDA device, behind one interface.

On both, a message is *done* when its bytes have really arrived and its update has really run, on the host's
clock: buffers are freed then and not before, so no allocation depends on ``record_stream``. On CUDA messages
run on one communication stream, and the dispatcher's thread watches events: for compute to come to where a message
was issued, and for messages. Neither stream waits for the other. In the communication stream whatever is queued behind
a wait for compute would wait too, the ends of earlier messages among it; compute would wait for messages queued behind
the one it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Waitable(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Block the caller, or on CUDA its stream, until it is done."""
        ...


def _nothing() -> None:
    pass


class Executor(Protocol):
    """What the runtime needs of a device."""

    def communicating(self) -> AbstractContextManager[Any]:
        """Run what is inside on the communication stream."""
        ...

    def mark(self) -> Any:
        """A point on the compute stream."""
        ...

    def after(self, mark: Any) -> None:
        """Block this thread until compute has come to a point: what communicates afterwards sees what is before it."""
        ...

    def has_come(self, mark: Any) -> bool:
        """Whether compute has come to a point."""
        ...

    def finish(self, works: Sequence[Waitable], meanwhile: Callable[[], object] = _nothing) -> None:
        """Block this thread until the collectives, and all queued on the communication stream, are done.

        Where compute comes to its marks without a thread of the host, ``meanwhile`` is called again and again.
        """
        ...

    def stamp(self) -> Any:
        """Now, on the stream of the caller."""
        ...

    def seconds(self, stamp: Any) -> float:
        """A stamp on the rank's clock; may wait for it to have happened."""
        ...

    def limit(self, size: int | None) -> None:
        """Let the allocator take little more than ``size`` bytes of the device, if it can be limited; None: no limit."""
        ...

    def retries(self) -> int | None:
        """How often the allocator had to give cached memory back to get some; None for one that caches none."""
        ...


class CpuExecutor:
    """Computing is done when a call returns, and threads communicate beside it."""

    def __init__(self) -> None:
        self._same = nullcontext()

    def communicating(self) -> AbstractContextManager[Any]:
        """There is no stream to enter."""
        return self._same

    def mark(self) -> None:
        """Nothing: compute has come to wherever it is."""
        return None

    def after(self, mark: None) -> None:
        """Return at once."""

    def has_come(self, mark: None) -> bool:
        """Yes."""
        return True

    def finish(self, works: Sequence[Waitable], meanwhile: Callable[[], object] = _nothing) -> None:
        """Wait for the collectives."""
        for work in works:
            work.wait()

    def stamp(self) -> float:
        """Seconds of ``time.perf_counter``."""
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        """The stamp itself."""
        return stamp

    def limit(self, size: int | None) -> None:
        """Do nothing: the allocator has no limit."""

    def retries(self) -> None:
        """None."""
        return None


_SEGMENTS = 2 * (2 + 20) << 20
"""What torch's allocator may have beyond what is asked of it: per stream a segment for small and one for larger tensors."""

_FINE_SECONDS = 10.0
"""CUDA tells times between events in single precision: to about a microsecond over so long, to a millisecond over hours."""

_POLL_SECONDS = 20e-6
"""Between looks at an event: to wait for one keeps a core busy."""


class CudaExecutor:
    """One communication stream, and events; see the module."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def communicating(self) -> AbstractContextManager[Any]:
        """The communication stream."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event:
        """An event on the stream of the caller."""
        event = torch.cuda.Event(blocking=True)  # the thread that waits for it takes no core from others
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, mark: torch.cuda.Event) -> None:
        """Wait for the event."""
        mark.synchronize()

    def has_come(self, mark: torch.cuda.Event) -> bool:
        """Whether the event has happened."""
        return mark.query()

    def finish(self, works: Sequence[Waitable], meanwhile: Callable[[], object] = _nothing) -> None:
        """Wait for an event behind the collectives on the communication stream."""
        with torch.cuda.stream(self.stream):
            for work in works:
                work.wait()
            event = torch.cuda.Event()
            event.record(self.stream)
        while not event.query():
            meanwhile()
            time.sleep(_POLL_SECONDS)

    def stamp(self) -> torch.cuda.Event:
        """An event with a time, on the stream of the caller."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        """The event's time; waits for it."""
        stamp.synchronize()
        elapsed = self._zero.elapsed_time(stamp) / 1e3
        seconds = self._zero_seconds + elapsed
        if elapsed > _FINE_SECONDS:
            self._zero, self._zero_seconds = stamp, seconds
        return seconds

    def limit(self, size: int | None) -> None:
        """See :meth:`Executor.limit`."""
        whole = torch.cuda.get_device_properties(self.device).total_memory
        share = 1.0
        if size is not None:
            torch.cuda.empty_cache()  # what profiling has left there would count
            share = min(1.0, (size + _SEGMENTS) / whole)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def retries(self) -> int:
        """Since the process began."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def executor_for(device: torch.device) -> Executor:
    """Raises ValueError for a device mdcs cannot run on."""
    if device.type == "cpu":
        return CpuExecutor()
    if device.type == "cuda":
        return CudaExecutor(device)
    raise ValueError(f"device {device} is not supported: cpu or cuda")
