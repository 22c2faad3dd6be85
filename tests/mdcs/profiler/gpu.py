"""A GPU's clock without a GPU: a host that launches, streams that do what they were given, and what each of them takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)


class Event:
    """As torch.cuda's, on the clock of a :class:`Gpu`."""

    def __init__(self, gpu: Gpu, **options: Any) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self, stream: Any = None) -> None:
        self.at = max(self.gpu.done, self.gpu.host)

    def query(self) -> bool:
        return self.gpu.host >= self.at

    def synchronize(self) -> None:
        self.gpu.wait_until(self.at)

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


class Gpu(TorchDispatchMode):
    """One stream. The host takes ``launch`` seconds for a kernel and ``wait`` for looking up from one that it waits for.

    Kernels take what ``kernel`` says, from an operation's name and bytes. ``host`` is what time it is for the host, and ``done``
    when the stream will have done all it was given. Tensors that should be on it are on the meta device.
    """

    def __init__(self, kernel: Callable[[str, int], float], launch: float = 5e-6, wait: float = 10e-6) -> None:
        super().__init__()
        self.kernel, self.launch, self.wait = kernel, launch, wait
        self.host = self.done = 0.0

    def wait_until(self, time: float) -> None:
        self.host = max(self.host, time) + self.wait

    def give(self, seconds: float) -> None:
        """One kernel."""
        self.host += self.launch
        self.done = max(self.done, self.host) + seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in args if isinstance(t, torch.Tensor) and t.is_meta]
        if tensors:
            self.give(self.kernel(func._schema.name, max(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))

    def take_the_place_of_cuda(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for all that profiling asks of torch.cuda, of the host's clock, and of memory on a GPU."""
        zeros = torch.zeros
        for name, value in {
            "Event": lambda **options: Event(self, **options),
            "current_stream": lambda device: None,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device: self.wait_until(self.done),
            "_sleep": lambda cycles: self.give(cycles / 2e9),
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr("time.perf_counter", lambda: self.host)
        patch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options, device="meta"))
