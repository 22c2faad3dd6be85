"""The sizes of a batch, read from the first module call of a step: they tell a larger batch from the profiled one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mdcs.model.hooks import ModuleHook, tensors_in

INPUTS = "inputs"
"""Key of a profile's ``about``: sizes of the profiled batch, in words."""

Sizes = tuple[int, ...]
"""Shape of a tensor."""


class BatchSizes:
    """Listens to modules; :attr:`sizes` is the shape of the step's input, None before the first call.

    The input is the first tensor among the arguments of the first module that runs; of several calls of this module,
    the largest input counts. Of a nested tensor only the number of elements is known. Passes without gradients, such as
    evaluations, are not heard.
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
            found = next(iter(tensors_in([*args, *kwargs.values()])), None)
            if found is not None and (self.sizes is None or found.numel() > math.prod(self.sizes)):
                self.sizes = (found.numel(),) if found.is_nested else tuple(found.shape)


def in_words(sizes: Sizes) -> str:
    """Return the sizes as text: ``8 x 32``."""
    return " x ".join(map(str, sizes))


def from_words(words: str) -> Sizes | None:
    """Return the sizes of a text of :func:`in_words`; None for other texts."""
    parts = words.split(" x ")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None
