"""All device code: what the runtime needs of a CPU or a CUDA device, behind one interface.

On both, a message is *done* when its bytes have really arrived and its update has really run, on the host's
clock: buffers are freed then and not before, so no allocation depends on ``record_stream``. On CUDA messages
run on one communication stream; it waits for compute by events, and the dispatcher thread, not the training
thread, waits for it. Compute needs no event of that stream: waiting for the stream would mean waiting for
messages queued behind the one it needs.
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
        """Make the communication stream wait for a point of compute."""
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
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, mark: torch.cuda.Event) -> None:
        self.stream.wait_event(mark)

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
        return self._zero_seconds + self._zero.elapsed_time(stamp) / 1e3


def executor_for(device: torch.device) -> Executor:
    """Raises ValueError for a device mdcs cannot run on."""
    if device.type == "cpu":
        return CpuExecutor()
    if device.type == "cuda":
        return CudaExecutor(device)
    raise ValueError(f"device {device} is not supported: cpu or cuda")
