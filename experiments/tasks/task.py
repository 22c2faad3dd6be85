"""A model for training: the module, its loss, its inputs, and the module classes that become units.

The loss reaches every parameter. Parameters that transformers builds but the loss does not use (BERT's pooler, the
second name of its decoder's bias) are removed, since DDP would wait for a gradient that never comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from experiments.tasks.builtin import Synthetic
from experiments.tasks.data import IGNORED, Inputs

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A model, and the functions and classes for its training.

    - loss: (model, batch) → scalar tensor. The model is an argument because it may be wrapped (DDP, FSDP) by then.
      The batch is one of `experiments.tasks.data.Data.batches` for `inputs`, with floats in the model's dtype.
    - block_classes: names of the module classes of which the default wrap policy makes units. Parameters outside of
      them (embeddings, head, stem) are in separate units.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    block_classes: tuple[str, ...]
    inputs: Inputs

    def example_batch(self, batch_size: int, seed: int = 0) -> Batch:
        """A synthetic batch with the shapes and dtypes of real ones, on the CPU."""
        return next(Synthetic(batch_size=batch_size, seed=seed).batches(self.inputs, rank=0, world=1))


_GIVE_LOSS = "model.loss: null is cross-entropy of logits [labels…, class] or [batch, class, …] for numbers of classes"


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the labelled positions of the batch, for tokens and for images. transformers' own losses
    cast logits to float32, which rounds a float64 model's logits. Here only half precision is widened, so runs compared
    in float64 are float64 throughout."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs) if len(inputs) > 1 else model(*inputs.values())
    logits, labels = output if isinstance(output, Tensor) else getattr(output, "logits", None), batch["labels"]
    if not isinstance(logits, Tensor) or labels.is_floating_point():
        raise ValueError(f"{_GIVE_LOSS}; got {type(output).__name__} for labels of {labels.dtype}")
    if logits.shape[:-1] != labels.shape and (*logits.shape[:1], *logits.shape[2:]) == labels.shape:
        logits = logits.movedim(1, -1)  # as torch's cross-entropy has it
    if logits.shape[:-1].numel() != labels.numel():
        raise ValueError(f"{_GIVE_LOSS}; got {list(logits.shape)} for labels {list(labels.shape)}")
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


_AT_ONCE = 1e-3  # Seconds. If compute starts later than this after a wait, it has waited for something else.
_SAMPLED = 256  # about how many elements of a parameter the loss depends on, evenly spaced


class Clock:
    """Waits of a device that is always on time."""

    def __init__(self) -> None:
        self._ended = self._overslept = 0.0

    def wait(self, seconds: float) -> None:
        """Sleep `seconds` from now on, less the time that the last wait overslept if that wait has just ended."""
        begin = time.perf_counter()
        if begin - self._ended < _AT_ONCE:
            begin -= self._overslept
        if (left := begin + seconds - time.perf_counter()) > 0:
            time.sleep(left)
        self._ended = time.perf_counter()
        self._overslept = self._ended - (begin + seconds)


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
        return checkpoint(self._terms, total, inputs, use_reentrant=False, preserve_rng_state=False)

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
        total = inputs.new_zeros(len(inputs))
        for i, block in enumerate(self.blocks):
            total = block(total, inputs[:, i])
        return total


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["inputs"]) - batch["labels"]).square().mean()


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
        filled = torch.empty(numel, dtype=dtype, device=gradient.device) if ctx.needs_input_grad[2] else None
        if filled is not None:
            filled.fill_((gradient * inputs).sum() / ctx.root)
        return gradient, None, filled, None, None, None
