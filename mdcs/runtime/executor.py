"""All device code: what the runtime needs of a CPU or a CUDA device, behind one interface.

On a CPU computing is done when a call returns, and messages are when a thread of the host has seen that they are. On
CUDA the host only enqueues, and runs ahead: messages are on one communication stream, and what must come before what is
said with events, which streams wait for and the host does not. ``docs/gpu.md`` has the rules by which memory is freed
there without ``record_stream``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from mdcs.runtime.errors import RunError


class Waitable(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Block the caller, or on CUDA its stream, until it is done."""
        ...


class Executor(Protocol):
    """What the runtime needs of a device. ``runs_ahead``: the host only enqueues what the device then does in order."""

    runs_ahead: bool

    def communicating(self) -> AbstractContextManager[Any]:
        """Run what is inside on the communication stream."""
        ...

    def computing(self) -> AbstractContextManager[Any]:
        """Inside of :meth:`communicating`: run what is inside on the stream that it was entered from."""
        ...

    def mark(self) -> Any:
        """The point to which the caller's stream has come."""
        ...

    def after(self, mark: Any) -> None:
        """Let what the caller's stream does from now on see all that was done before a point."""
        ...

    def has_come(self, mark: Any) -> bool:
        """Whether the device has come to a point, or a stamp."""
        ...

    def wait(self, mark: Any, timeout_s: float) -> bool:
        """Block the host until the device has come to a point; False if it has not within ``timeout_s``."""
        ...

    def finish(self, works: Sequence[Waitable]) -> None:
        """Let what the caller's stream does from now on see what collectives bring."""
        ...

    def pause(self, seconds: float) -> None:
        """Let the caller's stream do nothing for so long."""
        ...

    def stamp(self) -> Any:
        """Now, on the stream of the caller."""
        ...

    def seconds(self, stamp: Any) -> float:
        """A stamp on the rank's clock; may wait for it to have happened."""
        ...

    def limit(self, size: int | None) -> None:
        """Let the allocator take little more than ``size`` bytes of the device, if it can be limited; None: as before."""
        ...

    def retries(self) -> int | None:
        """How often the allocator had to give cached memory back to get some; None for one that caches none."""
        ...


@contextmanager
def between(executor: Executor) -> Iterator[None]:
    """Communicate here: what is inside sees what compute has done so far, and compute sees it from now on."""
    here = executor.mark()
    with executor.communicating():
        executor.after(here)
        yield
        there = executor.mark()
    executor.after(there)


class CpuExecutor:
    """Computing is done when a call returns, and threads communicate beside it."""

    runs_ahead = False

    def __init__(self) -> None:
        self._same = nullcontext()

    def communicating(self) -> AbstractContextManager[Any]:
        """There is no stream to enter."""
        return self._same

    def computing(self) -> AbstractContextManager[Any]:
        """There is no stream to enter."""
        return self._same

    def mark(self) -> None:
        """Nothing: compute has come to wherever it is."""
        return None

    def after(self, mark: None) -> None:
        """Return at once."""

    def has_come(self, mark: Any) -> bool:
        """Yes."""
        return True

    def wait(self, mark: None, timeout_s: float) -> bool:
        """It has come."""
        return True

    def finish(self, works: Sequence[Waitable]) -> None:
        """Wait for the collectives."""
        for work in works:
            work.wait()

    def pause(self, seconds: float) -> None:
        """Block the caller for so long."""
        time.sleep(seconds)

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
"""Between looks at an event, where the host waits after all: CUDA's own wait keeps a core busy, and has no end."""

_PATIENCE_SECONDS = 300.0
"""How long somebody who asks for a time waits for it."""

_CYCLES = 20_000_000
"""Of the kernel by which the length of a cycle is measured: some 10 ms."""


