"""The slots of a plan as compute goes through them: the place, gradients so far, activations beyond the profiled ones.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mdcs.model.guard import tensors_in
from mdcs.model.hooks import ReentrantPasses
from mdcs.plan.ledger import SlotBytes
from mdcs.plan.period import parameters_in_block
from mdcs.plan.plan import Plan
from mdcs.profile.schema import INPUTS
from mdcs.runtime.errors import ErrorContext, OverBudget
from mdcs.runtime.storage import UnitStorage
from mdcs.sizes import MIB
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Meter
from mdcs.torch_compat import ModuleHook

LATE = (
    "received a gradient after its reduction was sent, from a reentrant checkpoint that was not in the measured step: "
    "write checkpoint(…, use_reentrant=False)"
)


class SlotPosition:
    """Position of the training thread.

    - ``periods``: periods begun; the first is the prologue.
    - ``step_pending``: the last micro-step's backward has begun, and step() has not ended the iteration.
    - ``next_slot``: the slot to enter next. ``arrived``: whether compute is at the boundary before it. ``entered``:
      stamp of the slot under way; None between passes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.period, self.micro_steps = plan, plan.period, plan.micro_steps
        units, length = range(len(plan.profile.units)), plan.period.length
        self._last_use = [[plan.period.last_use(u, m) % length for u in units] for m in range(plan.micro_steps)]
        self.periods = 0
        self.step_pending = self.arrived = False
        self.next_slot = self.period.turn
        self.entered: Any = None

    @property
    def at_turn(self) -> bool:
        """Return whether compute is between a backward and the next forward pass."""
        return self.next_slot == self.period.turn and self.entered is None

    def ahead(self, unit: int, phase: str) -> int | None:
        """Return the next slot of a unit in this pass; None if there is none."""
        slots, length = self.period.slots, self.period.length
        left = (self.end_of_pass - self.next_slot) % length or (0 if self.entered is not None else length)
        for q in (q % length for q in range(self.next_slot, self.next_slot + left)):
            if phase == "F" and slots[q].phase == "B":
                break
            if (slots[q].unit, slots[q].phase) == (unit, phase):
                return q
        return None

    @property
    def end_of_pass(self) -> int:
        """The slot behind the last one of the micro-step that compute is in, or comes to."""
        return self.period.end(self.period.slots[self.next_slot - (self.entered is not None)].micro)

    def has_left(self, unit: int) -> bool:
        """Return whether compute has left the unit's last backward slot of this pass."""
        slot = self.period.slots[self.next_slot - 1]
        return slot.phase == "B" and self._last_use[slot.micro][unit] < self.next_slot - 1

    @property
    def progress(self) -> int:
        """Number of arrivals at slots and entries of slots in the current iteration."""
        q, turn, length = self.next_slot, self.period.turn, self.period.length
        return 2 * (length if self.step_pending and q == turn else (q - turn) % length) + self.arrived

    @property
    def has_gradients(self) -> bool:
        """Return whether a backward pass of the current iteration has begun."""
        behind_turn = (self.next_slot - self.period.turn) % self.period.length
        return self.step_pending or behind_turn > self.plan.profile.forward_slots

    @property
    def after_micro_step(self) -> bool:
        """Return whether a micro-step of the iteration has ended, and the next has not begun."""
        starts = {self.period.forward_start(micro) for micro in range(1, self.period.micro_steps)}
        return self.entered is None and self.next_slot in starts


class SlotTables:
    """Tables by slot.

    - ``opens``: units whose parameters become usable at its begin. ``closes``: units that stop at its end.
    - ``last``: trainable units whose gradients of a micro-step end with it.
    - ``early``: for each message that may leave before it: unit -> parameters whose gradients the message carries.
    """

    def __init__(self, plan: Plan, storages: list[UnitStorage]) -> None:
        period, length = plan.period, plan.period.length
        self.opens: list[list[UnitStorage]] = [[] for _ in range(length)]
        self.closes: list[list[UnitStorage]] = [[] for _ in range(length)]
        self.last: list[list[int]] = [[] for _ in range(length)]
        for u, storage in enumerate(storages):
            for micro in range(period.micro_steps):
                first, last = period.forward(u, micro)
                backward, end = period.backward(u, micro), period.last_use(u, micro) % length
                self.opens[first % length].append(storage)
                if storage.strategy.regathers and backward is not None:
                    self.closes[last % length].append(storage)
                    self.opens[backward[0] % length].append(storage)
                # trainable: the runtime holds its gradients from here on
                if storage.strategy.sharded or storage.trainable:
                    self.closes[end].append(storage)
                if storage.trainable:
                    self.last[end].append(u)
        self.early: dict[int, list[dict[int, range]]] = {}
        for message in (m for m, part in zip(plan.messages, plan.schedule.ready, strict=True) if part < 1):
            carried: dict[int, range] = {}
            for u, b in message.parts:
                indices = parameters_in_block(plan.profile, u, plan.blocks[u], b)
                known = carried.setdefault(u, indices)
                carried[u] = range(min(known.start, indices.start), max(known.stop, indices.stop))
            self.early.setdefault(message.slot, []).append(carried)


