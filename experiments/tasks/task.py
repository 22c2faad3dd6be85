"""A model for training: the module, its loss, its inputs, and the module classes that become units.

The loss reaches every parameter. Parameters that transformers builds but the loss does not use (BERT's pooler, the
second name of its decoder's bias) are removed, since DDP would wait for a gradient that never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.tasks.builtin import Synthetic
from experiments.tasks.data import IGNORED
from experiments.tasks.inputs import Inputs

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A model, and the functions and classes for its training.

    - model: the module.
    - loss: (model, batch) → scalar tensor. The model is an argument because it may be wrapped (DDP, FSDP) by then.
      The batch is one of `experiments.tasks.data.Data.batches` for `inputs`, with floats in the model's dtype.
    - block_classes: names of the module classes of which the default wrap policy makes units. Parameters outside of
      them (embeddings, head, stem) are in separate units.
    - inputs: the inputs that the model reads.
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
    """Mean cross-entropy over the labelled positions of the batch, for tokens and for images.

    transformers' own losses cast logits to float32, which rounds a float64 model's logits. Here only half precision is
    widened, so runs compared in float64 are float64 throughout.
    """
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
