"""All device code: the runtime's interface to a CPU or a CUDA device.

On a CPU, compute is done when a call returns, and a message when a host thread has waited for it. On CUDA the host only
enqueues, and runs ahead: messages on one communication stream, their updates on another. Events order the streams; the
host does not wait. ``docs/dev/gpu.md`` has the rules by which memory is freed without ``record_stream``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from mdcs.profile.link import ExecutionModel
from mdcs.runtime.errors import RunError
from mdcs.torch_compat import pause_kernel


class Waitable(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Block the caller, or on CUDA its current stream, until the collective is done."""
        ...


class Executor:
    """Device operations of the runtime, on a CPU: without streams, and compute is always at its point.

    - ``runs_ahead``: the host only enqueues, and the device executes in order.
    - ``execution``: how messages are executed, for the simulator.
    """

    runs_ahead = False
    execution = ExecutionModel("cores")

    def on_comm_stream(self) -> AbstractContextManager[Any]:
        """Return a context that runs its body on the communication stream."""
        return _SAME

    def on_update_stream(self) -> AbstractContextManager[Any]:
        """Return a context that runs its body on the update stream."""
        return _SAME

    def record_event(self) -> Any:
        """Record a point on the caller's stream."""
        return None

    def wait_event(self, mark: Any) -> None:
        """Make later work of the caller's stream wait for a point; the host does not wait."""

    def query(self, mark: Any) -> bool:
        """Return whether the device has reached a point, or a stamp."""
        return True

    def wait(self, mark: Any, timeout_s: float) -> bool:
        """Block the host until the device reaches a point; return False after ``timeout_s`` seconds."""
        return True

    def sleep(self, seconds: float) -> None:
        """Keep the caller's stream idle for so many seconds."""
        time.sleep(seconds)

    def record_timestamp(self) -> Any:
        """Record the time on the caller's stream."""
        return time.perf_counter()

    def seconds(self, stamp: Any) -> float:
        """Return a stamp in seconds on the rank's clock, once the device reaches it; RunError if it does not in time.
        """
        return float(stamp)

    def limit(self, size: int | None) -> None:
        """Limit the allocator to little more than ``size`` bytes of the device, if it can be limited; None restores."""

    def retries(self) -> int | None:
        """Return how often the allocator freed cached memory to serve a request; None for one without a cache."""
        return None


_SAME = nullcontext()


@contextmanager
def run_on_comm_stream(executor: Executor) -> Iterator[None]:
    """Communicate in stream order: the body sees all compute so far, and later compute sees the body's results."""
    here = executor.record_event()
    with executor.on_comm_stream():
        executor.wait_event(here)
        yield
        there = executor.record_event()
    executor.wait_event(there)


_SEGMENTS = 2 * (2 + 20) << 20
"""Bytes that torch's allocator may cache beyond requests: per stream a segment for small and one for larger tensors."""

_FRAGMENTED = 0.75
"""Part of the requested bytes that the allocator may hold in fragments. Measured on an H200: 0.03 to 0.12, up to 0.46
where all units recompute (docs/dev/gpu.md). The byte account keeps the budget; this limit is the net below."""

_FINE_SECONDS = 10.0
"""Span over which event times are exact to about a microsecond (single precision); over hours only to a millisecond."""

_POLL_SECONDS = 20e-6
"""Seconds between polls of an event: CUDA's own wait keeps a core busy and has no timeout."""

_PATIENCE_SECONDS = 300.0
"""Seconds for which :meth:`Executor.seconds` waits for a stamp."""


class DeviceTimestamp:
    """A time on a device's current stream, taken without a wait: it comes when the work enqueued so far is done.

    ``cuda``: torch.cuda, or its stand-in in tests; None: torch.cuda for a CUDA device.
    """

    def __init__(self, device: torch.device, cuda: Any = None, stream: Any = None) -> None:
        cuda = torch.cuda if cuda is None and device.type == "cuda" else cuda
        self._event = None if cuda is None else cuda.Event(enable_timing=True)
        self._seconds = time.perf_counter()
        if self._event is not None:
            self._event.record(cuda.current_stream(_number(device)) if stream is None else stream)

    def query(self) -> bool:
        """Return whether it has come."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Block the host until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def until(self, later: DeviceTimestamp) -> float:
        """Return the seconds until a later mark; waits for that mark."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        if not later.query():
            later.wait()
        return float(self._event.elapsed_time(later._event)) / 1e3


class _Entered(threading.local):
    """The stream that this thread is on by :class:`_OnStream`. torch.cuda needs several microseconds to say it."""

    stream: Any = None


class _OnStream:
    """torch.cuda.stream, in less of the host's time."""

    def __init__(self, executor: CudaExecutor, stream: Any) -> None:
        self._executor, self._stream = executor, stream

    def __enter__(self) -> None:
        executor = self._executor
        self._outer, self._before = executor.entered.stream, executor.current_stream()
        executor.cuda.set_stream(self._stream)
        executor.entered.stream = self._stream

    def __exit__(self, *error: object) -> None:
        self._executor.cuda.set_stream(self._before)
        self._executor.entered.stream = self._outer