class PassGradients:
    """Gradients of a pass, until all have come. ``scale``: averages over ranks, in the last micro-step."""

    def __init__(self, plan: Plan, storages: Sequence[UnitStorage], reentrant: ReentrantPasses) -> None:
        self._reentrant, self._storages, self.scale = reentrant, storages, 1.0 / plan.world

    def complete(self, units: Sequence[int], is_last: bool, ended: bool) -> bool:
        """Complete the gradients of units in this micro-step, the ``is_last`` or not. Return False, with nothing
        changed, if autograd will bring more, which it will not if the pass has ``ended``.
        """
        storages, has_inner = [self._storages[u] for u in units], self._reentrant.has_inner
        if not ended and any(
            self._brings(s, range(len(s.parameters)) if has_inner else s.without_gradient)
            for s in storages if has_inner or s.without_gradient
        ):  # fmt: skip
            return False
        for storage in storages:
            storage.complete_gradients(self.scale if is_last else None)
        return True

    def has_all(self, unit: int, indices: range) -> bool:
        """Return whether these gradients of a unit are complete."""
        storage = self._storages[unit]
        return storage.come.issuperset(indices) and not (self._reentrant.has_inner and self._brings(storage, indices))

    def _brings(self, storage: UnitStorage, indices: Collection[int]) -> bool:
        return self._reentrant.brings(storage.unit, [storage.parameters[i] for i in indices])

    def end_pass(self) -> None:
        """Begin the next micro-step."""
        for storage in self._storages:
            storage.come.clear()

    def restart(self) -> None:
        """Begin the next iteration, or forget this one."""
        self.end_pass()
        for storage in self._storages:
            storage.had.clear()
        self._reentrant.end_step()


# ---- activations beyond the profiled ones: of a larger batch, or kept by the loop and not by the profiled step

_FADING = 8  # a slot's excess decays by 1/8 per period, so that one large batch does not count for ever
_FIRST = 3  # first steps whose peak is read, where slots are not read
_LEAST = 256  # excess below budget / _LEAST is ignored, unless the slot was above the budget

Sizes = tuple[int, ...]
"""Shape of a tensor."""


class BatchSizes:
    """Listens to modules; :attr:`sizes` is the shape of the step's input, None before the first call.

    The input is the first tensor among the arguments of the first module that runs; of several calls the largest
    counts. Of a nested tensor only the number of elements is known. Passes without gradients are not heard.
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

    Registered buffers are booked to the byte; activations are the profile's. Where the allocator is read slot by slot,
    its excess counts in admission: messages in flight end before compute takes these bytes. If nothing is in flight the
    slot runs all the same. Such a step is counted, and the first one is warned about, or ``raises``.
    """

    def __init__(
        self, plan: Plan, slots: list[SlotBytes], place: ErrorContext, batch: BatchSizes, *, raises: bool = False
    ) -> None:
        self._raises, self._rank, self._first = raises, place.rank, place.step
        self.budget, self._reserve, self._slots, self._batch = plan.budget, plan.reserve, slots, batch
        self._in_words = plan.period.in_words
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
        """Record the peak of a step whose slots are not read, at its end: of the first ones and of larger batches."""
        if self.budget is None or not (step < self._first + _FIRST or self.is_larger):
            return
        peak = (meter.window() or {}).get(TOTAL)
        # the first window began before training
        if peak is not None and peak > self.budget and step > self._first and not self.skips:
            self._above.append((peak - self.budget, -1, -1))
        self.skips = False

    @property
    def is_larger(self) -> bool:
        """Return whether the batch of this step is known to be larger than the profiled one."""
        sizes, profiled = self._batch.sizes, self._profiled
        return sizes is not None and profiled is not None and math.prod(sizes) > math.prod(profiled)

    def end_step(self, step: int) -> tuple[int, int]:
        """Return (slots of the step above the budget, most bytes above it). Warns once, or raises OverBudget."""
        above, self._above = self._above, []
        if above and (self._raises or not self._has_warned):
            text = self._said(step, *max(above))
            if self._raises:
                raise OverBudget(text)
            self._has_warned = True
            warnings.warn(f"{text}. Shown once; parallel.records() lists every step", stacklevel=3)
        self._batch.restart()
        return len(above), max((size for size, *_ in above), default=0)

    def _said(self, step: int, above: int, slot: int, activations: int) -> str:
        assert self.budget is not None
        text = f"rank {self._rank}, step {step}: {above / MIB:.2f} MiB above the budget of {self.budget / MIB:.2f} MiB"
        if slot >= 0:
            text += f" in {self._in_words(slot)}"
        if activations >= 0:
            measured = self._slots[slot].peak
            text += f", where activations take {activations / MIB:.2f} MiB; measured: {measured / MIB:.2f} MiB"
        if self.is_larger and self._batch.sizes is not None and self._profiled is not None:
            sizes, profiled = in_words(self._batch.sizes), in_words(self._profiled)
            text += f". The batch is {sizes}, the measured one was {profiled}: measure the largest batch"
        elif self._left_out:
            text += f". The measured step left out {', '.join(self._left_out)}: measure one that runs all layers"
        else:
            text += (
                ". The loop keeps what the measured step does not, such as a state dict, or outputs of a step or of an "
                "evaluation that a variable holds until the next step: delete it before backward()"
            )
        return f"{text}, or plan with a reserve of {above / MIB + 0.005:.2f} MiB more"

    def _beyond(self, measured: int, profiled: int) -> int:
        return max(0, measured - profiled - self._reserve)

    def _counted(self, slot: int, size: int) -> int:
        return 0 if self.budget is None or size <= self.budget // _LEAST and slot not in self._over else size
