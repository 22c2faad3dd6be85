"""Costs of updates and copies: the optimizer's state, scratch and seconds.

Elementwise ones are measured on runs of two lengths, others on a copy of each parameter.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdcs.model.flat_optimizer import same_options
from mdcs.model.optimizers import UpdatePart
from mdcs.profile.layout import WholeParameter
from mdcs.profile.schema import Optimizer
from mdcs.profiler.timing import seconds_per_call
from mdcs.runtime.sharded_optimizer import later_step
from mdcs.sizes import MIB, aligned
from mdcs.telemetry.memory_meter import Meter

_CACHES = 64 * MIB
"""Bytes: more than the caches of a CPU, or of a GPU, hold."""
_SHORT, _LONG = 1 << 10, 1 << 20  # elements of the runs that are updated; the copied one is long, too
_LONG_ON_CUDA = 1 << 23  # with its state more than caches hold
_COPIED_ON_CUDA = 2 * _CACHES  # bytes
_REPEATS, _IN_A_ROW = 5, 20


_SCRATCH_OF_WHOLE = 3  # copies of a parameter, where nothing is measured


def optimizer_costs(part: UpdatePart, like: Tensor, meter: Meter) -> Optimizer:
    """Return state, scratch and seconds of an update on the device and type of ``like``: a line through two run
    lengths.

    Where ``meter`` measures nothing, scratch is estimated. Of whole parameters (:func:`whole_costs`) only the name
    counts.
    """
    layout, name = part.layout, type(part.optimizer).__name__.lower()
    if layout.whole:
        return Optimizer(name, layout.tensors(like.element_size()))
    scratch = layout.scratch
    lengths = _SHORT, _LONG_ON_CUDA if like.device.type == "cuda" else _LONG
    small, large = (_Update.measure(part, like, n, meter) for n in lengths)
    elements = large.elements - small.elements
    scratch_fixed = 0
    if small.scratch is not None and large.scratch is not None:
        scratch = (large.scratch - small.scratch) // (elements * like.element_size())
        scratch_fixed = small.scratch - scratch * small.elements * like.element_size()
    return Optimizer(
        name, layout.tensors(like.element_size()), layout.fixed, scratch,
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
    def measure(cls, part: UpdatePart, like: Tensor, elements: int, meter: Meter) -> _Update:
        p = torch.zeros(elements, dtype=like.dtype, device=like.device)
        p.grad = torch.ones_like(p)
        samples: list[float] = []
        scratch: list[int] = []
        for group in part.groups.values():
            _, again = later_step(same_options(part.optimizer, group, p), part.layout)
            _measure(again, like, meter, samples, scratch)
            del again
        return cls(elements, statistics.median(samples), max(scratch, default=None))


def _measure(again: Callable[[], object], like: Tensor, meter: Meter, seconds: list[float], scratch: list[int]) -> None:
    """Append seconds and temporary bytes of several updates."""
    timed = _timer(like)
    again()
    for _ in range(_REPEATS):
        seconds.append(timed(again))
        meter.window()
        before = meter.live()
        again()
        highest = meter.window()
        if before is not None and highest is not None:
            scratch.append((highest["total"] or 0) - (before["total"] or 0))


class WholeCosts:
    """Costs of the updates of whole parameters. Parameters of one shape and one group are measured once."""

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter, self._device = meter, device
        self._known: dict[tuple[torch.Size, torch.dtype, int], WholeParameter] = {}

    def of(self, p: Tensor, part: UpdatePart, group: int, dtype: torch.dtype) -> WholeParameter:
        """Return the costs of a parameter in a parameter group of ``part``, which is updated in ``dtype``. Of the
        parameter only the shape counts.
        """
        key = p.shape, dtype, group
        if key not in self._known:
            device = self._device
            like = torch.linspace(-1, 1, p.numel(), dtype=dtype, device=device).view(p.shape)
            like.grad = like.flip(0) if like.dim() else like.clone()
            run, again = later_step(same_options(part.optimizer, part.groups[group], like), part.layout)
            seconds: list[float] = []
            scratch: list[int] = []
            _measure(again, like, self._meter, seconds, scratch)
            state = sum(value.nbytes for value in run.state.values() if isinstance(value, Tensor))
            most = max(scratch, default=_SCRATCH_OF_WHOLE * like.nbytes)
            self._known[key] = WholeParameter(aligned(p.numel()), state, most, statistics.median(seconds))
        return self._known[key]


def copy_seconds_per_byte(like: Tensor) -> float:
    """Return the median seconds of a copy per byte copied, on the device and type of ``like``; on CPU with cold caches.
    """
    elements = _COPIED_ON_CUDA // like.element_size() if like.device.type == "cuda" else _LONG
    a = torch.zeros(elements, dtype=like.dtype, device=like.device)
    b = torch.zeros_like(a)
    timed = _timer(like)
    samples = [timed(lambda: b.copy_(a)) for _ in range(_REPEATS)]
    return statistics.median(samples) / (a.numel() * a.element_size())


_passing = weakref.WeakValueDictionary[torch.device, Tensor]()


def passing_data(device: torch.device) -> Tensor:
    """Return data that takes the place of all other in a CPU's caches; the same as long as somebody holds it.

    Its allocation takes most of the time of all measurements here.
    """
    found = _passing.get(device)
    if found is None:
        _passing[device] = found = torch.zeros(_CACHES, dtype=torch.uint8, device=device)
    return found


def _timer(like: Tensor) -> Callable[[Callable[[], object]], float]:
    """Return a function that times a call on the device of ``like``, in seconds.

    On a CPU the caches are flushed first, because in a step other data passes through them between the parts of a
    message. On a GPU several calls are timed in a row: one alone would include its launch and the wait for its end.
    """
    device = like.device
    if device.type == "cuda":
        return lambda work: seconds_per_call(device, work, _IN_A_ROW)
    other = passing_data(device)

    def timed(work: Callable[[], object]) -> float:
        other.add_(1)
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return timed