class CudaExecutor:
    """One communication stream, and events; see the module. ``cuda`` is torch.cuda, or what stands in for it in tests."""

    runs_ahead = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self._cuda = device, cuda
        self.stream = cuda.Stream(device, priority=-1)
        self._compute = cuda.current_stream(device)
        self._seconds_per_cycle: float | None = None
        self._share_before: float | None = None  # of the device: what the process could have before this limited it
        self._zero = cuda.Event(enable_timing=True)
        self._zero.record(self._compute)
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def communicating(self) -> AbstractContextManager[Any]:
        """The communication stream."""
        current = self._cuda.current_stream(self.device)
        if current != self.stream:
            self._compute = current
        entered: AbstractContextManager[Any] = self._cuda.stream(self.stream)
        return entered

    def computing(self) -> AbstractContextManager[Any]:
        """The stream that :meth:`communicating` was called on."""
        entered: AbstractContextManager[Any] = self._cuda.stream(self._compute)
        return entered

    def mark(self) -> Any:
        """An event on the stream of the caller."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self.device))
        return event

    def after(self, mark: Any) -> None:
        """The caller's stream waits for the event; the host does not."""
        self._cuda.current_stream(self.device).wait_event(mark)

    def has_come(self, mark: Any) -> bool:
        """Whether the event has happened."""
        return bool(mark.query())

    def wait(self, mark: Any, timeout_s: float) -> bool:
        """Look at the event again and again."""
        deadline = time.monotonic() + timeout_s
        while not mark.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def finish(self, works: Sequence[Waitable]) -> None:
        """The caller's stream waits for NCCL's own; over gloo the host does, too."""
        for work in works:
            work.wait()

    def pause(self, seconds: float) -> None:
        """A kernel that counts cycles. The first call measures how long one takes, and waits for it."""
        if self._seconds_per_cycle is None:
            begin = self.stamp()
            self._cuda._sleep(_CYCLES)
            end = self.stamp()
            self._seconds_per_cycle = (self.seconds(end) - self.seconds(begin)) / _CYCLES
        self._cuda._sleep(int(seconds / self._seconds_per_cycle))

    def stamp(self) -> Any:
        """An event with a time, on the stream of the caller."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def seconds(self, stamp: Any) -> float:
        """The event's time; waits for it. Raises RunError if it does not come."""
        if not self.wait(stamp, _PATIENCE_SECONDS):
            raise RunError(f"{self.device} has not come in {_PATIENCE_SECONDS:g} s to where a time was taken")
        elapsed = self._zero.elapsed_time(stamp) / 1e3
        seconds: float = self._zero_seconds + elapsed
        if elapsed > _FINE_SECONDS:
            self._zero, self._zero_seconds = stamp, seconds
        return seconds

    def limit(self, size: int | None) -> None:
        """See :meth:`Executor.limit`."""
        if size is None:
            if self._share_before is not None:
                self._cuda.set_per_process_memory_fraction(self._share_before, self.device)
            self._share_before = None
            return
        if self._share_before is None:
            known = getattr(self._cuda, "get_per_process_memory_fraction", None)  # newer than torch 2.6
            self._share_before = 1.0 if known is None else float(known(self.device))
        self._cuda.empty_cache()  # what profiling has left there would count
        whole = self._cuda.get_device_properties(self.device).total_memory
        share = min(self._share_before, (size + _SEGMENTS) / whole)
        self._cuda.set_per_process_memory_fraction(share, self.device)

    def retries(self) -> int:
        """Since the process began."""
        return int(self._cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def with_index(device: torch.device | str) -> torch.device:
    """The device that tensors made on ``device`` are on: of "cuda" the current one, as parts of torch.cuda want it by number."""
    device = torch.device(device)
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def executor_for(device: torch.device) -> Executor:
    """Raises ValueError for a device mdcs cannot run on."""
    if device.type == "cpu":
        return CpuExecutor()
    if device.type == "cuda":
        return CudaExecutor(with_index(device))
    raise ValueError(f"device {device} is not supported: cpu or cuda")
