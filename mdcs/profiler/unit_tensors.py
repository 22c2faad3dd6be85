"""Inputs and outputs of units in one step, which are held where a unit computes its activations again; what its forward
changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mdcs.model.guard import tensors_in
from mdcs.model.recompute import buffer_versions, changed_buffers
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.torch_compat import ModuleHook, StorageWeakRef, version_of, without_torch_function


class UnitTensors:
    """Context that listens to the forward calls of units."""

    def __init__(self, units: Sequence[ModelUnit]) -> None:
        self._units = {m: u for u, unit in reversed([*enumerate(units)]) for m in unit.modules}  # of several the first
        # by unit and storage: the storage, its bytes
        self._inputs: dict[int, dict[int, tuple[StorageWeakRef, int]]] = {}
        self._outputs: dict[int, dict[int, tuple[StorageWeakRef, int]]] = {}

    def __enter__(self) -> UnitTensors:
        self._handles = [
            *(m.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True) for m in self._units),
            *(m.register_forward_hook(ModuleHook(self._returned)) for m in self._units),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def shared_inputs(self) -> dict[int, int]:
        """Return the bytes, by unit, of the inputs that other units have too and that nobody holds now.

        A unit that recomputes keeps them (a Llama's positions). One such unit is enough, so a profile charges each of
        them.
        """
        gone = {
            u: {s: size for s, (storage, size) in of.items() if storage.expired()} for u, of in self._inputs.items()
        }
        users = Counter(s for of in gone.values() for s in of)
        return {u: sum(size for s, size in of.items() if users[s] > 1) for u, of in gone.items()}

    def outputs(self) -> dict[int, int]:
        """Return the bytes, by unit, of the outputs of its modules."""
        return {u: sum(size for _, size in of.values()) for u, of in self._outputs.items()}

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.setdefault(self._units[module], {}).update(_storages([*args, *kwargs.values()]))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs.setdefault(self._units[module], {}).update(_storages(output))


def _storages(values: Any) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
    for tensor in tensors_in(values):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            held = StorageWeakRef(storage)
            yield held.cdata, (held, storage.nbytes())


class ForwardChanges:
    """Changes by the forward of a unit, from the construction on."""

    def __init__(self, unit: ModelUnit) -> None:
        self._unit, self._weights = unit, self._versions(unit)
        self._buffers = [buffer_versions(module) for module in unit.modules]

    def changed_buffer(self) -> bool:
        """Return whether a buffer has changed. Raises UnsupportedModel for a changed parameter."""
        for (name, _), before, after in zip(
            self._unit.parameters, self._weights, self._versions(self._unit), strict=True
        ):
            if before != after:
                raise UnsupportedModel(
                    f"{name}: is changed by forward (max_norm, clamping, .data), which is lost where it is "
                    "sharded: change weights between steps, in full_parameters(writeback=True)"
                )
        pairs = zip(self._unit.modules, self._buffers, strict=True)
        return any(changed_buffers(module, before) for module, before in pairs)

    @staticmethod
    def _versions(unit: ModelUnit) -> list[tuple[int, int]]:
        """Return address and version of the unit's parameters."""
        with without_torch_function():
            return [(p.data_ptr(), version_of(p)) for _, p in unit.parameters]
