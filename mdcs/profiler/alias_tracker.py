"""Tensors that share memory with parameters: where a step uses them, and which of them outlive it.

A view of a parameter may be returned, saved for backward, or kept in any object. It reads the memory of the parameter's
unit, and a plan frees this memory after the last use in the profile. So one step is watched operator by operator.
Tensors are identified by their storage.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mdcs.model.units import UnsupportedModel
from mdcs.profiler.slot_recorder import SlotRecorder
from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import base_of, innermost_dispatch_mode, tree_leaves, without_torch_function


class Recorder(Protocol):
    """Hears of uses: :class:`mdcs.profiler.running_steps.RunningSteps`."""

    storages: list[UnitStorage]
    recorder: SlotRecorder

    def used(self, unit: int, index: int) -> None:
        """Note that the memory of the unit's parameter ``index`` is used now."""


class AliasTracker(TorchDispatchMode):
    """Tells ``recorder`` of every operator on the memory of a unit, in forward and backward, or where it is freed."""

    supports_higher_order_operators = True

    def __init__(self, storages: list[UnitStorage], recorder: Recorder) -> None:
        super().__init__()
        self._recorder = weakref.ref(recorder)  # weak: a run that the loop drops leaves this behind
        self._owners = {storage_of(unit.flat_param): u for u, unit in enumerate(storages)}
        self._is_off = self._is_on = False

    def start(self) -> None:
        """Watch the operators of this thread from now on; not in processes that it forks."""
        self._is_on = True
        self.__enter__()
        _watching.add(self)

    def stop(self) -> None:
        """Watch no more. Inside of a context that the loop has entered since :meth:`start` the mode stays, and does
        nothing."""
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
        owner, recorder = self._owners.get(storage_of(tensor)), self._recorder()
        if self._is_off or owner is None or recorder is None or not tensor.numel():
            return
        storage, offset = recorder.storages[owner], tensor.storage_offset()
        if recorder.recorder.is_in_pass or not storage.is_full:
            before = [(p.offset, i) for i, p in enumerate(storage.places) if p.offset <= offset]
            with self.off():
                recorder.used(owner, max(before)[1])


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


def _stop_in_child() -> None:
    for uses in list(_watching):
        uses.stop()


os.register_at_fork(after_in_child=_stop_in_child)
