"""Restore a model's buffers and the random state after steps that are only measured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mdcs.checkpoint.aux_state import random_state, set_random_state
from mdcs.runtime.buffers import unexpanded
from mdcs.telemetry.memory_meter import Meter

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class _ModuleState(NamedTuple):
    """A module's buffers, the names of its non-persistent ones, and its other attributes."""

    module: nn.Module
    buffers: dict[str, Tensor | None]
    not_saved: set[str]
    attributes: dict[str, Any]


class BufferSnapshot:
    """The present buffers of a model, with copies of their values; :meth:`restore` restores them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            _ModuleState(
                module, dict(module._buffers), set(module._non_persistent_buffers_set),
                {name: value for name, value in vars(module).items() if name not in _REGISTRIES},
            )
            for module in model.modules()
        ]  # fmt: skip
        self._values = [(b, unexpanded(b.detach()).clone()) for b in model.buffers()]

    @torch.no_grad()
    def restore(self) -> None:
        """Remove buffers that forward has made, restore replaced ones, and restore all values.

        A module that has made or replaced a buffer may have noted this in an attribute, such as a length or a flag: its
        attributes are restored, too.
        """
        for before in self._modules:
            module, now = before.module, before.module._buffers
            if {name: id(b) for name, b in now.items()} != {name: id(b) for name, b in before.buffers.items()}:
                now.clear()
                now.update(before.buffers)
                module._non_persistent_buffers_set.clear()
                module._non_persistent_buffers_set.update(before.not_saved)
                for name in vars(module).keys() - before.attributes.keys() - set(_REGISTRIES):
                    del vars(module)[name]
                vars(module).update(before.attributes)
        for buffer, value in self._values:
            place = unexpanded(buffer)
            if place.shape == value.shape:
                place.copy_(value)
            else:  # forward resized it through .data
                buffer.data = value


@contextlib.contextmanager
def preserve_model(model: nn.Module, meter: Meter) -> Iterator[Callable[[], None]]:
    """Run steps that are only measured: no garbage collection; buffers and the random state are restored.

    The value restores the random state alone: steps that draw the same numbers drop the same layers.
    """
    with meter.tag("parameters"):  # not part of a step: must not count as activations
        buffers = BufferSnapshot(model)
        device = next(model.parameters()).device
        numbers = random_state(device)
    collected = gc.isenabled()
    gc.disable()  # a collection inside a slot would be measured as compute
    try:
        yield lambda: set_random_state(numbers, device)
    finally:
        if collected:
            gc.enable()
        buffers.restore()
        set_random_state(numbers, device)
