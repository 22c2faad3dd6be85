"""The modules of a stand-in: real parameters and gradients, and compute that waits.

*The clock.* A slot's time counts from its beginning, so waits of compute are never hidden in it. A late core does not
delay the device that the stand-in represents: when a wait oversleeps, the next wait is shorter by that time, unless
compute has waited for something else in between. No core is kept busy for exact times.

*The sum.* The model is a weighted sum of its inputs, with one input per use. The weight of an input is a sum over a few
elements of each parameter of the unit. All elements of a parameter get the gradient of those few. So gradients cost one
pass over memory and depend on the batch and on every unit. A stale weight or a lost gradient changes the next loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.tasks.stand_in import Shape, Use, count

_AT_ONCE = 1e-3
"""Seconds. If compute starts later than this after a wait, it has waited for something else."""
_SAMPLED = 256
"""About how many elements of a parameter the loss depends on, evenly spaced."""


class Clock:
    """Waits of a device that is always on time."""

    def __init__(self) -> None:
        self._ended = self._overslept = 0.0

    def wait(self, seconds: float) -> None:
        """Sleep `seconds` from now on, less the time that the last wait overslept if that wait has just ended."""
        begin = time.perf_counter()
        if begin - self._ended < _AT_ONCE:
            begin -= self._overslept
        due = begin + seconds
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        self._ended = time.perf_counter()
        self._overslept = self._ended - due


class Block(nn.Module):
    """A unit: its parameters, and a forward for each of its uses."""

    def __init__(self, numel: int, tensors: int, clock: Clock, *, trainable: bool, checkpointing: bool = False) -> None:
        super().__init__()
        self._checkpointing = checkpointing
        sizes = [numel // tensors + (i < numel % tensors) for i in range(tensors)]
        self._names = [f"weight{i}" for i, size in enumerate(sizes) if size]
        for name, size in zip(self._names, sizes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(size), trainable))
        self._clock = clock

    def forward(self, total: Tensor, inputs: Tensor, use: Use, rest: Sequence[Block], first: int) -> Tensor:
        """The total plus the terms of this use, with input `first`, and of its inner uses. `rest` has all blocks."""
        arguments = total, inputs, use, rest, first
        if not self._checkpointing:
            return self._terms(*arguments)
        out: Tensor = checkpoint(self._terms, *arguments, use_reentrant=False, preserve_rng_state=False)
        return out

    def _terms(self, total: Tensor, inputs: Tensor, use: Use, rest: Sequence[Block], first: int) -> Tensor:
        kept = _bytes(use.kept, total)
        workspace = _bytes(use.forward_workspace, total)
        self._clock.wait(use.forward_s)
        del workspace
        total = run(use.inner, rest, total, inputs, first + 1)
        own = inputs[:, first]
        share = use.backward_s / len(self._names)
        for name in self._names:
            held = kept if name == self._names[0] else None  # its backward runs last
            total = _Term.apply(total, own, getattr(self, name), self._clock, share, held, use.backward_workspace)
        return total


def run(uses: Sequence[Use], blocks: Sequence[Block], total: Tensor, inputs: Tensor, first: int) -> Tensor:
    """Return the total plus the terms of these uses. The first use has the input `first`."""
    for use in uses:
        total = blocks[use.unit](total, inputs, use, blocks, first)
        first += 1 + count(use.inner)
    return total


class Waiting(nn.Module):
    """The stand-in of a shape: [batch, uses] → [batch]."""

    def __init__(self, shape: Shape, tensors: int, checkpointing: bool = False) -> None:
        super().__init__()
        clock = Clock()
        self.blocks = nn.ModuleList(
            Block(unit.numel, tensors, clock, trainable=unit.trainable, checkpointing=checkpointing) for unit in shape.units
        )
        self._uses = shape.uses

    def forward(self, inputs: Tensor) -> Tensor:
        """Run all uses, one after another."""
        blocks: Any = self.blocks
        return run(self._uses, blocks, inputs.new_zeros(len(inputs)), inputs, 0)


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared difference between the sums and their labels."""
    total: Tensor = model(batch["inputs"])
    return (total - batch["labels"]).square().mean()


class _Term(torch.autograd.Function):
    """total + inputs · (Σ of n elements of the weight) / √n. Its backward waits, then fills the gradient."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, inputs: Tensor, weight: Tensor, clock: Clock, seconds: float, kept: Tensor | None, workspace: int
    ) -> Tensor:
        few = weight[:: max(1, weight.numel() // _SAMPLED)]
        ctx.root = math.sqrt(few.numel())
        ctx.like = weight.numel(), weight.dtype
        ctx.clock, ctx.seconds, ctx.workspace = clock, seconds, workspace
        ctx.save_for_backward(inputs, kept)
        return total + inputs * (few.sum() / ctx.root)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient], [inputs, _] = gradients, ctx.saved_tensors
        workspace = _bytes(ctx.workspace, gradient)
        ctx.clock.wait(ctx.seconds)
        del workspace
        numel, dtype = ctx.like
        filled = None
        if ctx.needs_input_grad[2]:
            filled = torch.empty(numel, dtype=dtype, device=gradient.device)
            filled.fill_((gradient * inputs).sum() / ctx.root)
        return gradient, None, filled, None, None, None, None


def _bytes(count: int, like: Tensor) -> Tensor | None:
    """Memory that is allocated and never written."""
    return torch.empty(count, dtype=torch.uint8, device=like.device) if count else None