class CudaExecutor(Executor):
    """CUDA: a communication stream, an update stream, and events. ``cuda`` is torch.cuda, or its stand-in in tests."""

    runs_ahead = True
    # The host's time for a message is assumed, until a run has measured it: 0.12 to 0.27 ms were seen.
    execution = ExecutionModel("stream", host_seconds_per_message=2e-4)

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        self.entered = _Entered()
        self.stream = cuda.Stream(device, priority=-1)
        self.update_stream = cuda.Stream(device)
        self._number = _number(device)
        self._pause: Callable[[float, Any], None] | None = None
        self._share_before: float | None = None  # this process's memory fraction of the device before the first limit
        self._zero = DeviceTimestamp(device, cuda)
        self._zero.wait()
        self._zero_seconds = time.perf_counter()

    def on_comm_stream(self) -> AbstractContextManager[Any]:
        """Enter the communication stream."""
        return self._on(self.stream)

    def on_update_stream(self) -> AbstractContextManager[Any]:
        """Enter the update stream."""
        return self._on(self.update_stream)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        if self.device.index is None or self.device.index == self.cuda.current_device():
            return _OnStream(self, stream)
        entered: AbstractContextManager[Any] = self.cuda.stream(stream)  # puts the device back, too
        return entered

    def current_stream(self) -> Any:
        """Return the caller's stream."""
        entered = self.entered.stream
        return self.cuda.current_stream(self._number) if entered is None else entered

    def record_event(self) -> Any:
        """Record an event on the caller's stream."""
        event = self.cuda.Event()
        event.record(self.current_stream())
        return event

    def wait_event(self, mark: Any) -> None:
        """Make the caller's stream wait for the event; the host does not wait."""
        self.current_stream().wait_event(mark)

    def query(self, mark: Any) -> bool:
        """Return whether the event has happened."""
        return bool(mark.query())

    def wait(self, mark: Any, timeout_s: float) -> bool:
        """Poll the event until it happens or ``timeout_s`` is over."""
        deadline = time.monotonic() + timeout_s
        while not mark.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def sleep(self, seconds: float) -> None:
        """Launch a kernel that spins. The first call compiles it. Raises RunError where that cannot be done."""
        if self._pause is None:
            try:
                self._pause = pause_kernel(self.cuda)
            except (AttributeError, OSError, RuntimeError) as error:
                raise RunError(f"emulated links on a GPU need torch 2.9 and its compiler: {error}") from error
        self._pause(seconds, self.current_stream())

    def record_timestamp(self) -> DeviceTimestamp:
        """Record the time on the caller's stream."""
        return DeviceTimestamp(self.device, self.cuda, self.current_stream())

    def seconds(self, stamp: DeviceTimestamp) -> float:
        """Return the time of a stamp; waits for it. Raises RunError if it does not happen in time."""
        if not self.wait(stamp, _PATIENCE_SECONDS):
            raise RunError(
                f"the GPU did not finish its work within {_PATIENCE_SECONDS:g} s; another rank may have stopped"
            )
        elapsed = self._zero.until(stamp)
        seconds = self._zero_seconds + elapsed
        if elapsed > _FINE_SECONDS:
            self._zero, self._zero_seconds = stamp, seconds
        return seconds

    def limit(self, size: int | None) -> None:
        """Set this process's memory fraction; see :meth:`Executor.limit`."""
        if size is None:
            if self._share_before is not None:
                self.cuda.set_per_process_memory_fraction(self._share_before, self.device)
            self._share_before = None
            return
        if self._share_before is None:
            known = getattr(self.cuda, "get_per_process_memory_fraction", None)  # newer than torch 2.6
            self._share_before = 1.0 if known is None else float(known(self.device))
        self.cuda.empty_cache()  # cached memory of profiling would count
        whole = self.cuda.get_device_properties(self.device).total_memory
        share = min(self._share_before, (size * (1 + _FRAGMENTED) + _SEGMENTS) / whole)
        self.cuda.set_per_process_memory_fraction(share, self.device)

    def retries(self) -> int:
        """Return the number of allocation retries since the process began."""
        return int(self.cuda.memory_stats(self.device).get("num_alloc_retries", 0))


def _number(device: torch.device) -> Any:
    """Return the device's number, which torch.cuda takes several microseconds faster than the device."""
    return device if device.index is None else device.index


def with_index(device: torch.device | str) -> torch.device:
    """Return the device with an index: "cuda" becomes the current device, because parts of torch.cuda need a number."""
    device = torch.device(device)
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def execution_on(device: torch.device) -> ExecutionModel:
    """Return how messages are executed on a device."""
    return Executor.execution if device.type == "cpu" else CudaExecutor.execution


def executor_for(device: torch.device) -> Executor:
    """Return the executor of a device. Raises ValueError for a device that mdcs does not support."""
    if device.type == "cpu":
        return Executor()
    if device.type == "cuda":
        return CudaExecutor(with_index(device))
    raise ValueError(f"device {device} is not supported: cpu or cuda")
