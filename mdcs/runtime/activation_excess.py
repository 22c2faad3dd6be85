"""Activations beyond the profiled ones: of a larger batch, or kept by the loop and not by the profiled step.

Registered buffers are booked to the byte; activations are the profile's. Where the allocator is read slot by slot, its
excess counts in admission: messages in flight end before compute takes these bytes. If nothing is in flight the slot
runs all the same, because its own bytes cannot be delayed. Such a step is counted, and the first one is warned about,
or raises.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mdcs.model.aliases import tensors_in
from mdcs.plan.ledger import SlotBytes
from mdcs.plan.plan import Plan
from mdcs.profile.schema import INPUTS
from mdcs.runtime.errors import OverBudget
from mdcs.sizes import MIB
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Meter
from mdcs.torch_compat import ModuleHook

_FADING = 8  # a slot's excess decays by 1/8 per period, so that one large batch does not count for ever
_FIRST = 3  # first steps whose peak is read, where slots are not read
_LEAST = 256  # excess below budget / _LEAST is ignored, unless the slot was above the budget

Sizes = tuple[int, ...]
"""Shape of a tensor."""


class BatchSizes:
    """Listens to modules; :attr:`sizes` is the shape of the step's input, None before the first call.

    The input is the first tensor among the arguments of the first module that runs; of several calls of this module,
    the largest input counts. Of a nested tensor only the number of elements is known. Passes without gradients, such as
    evaluations, are not heard.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.restart()
        self.handles = [m.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True) for m in modules]

    def restart(self) -> None:
        """Forget the sizes: a new step begins."""
        self.sizes: Sizes | None = None
        self._first: nn.Module | None = None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._first is None:
            self._first = module
        if module is self._first:
            tensor = next(iter(tensors_in([*args, *kwargs.values()])), None)
            if tensor is not None and (self.sizes is None or tensor.numel() > math.prod(self.sizes)):
                self.sizes = (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)


def in_words(sizes: Sizes) -> str:
    """Return the sizes as text: ``8 x 32``."""
    return " x ".join(map(str, sizes))


def from_words(words: str) -> Sizes | None:
    """Return the sizes of a text of :func:`in_words`; None for other texts."""
    parts = words.split(" x ")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None


class ActivationExcess:
    """Excess seen so far, slot by slot, and the bytes that admission adds. All 0 where the plan has no budget.

    ``first``: number of the plan's first step. ``raises``: a step above the budget is an error.
    """

    def __init__(
        self, plan: Plan, slots: list[SlotBytes], rank: int, batch: BatchSizes, *, first: int = 1, raises: bool = False
    ) -> None:
        self._raises, self._first = raises, first
        self.budget, self._reserve, self._slots, self._rank, self._batch = plan.budget, plan.reserve, slots, rank, batch
        self._names = [plan.period.in_words(q) for q in range(plan.period.length)]
        self._profiled = from_words(plan.profile.about.get(INPUTS, ""))
        slot_of = plan.profile.slots
        self._left_out = [unit.name for unit in plan.profile.units if not slot_of[unit.forward[0]].seconds]
        self._seen = [0] * len(slots)
        self._over: set[int] = set()  # slots that have been above the budget
        self._live = 0
        # this step's (bytes above budget, slot, its activations); -1: unknown
        self._above: list[tuple[int, int, int]] = []
        self._has_warned = False
        self.skips = False  # skip the next reading: it includes an evaluation or a state dict

    def arrived(self, slot: int, live: Mapping[str, int | None] | None) -> int:
        """Return the bytes to add to the profile's as compute arrives at a slot. ``live``: the allocator's reading."""
        activations = (live or {}).get(UNTAGGED)
        self._live = 0 if activations is None else self._beyond(activations, self._slots[slot].live)
        return self._counted(slot, self._live)

    def entered(self, slot: int) -> int:
        """Return the bytes to add to the profile's peak of a slot."""
        return self._counted(slot, max(self._live, self._seen[slot]))

    def ended(self, slot: int, peaks: Mapping[str, int]) -> None:
        """Record the measured peaks of a slot."""
        if self.budget is None or self.skips or not peaks:
            self.skips = False
            return
        activations, above = peaks.get(UNTAGGED), peaks[TOTAL] - self.budget
        if activations is not None:
            faded = self._seen[slot] - self._seen[slot] // _FADING
            self._seen[slot] = max(self._beyond(activations, self._slots[slot].peak), faded)
        if above > 0:
            self._over.add(slot)
            self._above.append((above, slot, -1 if activations is None else activations))

    def read(self, step: int, meter: Meter) -> None:
        """Record the peak of a step whose slots are not read: one of the first steps, or one with a larger batch.

        Call at the end of the step.
        """
        if self.budget is None or not (step < self._first + _FIRST or self.is_larger):
            return
        peak = (meter.window() or {}).get(TOTAL)
        # the first window began before training
        if peak is not None and peak > self.budget and step > self._first and not self.skips:
            self._above.append((peak - self.budget, -1, -1))
        self.skips = False

    @property
    def is_larger(self) -> bool:
        """Whether the batch of this step is known to be larger than the profiled one."""
        sizes, profiled = self._batch.sizes, self._profiled
        return sizes is not None and profiled is not None and math.prod(sizes) > math.prod(profiled)

    def end_step(self, step: int) -> tuple[int, int]:
        """Return (slots of the step above the budget, most bytes above it). Warns once, or raises OverBudget."""
        above = self._above
        self._above = []
        if above and self._raises:
            raise OverBudget(self._said(step, *max(above)))
        if above and not self._has_warned:
            self._has_warned = True
            text = self._said(step, *max(above))
            warnings.warn(f"{text}. Shown once; parallel.records() lists every step", stacklevel=3)
        self._batch.restart()
        return len(above), max((size for size, *_ in above), default=0)

    def _said(self, step: int, above: int, slot: int, activations: int) -> str:
        assert self.budget is not None
        sizes = None if self._batch.sizes is None else in_words(self._batch.sizes)
        text = f"rank {self._rank}, step {step}: {above / MIB:.2f} MiB above the budget of {self.budget / MIB:.2f} MiB"
        if slot >= 0:
            text += f" in {self._names[slot]}"
        if activations >= 0:
            measured = self._slots[slot].peak
            text += f", where activations take {activations / MIB:.2f} MiB; measured: {measured / MIB:.2f} MiB"
        if self.is_larger and self._profiled is not None:
            text += (
                f". The batch is {sizes}, the measured one was {in_words(self._profiled)}: measure the largest batch"
            )
        elif self._left_out:
            text += f". The measured step left out {', '.join(self._left_out)}: measure one that runs all layers"
        else:
            text += (
                ". The loop keeps what the measured step does not, such as a state dict, or outputs of a step or of an "
                "evaluation that a variable holds until the next step: delete it before backward()"
            )
        more = f"or plan with a reserve of {above / MIB + 0.005:.2f} MiB more"
        return f"{text}, {more}"

    def _beyond(self, measured: int, profiled: int) -> int:
        return max(0, measured - profiled - self._reserve)

    def _counted(self, slot: int, size: int) -> int:
        return 0 if self.budget is None or size <= self.budget // _LEAST and slot not in self._over else size
