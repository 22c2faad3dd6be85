"""Hooks of modules that torch.compile leaves out; the tensors in what they are given, and the sizes of a batch."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

INPUTS = "inputs"
"""Key of a profile's ``about``: sizes of the profiled batch, in words."""

Sizes = tuple[int, ...]
"""Shape of a tensor."""


class ModuleHook:
    """A hook that torch.compile leaves out of what it compiles.

    In a copy or pickle of the module it is a function of the standard library that does nothing: the copy drives no
    plan, and a process without this package can load the pickle.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = _not_compiled(hook)

    def __call__(self, *arguments: Any) -> None:
        """Call the hook."""
        self._hook(*arguments)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


_WHOLE_GRAPHS = (
    "mdcs sends messages before and after the forward of a unit, which no graph can hold. With fullgraph=True compile "
    "what is "
    'inside of a unit: wrap the compiled module itself, mdcs.ByClass(("OptimizedModule",)), or compile its forward, '
    "block.forward = torch.compile(block.forward, fullgraph=True). Or leave fullgraph out"
)


def _not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook excluded from torch.compile, with the reason for the graph break (torch 2.7 and later)."""
    try:
        disabled: Callable[..., None] = torch.compiler.disable(hook, reason=_WHOLE_GRAPHS)
    except TypeError:
        disabled = torch.compiler.disable(hook)
    return disabled


_MOST_OBJECTS = 10_000  # objects looked into at most: one may refer to a whole program
_OPAQUE = str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, nn.Module


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors [any shapes] in a value: in containers, and in attributes of objects of any class."""
    visited: set[int] = set()  # objects may refer to themselves
    queue = deque([value])
    while queue and len(visited) < _MOST_OBJECTS:
        each = queue.popleft()
        if isinstance(each, Tensor):
            yield each
        elif not isinstance(each, _OPAQUE) and id(each) not in visited:
            visited.add(id(each))
            if isinstance(each, dict):
                queue.extendleft(reversed(list(each.values())))
            elif isinstance(each, (list, tuple)):
                queue.extendleft(reversed(each))
            else:
                slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
                names = [*getattr(each, "__dict__", ()), *slots]
                queue.extendleft(getattr(each, name, None) for name in reversed(names))


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
            tensor = next(iter(tensors_in([*args, *kwargs.values()])), None)
            if tensor is not None and (self.sizes is None or tensor.numel() > math.prod(self.sizes)):
                self.sizes = (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)


def in_words(sizes: Sizes) -> str:
    """Return the sizes as text: ``8 x 32``."""
    return " x ".join(map(str, sizes))


def from_words(words: str) -> Sizes | None:
    """Return the sizes of a text of :func:`in_words`; None for other texts."""
    parts = words.split(" x ")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None
