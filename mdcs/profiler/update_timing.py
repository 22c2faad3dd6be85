"""Costs of updates and copies: the optimizer's state, scratch and seconds, measured on runs of two lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdcs.model.elementwise import same_options, state_layout
from mdcs.profile.schema import Optimizer
from mdcs.profiler.timing import seconds_per_call
from mdcs.runtime.sharded_optimizer import later_step
from mdcs.sizes import MIB
from mdcs.telemetry.memory_meter import Meter

_CACHES = 64 * MIB
"""Bytes: more than the caches of a CPU, or of a GPU, hold."""
_SHORT, _LONG = 1 << 10, 1 << 20  # elements of the runs that are updated; the copied one is long, too
_LONG_ON_CUDA = 1 << 23  # with its state more than caches hold
_COPIED_ON_CUDA = 2 * _CACHES  # bytes
_REPEATS, _IN_A_ROW = 5, 20


def optimizer_costs(optimizer: torch.optim.Optimizer, like: Tensor, meter: Meter) -> Optimizer:
    """Return state, scratch and seconds of an update on the device and type of ``like``: a line through two run
    lengths.

    Where ``meter`` measures nothing, scratch is estimated. Raises UnsupportedModel for an
    optimizer that cannot run on shards.
    """
    layout = state_layout(optimizer)
    scratch = layout.scratch
    lengths = _SHORT, _LONG_ON_CUDA if like.device.type == "cuda" else _LONG
    small, large = (_Update.measure(optimizer, like, n, meter) for n in lengths)
    elements = large.elements - small.elements
    scratch_fixed = 0
    if small.scratch is not None and large.scratch is not None:
        scratch = (large.scratch - small.scratch) // (elements * like.element_size())
        scratch_fixed = small.scratch - scratch * small.elements * like.element_size()
    return Optimizer(
        type(optimizer).__name__.lower(), layout.tensors(like.element_size()), layout.fixed, scratch,
        seconds_per_element=max(0.0, large.seconds - small.seconds) / elements,
        seconds_per_run=small.seconds, scratch_fixed=scratch_fixed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Update:
    """Cost of the update of a run: seconds, and the most bytes allocated besides the state (None: not measured)."""

    elements: int
    seconds: float
    scratch: int | None

    @classmethod
    def measure(cls, optimizer: torch.optim.Optimizer, like: Tensor, elements: int, meter: Meter) -> _Update:
        p = torch.zeros(elements, dtype=like.dtype, device=like.device)
        p.grad = torch.ones_like(p)
        samples, scratch = [], []
        timed = _timer(like)
        for group in optimizer.param_groups:
            trial = same_options(optimizer, group, p)
            again = later_step(trial)
            again()
            for _ in range(_REPEATS):
                samples.append(timed(again))
                meter.window()
                before = meter.live()
                again()
                highest = meter.window()
                if before is not None and highest is not None:
                    scratch.append((highest["total"] or 0) - (before["total"] or 0))
            del trial, again
        return cls(elements, statistics.median(samples), max(scratch, default=None))


def copy_seconds_per_byte(like: Tensor) -> float:
    """Return the median seconds of a copy per byte copied, on the device and type of ``like``; on CPU with cold caches.
    """
    elements = _COPIED_ON_CUDA // like.element_size() if like.device.type == "cuda" else _LONG
    a = torch.zeros(elements, dtype=like.dtype, device=like.device)
    b = torch.zeros_like(a)
    timed = _timer(like)
    samples = [timed(lambda: b.copy_(a)) for _ in range(_REPEATS)]
    return statistics.median(samples) / (a.numel() * a.element_size())


def _timer(like: Tensor) -> Callable[[Callable[[], object]], float]:
    """Return a function that times a call on the device of ``like``, in seconds.

    On a CPU the caches are flushed first, because in a step other data passes through them between the parts of a
    message. On a GPU several calls are timed in a row: one alone would include its launch and the wait for its end.
    """
    device = like.device
    if device.type == "cuda":
        return lambda work: seconds_per_call(device, work, _IN_A_ROW)
    other = torch.zeros(_CACHES, dtype=torch.uint8, device=device)

    def timed(work: Callable[[], object]) -> float:
        other.add_(1)
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return timed
