"""Take off the wrappers that DistributedDataParallel and accelerate put around a model and its optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mdcs.model.units import UnsupportedModel


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
    """Return the optimizer inside of accelerate's, whose ``step`` only calls it.

    Raises UnsupportedModel for another wrapper, whose own work in ``step`` would be left out, for an optimizer that
    changes parameters outside of ``step``, and for other objects.
    """
    inner = next(
        (own for own in getattr(optimizer, "__dict__", {}).values() if isinstance(own, torch.optim.Optimizer)), None
    )
    name = type(optimizer).__name__
    if inner is None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedModel(f"{name} is no torch.optim.Optimizer")
    if inner is not None and any(base.__module__.startswith("accelerate.") for base in type(optimizer).__mro__):
        return without_accelerate(inner)
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise UnsupportedModel(
            f"optimizer {name}: its train() and eval() change the parameters (schedule-free): stay with DDP"
        )
    if inner is not None:
        raise UnsupportedModel(
            f"optimizer {name}: wraps {type(inner).__name__}: give mdcs that one, and do what {name} adds after its "
            "step(), on every rank: with parallel.full_parameters(writeback=True): …"
        )
    return optimizer
