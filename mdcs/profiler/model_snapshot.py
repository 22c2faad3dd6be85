"""Restore what a model's modules keep, and the random state, after steps that are only measured."""

from __future__ import annotations

import contextlib
import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Set
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdcs.checkpoint.directory import random_state, set_random_state
from mdcs.runtime.initialization import unexpanded
from mdcs.telemetry.memory_meter import Meter

_INTERNAL = vars(nn.Module()).keys() - {"training"}
_MOST_OBJECTS = 10_000  # looked into at most: an attribute may lead to a whole data set
_VALUES = str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, nn.Parameter
_THREADED = {"mdcs", "torch", "threading", "queue", "multiprocessing", "concurrent", "asyncio", "logging", "weakref"}
"""Packages whose objects have a life of their own: other threads change them."""


class ModuleSnapshot:
    """State that the modules of a model keep from pass to pass, besides parameters; :meth:`restore` restores it.

    - Buffers: made, replaced and written ones.
    - Other attributes, such as counters. Tensors, containers and random generators in them are restored in place, and
      so are the attributes of an object that a module holds. Iterators cannot be restored.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # holds the objects, so that an id stays that of one object
        self._keep(model, 0)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all of it."""
        for undo in self._undo:
            undo()

    def _keep_module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        for held in (module._buffers, module._non_persistent_buffers_set):
            self._keep(held, 0)
        self._keep_attributes(module, _INTERNAL, 1)

    def _keep_attributes(self, of: object, without: Set[str], objects: int) -> None:
        before = {name: value for name, value in vars(of).items() if name not in without}

        def undo() -> None:
            for name in vars(of).keys() - before.keys() - without:
                del vars(of)[name]
            vars(of).update(before)

        self._undo.append(undo)
        for value in before.values():
            self._keep(value, objects)

    def _keep(self, value: Any, objects: int) -> None:
        """Keep what is in a value. ``objects``: how deep to look into objects of other classes."""
        if isinstance(value, _VALUES) or id(value) in self._seen or len(self._seen) >= _MOST_OBJECTS:
            return
        if isinstance(value, nn.Module):  # the model, or one that is registered nowhere
            for module in value.modules():
                self._keep_module(module)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, (list, tuple, deque, dict, set)):
            if not isinstance(value, tuple):
                self._undo.append(_refill(value))
            for each in [*value.values()] if isinstance(value, dict) else [*value]:
                self._keep(each, objects)
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            self._undo.append(partial(value.__setitem__, ..., value.copy()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, (torch.Generator, np.random.RandomState)):
            state: Any = value.get_state()
            self._undo.append(partial(value.set_state, state))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif objects and hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _THREADED:
            self._keep_attributes(value, set(), objects - 1)

    def _keep_tensor(self, tensor: Tensor) -> None:
        in_place = tensor.layout is torch.strided and not (tensor.is_inference() or tensor.is_nested)
        if tensor.grad_fn is not None or not in_place:  # made anew by each forward, or not written in place
            return
        before = unexpanded(tensor.detach()).clone()

        def undo() -> None:
            place = unexpanded(tensor.data)
            if place.shape == before.shape:
                place.copy_(before)
            else:  # forward resized it through .data
                tensor.data = before

        self._undo.append(undo)


def _refill(container: Any) -> Callable[[], None]:
    before = dict(container) if isinstance(container, dict) else list(container)

    def undo() -> None:
        if [*map(id, _contents(container))] != [*map(id, _contents(before))]:
            container.clear()
            container.extend(before) if isinstance(container, (list, deque)) else container.update(before)

    return undo


def _contents(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


@contextlib.contextmanager
def preserve_model(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Run steps that are only measured: no garbage collection; what modules keep and the random state are restored."""
    with meter.tag("parameters"):  # not part of a step: must not count as activations
        snapshot = ModuleSnapshot(model)
        device = next(model.parameters()).device
        numbers = random_state(device)
    collected = gc.isenabled()
    gc.disable()  # a collection inside a slot would be measured as compute
    try:
        yield
    finally:
        if collected:
            gc.enable()
        snapshot.restore()
        set_random_state(numbers, device)
