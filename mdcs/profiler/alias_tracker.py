"""Tensors that share memory with parameters: where a step uses them, and which of them outlive it.

A view of a parameter may be returned, saved for backward, or kept in any object. It reads the memory of the parameter's
unit, and a plan frees this memory after the last use in the profile. So one step is watched operator by operator.
Tensors are identified by their storage.
"""

from __future__ import annotations

import bisect
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mdcs.model.guard import attributes_over_parameters
from mdcs.model.units import ModelUnit, UnsupportedModel, alias_refused
from mdcs.torch_compat import tree_leaves, without_torch_function

Used = Callable[[int, int], None]
"""Called with (unit, index of its parameter) when an operator reads or writes the parameter's memory."""


class UseTracker(TorchDispatchMode):
    """Context that sees the tensors that operators read or write, in forward and backward."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operator's arguments, unless the operator makes a view, which reads nothing."""
        if any(kind.__torch_dispatch__ != Tensor.__torch_dispatch__ for kind in types):
            # A wrapper subclass: operators on its inner tensors come here, too.
            return NotImplemented
        with without_torch_function():
            if not _makes_a_view(func):
                for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
                    self.see(tensor, func)
            return func(*args, **(kwargs or {}))

    def see(self, tensor: Tensor, func: Any) -> None:
        """Look at an argument of the operator ``func``, which has not run yet."""
        raise NotImplementedError


class AliasTracker(UseTracker):
    """Context that calls ``used`` for every use of a parameter's memory in a step, forward and backward.

    Parameters have new storages meanwhile (on the same memory), as they will have when sharded. A tensor over a
    parameter's memory without the new storage is older than the step, and would not follow the parameter into a shard.
    Raises UnsupportedModel when the step uses such a tensor, and in :meth:`check`.
    """

    def __init__(self, units: Sequence[ModelUnit], used: Used) -> None:
        super().__init__()
        self._used = used
        self._parameters = [
            (u, i, name, p) for u, unit in enumerate(units) for i, (name, p) in enumerate(unit.parameters)
        ]
        self._names = {(u, i): name for u, i, name, _ in self._parameters}
        self._before: list[Tensor] = []
        self._owners: dict[int, tuple[int, int]] = {}  # by storage
        self._ranges = sorted((*_range(p), name) for _, _, name, p in self._parameters if p.numel())
        self._begins = [begin for begin, _, _ in self._ranges]
        # A range that ends after an address begins at most this many bytes before it.
        self._longest = max((end - begin for begin, end, _ in self._ranges), default=0)

    def __enter__(self) -> AliasTracker:
        """Give parameters their new storages."""
        with without_torch_function(), torch.no_grad():
            for u, i, _, p in self._parameters:
                self._before.append(p.data)
                p.data = torch.from_dlpack(p.detach())
                self._owners[storage_of(p)] = u, i
        super().__enter__()
        self._exports = _ExportGuard(self._owners, self._names)
        self._exports.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Restore the parameters' storages."""
        self._exports.__exit__(*error)
        super().__exit__(*error)
        with without_torch_function():
            for (_, _, _, p), data in zip(self._parameters, self._before, strict=True):
                p.data = data
        self._before.clear()

    def see(self, tensor: Tensor, func: Any) -> None:
        """Tell of a parameter's memory."""
        owner = self._owners.get(storage_of(tensor))
        if owner is not None:
            self._used(*owner)
        elif (name := self._overlapped(tensor)) is not None:
            raise UnsupportedModel(
                f"{name}: forward uses a view of it made before this step ({func}): make the view inside forward, or "
                f"keep {name}.clone()"
            )

    def _overlapped(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter that shares memory with the tensor, or None."""
        if not _has_memory(tensor) or not tensor.numel():
            return None
        begin, end = _range(tensor)
        first = bisect.bisect_left(self._begins, begin - self._longest)
        around = itertools.takewhile(lambda each: each[0] < end, itertools.islice(self._ranges, first, None))
        return next((name for _, ends, name in around if ends > begin), None)

    def check(self, model: nn.Module) -> None:
        """Raise UnsupportedModel for a tensor that shares memory with a parameter and outlives the step.

        Call it after the step.
        """
        own = {id(p) for _, _, _, p in self._parameters} | {id(data) for data in self._before}
        with without_torch_function():
            gc.collect()
            for alias in attributes_over_parameters(model):
                raise alias_refused(alias)
            for each in gc.get_objects():
                if issubclass(type(each), Tensor) and id(each) not in own and storage_of(each) in self._owners:
                    name = self._names[self._owners[storage_of(each)]]
                    raise UnsupportedModel(
                        f"{name}: a tensor that shares its memory is kept after the step, when the parameter may be "
                        f"in pieces: keep a copy (.clone())"
                    )


class _ExportGuard(TorchFunctionMode):
    """Refuses exports of parameters' memory to other libraries: their uses are not seen, and keep the memory alive."""

    def __init__(self, owners: dict[int, tuple[int, int]], names: dict[tuple[int, int], str]) -> None:
        super().__init__()
        self._owners, self._names = owners, names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check calls of ``numpy()`` and the like."""
        if func in (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__):
            with without_torch_function():
                owner = self._owners.get(storage_of(args[0]))
            if owner is not None:
                raise UnsupportedModel(
                    f"{self._names[owner]}: its memory is handed to numpy, or another library, which would keep it "
                    f"when the parameter is in pieces: hand over a copy (.clone())"
                )
        return func(*args, **(kwargs or {}))


def _makes_a_view(func: Any) -> bool:
    """Return whether an operator only makes another tensor of the same memory."""
    schema = getattr(func, "_schema", None)
    infos = [a.alias_info for a in schema.arguments if a.alias_info is not None] if schema else []
    return bool(infos) and not any(info.is_write for info in infos)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def storage_of(tensor: Tensor) -> int:
    """Return the identity of the tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrapper subclasses
        return 0


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return first and last (excluded) address of the tensor's elements; (0, 0) for a wrapper subclass."""
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # wrapper subclass
        return 0, 0
    if tensor.is_nested:  # has no shape
        return begin, begin + tensor.numel() * tensor.element_size()
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (reach + 1) * tensor.element_size()
