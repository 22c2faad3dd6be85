"""Take off the wrappers that DistributedDataParallel and accelerate put around a model and its optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside of DistributedDataParallel. The wrapper stays callable, but reduces nothing from now on.

    Raises ValueError for DistributedDataParallel further inside.
    """
    plain = model
    if isinstance(model, DistributedDataParallel):
        plain = model.module
        model.reducer = model.logger = None  # type: ignore[assignment]  # its hooks and buckets go with it
        model.forward = plain.__call__  # type: ignore[method-assign]
    for name, module in plain.named_modules():
        if isinstance(module, DistributedDataParallel):
            where = f"model.{name}" if name else "the model"
            raise ValueError(f"{where} is in DistributedDataParallel, which mdcs replaces: leave that line out")
    return plain


def without_accelerate(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of accelerate's, whose ``step`` calls it."""
    inner = getattr(optimizer, "optimizer", None)
    return without_accelerate(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer
