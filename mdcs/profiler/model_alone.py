"""A model that runs alone, without communication: what the recorder of slots listens to for a profile of passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from mdcs.model.guard import Guard
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Meter, Reading


class ModelAlone:
    """A model that runs without communication. Parameters are open in their module's forward, and in backward.

    - ``known``: bytes held all the time that are not activations.
    - ``marks``: whether a weight's version is increased at its gradient, so that autograd finds later uses.
    """

    exported_to: str | None = None
    accumulates = False  # whether all passes are side passes

    def __init__(self, units: Sequence[ModelUnit], guards: Sequence[Guard], meter: Meter, known: int) -> None:
        self._parameters = [p for unit in units for _, p in unit.parameters]
        self._guards, self._meter, self._known, self.marks = guards, meter, known, True

    def begin(self) -> None:
        """Begin another pass, without gradients."""
        self._inside = [0] * len(self._guards)
        self._outside: set[int] = set()  # units whose parameters stay open for the rest of the pass
        self._side = 0  # forwards and backwards of side passes under way
        self._gradients: list[Tensor] = []
        self._ended = False
        for p in self._parameters:
            p.grad = None
        for guard in self._guards:
            guard.close()

    def activations(self, reading: Reading | None) -> int:
        """Return the activation bytes. Where only a total is measured: the total without known bytes and gradients."""
        reading = reading or {}
        untagged, total = reading.get(UNTAGGED), reading.get(TOTAL)
        if untagged is not None or total is None:
            return untagged or 0
        return max(0, total - self._known - sum(g.numel() * g.element_size() for g in self._gradients))

    def forward_begin(self, unit: int) -> None:
        """Open the unit."""
        self._inside[unit] += 1
        self._guards[unit].open()

    def forward_end(self, unit: int) -> None:
        """Close the unit, unless it is used further."""
        self._inside[unit] -= 1
        if not self._inside[unit] and unit not in self._outside:
            self._guards[unit].close()

    def backward_begin(self, unit: int) -> None:
        """Open all units."""
        for guard in self._guards:
            guard.open()

    def used_outside(self, unit: int, is_side: bool) -> None:
        """Open the unit, from now on."""
        self._guards[unit].open()
        if not is_side:
            self._outside.add(unit)

    def recomputed(self, unit: int) -> None:
        """Open the unit, whose parameters are needed before the gradient of its output is ready."""
        self._guards[unit].open()

    def recomputing(self, unit: int) -> Callable[[], AbstractContextManager[None]]:
        """Return a context that does nothing."""
        return nullcontext

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        """Take a gradient away."""
        assert parameter.grad is not None
        with self._meter.tag("gradients"):
            kept = torch.empty_like(parameter.grad)
        kept.copy_(parameter.grad)
        self._gradients.append(kept)
        parameter.grad = None
        if self.marks:
            torch.autograd.graph.increment_version(parameter)

    def backward_end(self) -> None:
        """Leave the units open, and drop the gradients."""
        if self._ended:
            raise UnsupportedModel(
                "step ran more than one backward pass: return the loss of one, without backward, and pass micro_steps= "
                "the number of backward passes before optimizer.step()"
            )
        self._ended = True
        self._gradients.clear()

    def side_begin(self, unit: int, in_backward: bool) -> None:
        """Open what a side pass uses."""
        if not any(self._inside):
            self._side = 1 if in_backward else self._side + 1
        for guard in self._guards if in_backward else (self._guards[unit],):
            guard.open()

    def side_end(self, unit: int) -> None:
        """Close what is not used further: a module has returned in a side pass."""
        self._end_side(self._side - 1)

    def side_backward_end(self) -> None:
        """Close what is not used further: the backward of a side pass is over."""
        self._end_side(0)

    def _end_side(self, left: int) -> None:
        self._side = max(0, left)
        for unit, guard in enumerate(self._guards):
            if not (self._side or self._inside[unit] or unit in self._outside or self._ended):
                guard.close()
