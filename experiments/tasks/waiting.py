"""The modules of a stand-in: real parameters and gradients, and compute that waits.

*The clock.* A slot's time counts from its beginning, so waits of compute are never hidden in it. A late core does not
delay the device that the stand-in represents: when a wait oversleeps, the next wait is shorter by that time, unless
compute has waited for something else in between. No core is kept busy for exact times.

*The sum.* The model is a weighted sum of its inputs, with one input per block. The weight of an input is a sum over a
few elements of each parameter of the block. All elements of a parameter get the gradient of those few. So gradients
cost one pass over memory and depend on the batch and on every block. A stale weight or a lost gradient changes the next
loss.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    """A unit: its parameters, and a forward that waits.

    - numel, tensors: number of elements, and of parameters that hold them.
    - kept (bytes): activations held from forward to the end of backward.
    - forward_s, backward_s (s): time of each.
    """

    def __init__(
        self, numel: int, tensors: int, kept: int, forward_s: float, backward_s: float, clock: Clock,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        self._kept, self._forward_s, self._clock, self._checkpointing = kept, forward_s, clock, checkpointing
        sizes = [numel // tensors + (i < numel % tensors) for i in range(tensors)]
        self._names = [f"weight{i}" for i, size in enumerate(sizes) if size]
        self._share_s = backward_s / len(self._names)
        for name, size in zip(self._names, sizes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(size)))

    def forward(self, total: Tensor, inputs: Tensor) -> Tensor:
        """The total [batch] plus the terms of this block, with its input [batch]."""
        if not self._checkpointing:
            return self._terms(total, inputs)
        out: Tensor = checkpoint(self._terms, total, inputs, use_reentrant=False, preserve_rng_state=False)
        return out

    def _terms(self, total: Tensor, inputs: Tensor) -> Tensor:
        # memory that is allocated and never written
        kept = torch.empty(self._kept, dtype=torch.uint8, device=total.device) if self._kept else None
        self._clock.wait(self._forward_s)
        for name in self._names:
            held = kept if name == self._names[0] else None  # its backward runs last
            total = _Term.apply(total, inputs, getattr(self, name), self._clock, self._share_s, held)
        return total


class Waiting(nn.Module):
    """The stand-in: blocks, one after another: [batch, blocks] → [batch]."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, inputs: Tensor) -> Tensor:
        """Run all blocks."""
        total = inputs.new_zeros(len(inputs))
        for i, block in enumerate(self.blocks):
            total = block(total, inputs[:, i])
        return total


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared difference between the sums and their labels."""
    total: Tensor = model(batch["inputs"])
    return (total - batch["labels"]).square().mean()


class _Term(torch.autograd.Function):
    """total + inputs · (Σ of n elements of the weight) / √n. Its backward waits, then fills the gradient."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, inputs: Tensor, weight: Tensor, clock: Clock, seconds: float, kept: Tensor | None
    ) -> Tensor:
        few = weight[:: max(1, weight.numel() // _SAMPLED)]
        ctx.root = math.sqrt(few.numel())
        ctx.like = weight.numel(), weight.dtype
        ctx.clock, ctx.seconds = clock, seconds
        ctx.save_for_backward(inputs, kept)
        return total + inputs * (few.sum() / ctx.root)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        [gradient], [inputs, _] = gradients, ctx.saved_tensors
        ctx.clock.wait(ctx.seconds)
        numel, dtype = ctx.like
        filled = None
        if ctx.needs_input_grad[2]:
            filled = torch.empty(numel, dtype=dtype, device=gradient.device)
            filled.fill_((gradient * inputs).sum() / ctx.root)
        return gradient, None, filled, None, None, None
