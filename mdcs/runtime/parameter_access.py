"""Decides what happens when a closed parameter is used."""

from __future__ import annotations

import weakref

import torch

from mdcs.model.guard import GRADIENT, THAW, changes, only_reads
from mdcs.model.hooks import Hooks
from mdcs.runtime.errors import ErrorContext, RunError
from mdcs.runtime.slot_sequencer import SlotSequencer
from mdcs.runtime.validation import THAWED

_CONVERSIONS = {"to", "cpu", "cuda", "type", "half", "bfloat16", "float", "double"}


class ParameterAccess:
    """Decides whether a closed parameter may be used (:data:`mdcs.model.guard.Refuse`).

    ``ended``: the reason for parameters that are not whole after the end of the run; None before.
    """

    def __init__(self, place: ErrorContext) -> None:
        self._place = place
        # Weak: closed parameters must not keep the run alive.
        self._sequencer: weakref.ref[SlotSequencer] | None = None
        self._hooks: weakref.ref[Hooks] | None = None
        self.ended: str | None = None

    def follow(self, sequencer: SlotSequencer, hooks: Hooks) -> None:
        """Decide by the slot in which ``sequencer`` is; before, modules are being initialised."""
        self._sequencer, self._hooks = weakref.ref(sequencer), weakref.ref(hooks)

    def refuse(self, unit: int, name: str, what: str) -> RunError | None:
        """Return the error for a use of the unit's parameter ``name``; None allows the use, and the unit is whole."""
        sequencer = None if self._sequencer is None else self._sequencer()
        if self.ended is None and sequencer is None and self._sequencer is not None:
            self.ended = "it is gone"
        if self.ended is not None:
            return RunError(
                f"rank {self._place.rank}: {name} is in pieces, parallel is closed and could not gather it "
                f"({self.ended}): load a state dict into a plain model"
            )
        if sequencer is None:
            return self._place.error(
                f"the initialisation of a module used {name} ({what}), which is of another unit: let each initialise "
                "its own"
            )
        if what == GRADIENT:
            if not sequencer.has_gradients:
                return None
            return self._place.error(
                f"{name}.grad does not hold the gradient between backward and step(). {WITH_GRADIENTS}"
            )
        if what == THAW:  # parameters may be frozen for some passes
            is_trained = any(name in storage.names for storage in sequencer.storages if storage.trainable)
            return None if is_trained else self._place.error(THAWED.format(name))
        hooks = None if self._hooks is None else self._hooks()
        if hooks is not None and only_reads(what) and _may_be_used(unit, sequencer):
            hooks.used_outside(unit)
            return None
        return self._place.error(
            f"{name} cannot be used here ({what}): it is sharded (in pieces) or being updated between its layer's "
            f"passes. {_remedy(what)}"
        )


WITH_GRADIENTS = (
    "Clip with parallelize(…, clip_norm=1.0) or clip_value=, each parameter by its own norm in step() of a subclass "
    "of the optimizer; read the norm in parallel.grad_norm, scale with parallel.scaler, and call zero_grad() after "
    "step(). Leave a step out before backward, or start with clip_norm=float('inf'), which clips nothing and lets "
    "zero_grad() drop a step until step(); leave a parameter out by p.detach() in forward"
)
"""Advice for loops that use ``p.grad`` between backward and ``step()``."""


def _remedy(what: str) -> str:
    """Return what to write instead of a use outside of the layer's passes."""
    change = "To change it, write on every rank: with parallel.full_parameters(writeback=True): …"
    if changes(what):
        return f"{change}, or parallel.load_state_dict(state)" if what == "copy_" else change
    read = "To read it, write on every rank: with parallel.full_parameters(): …, or parallel.state_dict()"
    if what == ".data":  # p.data.mul_(2) as well
        return f"{read}. {change}"
    return f"To move or convert the model, close() first. {read}" if what in _CONVERSIONS else read


def _may_be_used(unit: int, sequencer: SlotSequencer) -> bool:
    """Return whether a closed parameter can be used now: inside of a step, or where a pass begins with it."""
    if sequencer.exported_to is not None or sequencer.entered is not None:
        return sequencer.exported_to is None
    slot = sequencer.period.slots[sequencer.next_slot]
    begins = (slot.unit, slot.phase) == (unit, "F") and sequencer.storages[unit].is_aliased
    return torch.is_grad_enabled() and (begins or sequencer.accumulates)
