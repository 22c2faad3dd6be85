"""Tensors of a step: those that share memory with parameters, where it uses them and which of them outlive it; inputs
and outputs of units, which are held where a unit computes its activations again; what a unit's forward changes.

A view of a parameter may be returned, saved for backward, or kept in any object. It reads the memory of the parameter's
unit, and a plan frees this memory after the last use in the profile. So one step is watched operator by operator.
Tensors are identified by their storage.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mdcs.model.guard import tensors_in
from mdcs.model.recompute import buffer_versions, changed_buffers
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import (
    ModuleHook,
    StorageWeakRef,
    base_of,
    innermost_dispatch_mode,
    tree_leaves,
    version_of,
    without_torch_function,
)


class AliasTracker(TorchDispatchMode):
    """Calls the method ``used`` (unit, offset in its flat buffer in elements) for every operator on a unit's memory."""

    supports_higher_order_operators = True

    def __init__(self, storages: list[UnitStorage], used: Callable[[int, int], None]) -> None:
        super().__init__()
        self._used = weakref.WeakMethod(used)  # weak: a run that the loop drops leaves this behind
        self._owners = {storage_of(unit.flat_param): u for u, unit in enumerate(storages)}
        self._is_off = self._is_on = False

    def start(self) -> None:
        """Watch the operators of this thread from now on; not in processes that it forks."""
        self._is_on = True
        self.__enter__()
        _watching.add(self)

    def stop(self) -> None:
        """Watch no more. Inside of a context that the loop has entered since, the mode stays, and does nothing."""
        self._is_off = True
        if self._is_on and innermost_dispatch_mode() is self:
            self._is_on = False
            self.__exit__(None, None, None)
        _watching.discard(self)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Leave out what the run does itself."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operator's arguments, unless the operator makes a view, which reads nothing."""
        if any(kind.__torch_dispatch__ != Tensor.__torch_dispatch__ for kind in types):
            # A wrapper subclass: operators on its inner tensors come here, too.
            return NotImplemented
        with without_torch_function():
            if not _makes_a_view(func):
                for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
                    self._see(tensor)
            return func(*args, **(kwargs or {}))

    def _see(self, tensor: Tensor) -> None:
        owner, used = self._owners.get(storage_of(tensor)), self._used()
        if not (self._is_off or owner is None or used is None or not tensor.numel()):
            with self.off():
                used(owner, int(tensor.storage_offset()))


def refuse_kept(storages: list[UnitStorage]) -> None:
    """Raise UnsupportedModel for a tensor over the memory of parameters that is kept after a step.

    This memory is freed between steps, or what is trained will have other memory under the next plan. Messages in
    flight have such tensors, too: slices of the flat buffers, not of parameters.
    """
    units = {storage_of(unit.flat_param): unit for unit in storages if unit.strategy.sharded or unit.trainable}
    flats = {id(unit.flat_param) for unit in storages}
    own = flats | {id(p) for unit in storages for p in unit.parameters}
    with without_torch_function():
        gc.collect()
        for each in gc.get_objects():
            if not issubclass(type(each), Tensor) or id(each) in own or storage_of(each) not in units:
                continue
            if id(base_of(each)) not in flats:
                raise UnsupportedModel(
                    f"{units[storage_of(each)].name}: a tensor that shares the memory of its parameters is kept after "
                    "the step, when they are in pieces: keep a copy (.clone())"
                )


def _makes_a_view(func: Any) -> bool:
    """Return whether an operator only makes another tensor of the same memory."""
    schema = getattr(func, "_schema", None)
    infos = [a.alias_info for a in schema.arguments if a.alias_info is not None] if schema else []
    return bool(infos) and not any(info.is_write for info in infos)


def storage_of(tensor: Tensor) -> int:
    """Return the identity of the tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrapper subclasses
        return 0


_watching: weakref.WeakSet[AliasTracker] = weakref.WeakSet()


def _stop_all() -> None:
    for tracker in [*_watching]:
        tracker.stop()


os.register_at_fork(after_in_child=_stop_all)


# ---- units


class UnitTensors:
    """Context that listens to the forward calls of units."""

    def __init__(self, units: Sequence[ModelUnit]) -> None:
        self._units = {m: u for u, unit in reversed([*enumerate(units)]) for m in unit.modules}  # of several the first
        # by unit and storage: the storage, its bytes
        self._inputs: dict[int, dict[int, tuple[StorageWeakRef, int]]] = defaultdict(dict)
        self._outputs: dict[int, dict[int, tuple[StorageWeakRef, int]]] = defaultdict(dict)

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
        """Return the bytes, by unit, of the inputs that other units have too and that nobody holds now. A unit that
        recomputes keeps them (a Llama's positions). One such unit is enough, so a profile charges each of them.
        """
        gone = {u: {s: n for s, (storage, n) in of.items() if storage.expired()} for u, of in self._inputs.items()}
        users = Counter(s for of in gone.values() for s in of)
        return {u: sum(size for s, size in of.items() if users[s] > 1) for u, of in gone.items()}

    def outputs(self) -> dict[int, int]:
        """Return the bytes, by unit, of the outputs of its modules."""
        return {u: sum(size for _, size in of.values()) for u, of in self._outputs.items()}

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs[self._units[module]].update(_storages([*args, *kwargs.values()]))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs[self._units[module]].update(_storages(output))


def _storages(values: Any) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
    for tensor in tensors_in(values):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            held = StorageWeakRef(storage)
            yield held.cdata, (held, storage.nbytes())


def watch_forward(unit: ModelUnit) -> Callable[[], bool]:
    """Return a function that tells whether a buffer of the unit has changed since. It raises UnsupportedModel for a
    changed parameter.
    """

    def versions() -> list[tuple[int, int]]:
        with without_torch_function():
            return [(p.data_ptr(), version_of(p)) for _, p in unit.parameters]

    def has_changed() -> bool:
        for (name, _), before, after in zip(unit.parameters, weights, versions(), strict=True):
            if before != after:
                raise UnsupportedModel(
                    f"{name}: is changed by forward (max_norm, clamping, .data), which is lost where it is "
                    "sharded: change weights between steps, in full_parameters(writeback=True)"
                )
        return any(map(changed_buffers, unit.modules, buffers))

    weights, buffers = versions(), [buffer_versions(module) for module in unit.modules]
    return has_changed
