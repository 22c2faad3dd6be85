"""The sizes of a batch, as the first module of a step is called with it: they tell a larger batch from the profiled one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from mdcs.model.hooks import ModuleHook, _tensors

INPUTS = "inputs"
"""Key of a profile's ``about``: sizes of the profiled batch, in words."""

Sizes = tuple[int, ...]
"""Of a tensor, by dimension."""


class BatchSizes:
    """Listens to modules; :attr:`sizes` are those of the largest first tensor that the first of them was called with."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.restart()
        self.handles = [m.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True) for m in modules]

    def restart(self) -> None:
        """Forget what was seen: a step begins."""
        self.sizes: Sizes | None = None
        self._first: nn.Module | None = None

    def remove(self) -> None:
        """Listen no more."""
        for handle in self.handles:
            handle.remove()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._first is None:
            self._first = module
        if module is self._first:
            found = next(iter(_tensors([*args, *kwargs.values()])), None)
            if found is not None and (self.sizes is None or found.numel() > math.prod(self.sizes)):
                self.sizes = tuple(found.shape)


def in_words(sizes: Sizes) -> str:
    """``8 x 32``."""
    return " x ".join(map(str, sizes))


def from_words(words: str) -> Sizes | None:
    """Inverse of :func:`in_words`; None for other words."""
    parts = words.split(" x ")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None
