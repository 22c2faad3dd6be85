"""What updating and copying cost: the optimizer's state, scratch and seconds, tried on runs of two lengths."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdcs.calibrate.clock import now
from mdcs.measure.memory import Meter
from mdcs.model.optimizers import optimizer_bytes, same_options
from mdcs.profile.contents import Optimizer
from mdcs.runtime.updates import later_step
from mdcs.sizes import MIB

_CACHES = 64 * MIB
"""More than caches hold, of processors per core and of GPUs."""
_SHORT, _LONG = 1 << 10, 1 << 20  # elements of the runs that are updated; the copied one is long, too
_REPEATS = 5


def optimizer_costs(optimizer: torch.optim.Optimizer, like: Tensor, meter: Meter) -> Optimizer:
    """State, scratch and seconds of an update, on the device of ``like`` and of its type: a line through a short and a long run.

    Where ``meter`` measures nothing, scratch is what is known of the optimizer. Raises UnsupportedModel for an optimizer that
    cannot run on shards.
    """
    state, fixed, scratch = optimizer_bytes(optimizer)
    small, large = (_Update.measure(optimizer, like, n, meter) for n in (_SHORT, _LONG))
    elements = large.elements - small.elements
    scratch_fixed = 0
    if small.scratch is not None and large.scratch is not None:
        scratch = (large.scratch - small.scratch) // (elements * like.element_size())
        scratch_fixed = small.scratch - scratch * small.elements * like.element_size()
    return Optimizer(
        type(optimizer).__name__.lower(), state, fixed, scratch,
        seconds_per_element=max(0.0, large.seconds - small.seconds) / elements,
        seconds_per_run=small.seconds, scratch_fixed=scratch_fixed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Update:
    """What an update of a run costs: seconds, and the most bytes it allocates beside the state (None: not measured)."""

    elements: int
    seconds: float
    scratch: int | None

    @classmethod
    def measure(cls, optimizer: torch.optim.Optimizer, like: Tensor, elements: int, meter: Meter) -> _Update:
        p = torch.zeros(elements, dtype=like.dtype, device=like.device)
        p.grad = torch.ones_like(p)
        samples, scratch = [], []
        forget = _cache_flusher(like)
        for group in optimizer.param_groups:
            trial = same_options(optimizer, group, p)
            trial.step()
            again = later_step(trial)
            for _ in range(_REPEATS):
                forget()
                meter.window()
                before, begin = meter.live(), now(like.device)
                again()
                samples.append(now(like.device) - begin)
                trial.step()  # which the runtime takes once, and which may need more
                highest = meter.window()
                if before is not None and highest is not None:
                    scratch.append((highest["total"] or 0) - (before["total"] or 0))
            del trial, again
        return cls(elements, statistics.median(samples), max(scratch, default=None))


def copy_seconds_per_byte(like: Tensor) -> float:
    """Median seconds of a copy from cold caches, by bytes copied, on the device of ``like`` and of its type."""
    a = torch.zeros(_LONG, dtype=like.dtype, device=like.device)
    b = torch.zeros_like(a)
    samples = []
    forget = _cache_flusher(like)
    for _ in range(_REPEATS):
        forget()
        begin = now(like.device)
        b.copy_(a)
        samples.append(now(like.device) - begin)
    return statistics.median(samples) / (a.numel() * a.element_size())


def _cache_flusher(like: Tensor) -> Callable[[], object]:
    """What makes caches forget: in a step others pass through them between the parts of a message."""
    other = torch.zeros(_CACHES, dtype=torch.uint8, device=like.device)
    return lambda: other.add_(1)
