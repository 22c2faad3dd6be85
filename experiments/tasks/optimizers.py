"""Optimizers that a config can choose: torch's, with a schedule of the learning rate. Imports torch only in `make`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mdcs.options import Checked, option, options

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Optimizer(Checked, ABC):
    """The options that all optimizers share."""

    name: ClassVar[str] = "optimizer"
    schedule: str = option(
        "constant", "schedule of the learning rate", choices=("constant", "linear", "cosine"), profiled=False
    )
    warmup_steps: int = option(0, "first steps, in which the learning rate rises to lr", at_least=0, profiled=False)
    clip_norm: float | None = option(
        None, "largest global norm of the gradient; updates then wait for all gradients", above=0, profiled=False
    )

    @abstractmethod
    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer of these parameters."""

    def factor(self, step: int, total: int) -> float:
        """Factor on the learning rate in `step`, which is counted from 0. Linear warm-up to 1, then constant, or
        falling to 0 after the last of `total` steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, total - self.warmup_steps)
        if self.schedule == "linear":
            return 1 - progress
        return (1 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1.0


@dataclass(frozen=True, kw_only=True)
class Torch(Optimizer):
    """The options of torch's optimizers."""

    cls: ClassVar[str]  # the class of torch.optim, whose arguments are the options that not all optimizers share
    lr: float = option(1e-3, "learning rate", at_least=0, profiled=False)
    weight_decay: float = option(0.0, "weight decay", at_least=0)
    fused: bool | None = option(None, "torch's fused update; null: torch decides")

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import torch
        arguments = {name: getattr(self, name) for name in options(self) if name not in options(Optimizer)}
        return getattr(torch.optim, self.cls)(parameters, **arguments)


@dataclass(frozen=True, kw_only=True)
class Sgd(Torch):
    """torch.optim.SGD."""

    name, cls = "sgd", "SGD"
    momentum: float = option(0.0, "momentum", at_least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Adam(Torch):
    """torch.optim.Adam: weight decay is part of the gradient."""

    name, cls = "adam", "Adam"
    betas: tuple[float, ...] = option(
        (0.9, 0.999), "decay rates of averages", at_least=0, below=1, length=2, profiled=False
    )
    eps: float = option(1e-8, "added to Adam's denominator", above=0, profiled=False)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """torch.optim.AdamW: weight decay is separate from the gradient."""

    name, cls = "adamw", "AdamW"
