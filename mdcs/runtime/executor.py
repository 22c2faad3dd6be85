"""All device code: what the runtime needs of a CPU or a CUDA device, behind one interface.

On both, a message is *done* when its bytes have really arrived and its update has really run, on the host's
clock: buffers are freed then and not before, so no allocation depends on ``record_stream``. On CUDA messages
run on one communication stream, and threads of the host wait for events: the dispatcher's starter for compute to
come to where a message was issued, its finisher for the message. Neither stream waits for the other. In the
communication stream whatever is queued behind a wait for compute would wait too, the ends of earlier messages among
it; compute would wait for messages queued behind the one it needs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Waitable(Protocol):
    """A collective that has been started."""

    def wait(self) -> object: ...


class Executor(Protocol):
    def communicating(self) -> AbstractContextManager[Any]:
        """Run what is inside on the communication stream."""
        ...

    def mark(self) -> Any:
        """A point on the compute stream."""
        ...

    def after(self, mark: Any) -> None:
        """Block this thread until compute has come to a point: what communicates afterwards sees what is before it."""
        ...

    def finish(self, works: Sequence[Waitable]) -> None:
        """Block this thread until the collectives, and all queued on the communication stream, are done."""
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
    def communicating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> None:
        return None

    def after(self, mark: None) -> None:
        pass

    def finish(self, works: Sequence[Waitable]) -> None:
        for work in works:
            work.wait()

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp

    def limit(self, size: int | None) -> None:
        pass

    def retries(self) -> None:
        return None


_SEGMENTS = 2 * (2 + 20) << 20
"""What torch's allocator may have beyond what is asked of it: per stream a segment for small and one for larger tensors."""

_FINE_SECONDS = 10.0
"""CUDA tells times between events in single precision: to about a microsecond over so long, to a millisecond over hours."""


class CudaExecutor:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def communicating(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # the thread that waits for it takes no core from others
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def finish(self, works: Sequence[Waitable]) -> None:
        with torch.cuda.stream(self.stream):
            for work in works:
                work.wait()
            event = torch.cuda.Event()
            event.record(self.stream)
        event.synchronize()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        stamp.synchronize()
        elapsed = self._zero.elapsed_time(stamp) / 1e3
        seconds = self._zero_seconds + elapsed
        if elapsed > _FINE_SECONDS:
            self._zero, self._zero_seconds = stamp, seconds
        return seconds

    def limit(self, size: int | None) -> None:
        whole = torch.cuda.get_device_properties(self.device).total_memory
        share = 1.0
        if size is not None:
            torch.cuda.empty_cache()  # what profiling has left there would count
            share = min(1.0, (size + _SEGMENTS) / whole)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def executor_for(device: torch.device) -> Executor:
    """Raises ValueError for a device mdcs cannot run on."""
    if device.type == "cpu":
        return CpuExecutor()
    if device.type == "cuda":
        return CudaExecutor(device)
    raise ValueError(f"device {device} is not supported: cpu or cuda")
