"""Guarded parameters: while their values are not in memory, a read or a change of a parameter raises.

A closed parameter is the same object with another class, whose ``__torch_function__`` sees every use from Python. An
open parameter therefore costs nothing, autograd's own work is never intercepted, and opening or closing takes 0.1 µs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.torch_compat import tree_leaves, without_torch_function

GRADIENT, THAW = ".grad", "requires_grad_"

Refuse = Callable[[str, str], Exception | None]
"""(parameter's name, use) -> the exception to raise, or None to allow the use.

The use is a torch function's name, GRADIENT or THAW.
"""


_ASSIGNMENTS = ("__setitem__", ".data =")


def changes(use: str) -> bool:
    """Return whether a use writes to a parameter: an operation in place (``mul_``), or an assignment."""
    return use.endswith("_") and not use.endswith("__") or use in _ASSIGNMENTS


def only_reads(use: str) -> bool:
    """Return whether a use computes with a parameter, and neither changes nor copies the parameter itself."""
    return not (changes(use) or use in (GRADIENT, THAW, "deepcopy", "pickle"))


_TENSOR: Any = Tensor  # typed Any: its attributes are descriptors, and its annotations do not say so


def _getters(*names: str) -> set[Any]:
    return {getattr(_TENSOR, name).__get__ for name in names if hasattr(_TENSOR, name)}


_HARMLESS = {
    *_getters(
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_mps", "is_xpu",
        "names", "retains_grad", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
    ),
    *(getattr(Tensor, name) for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "is_inference", "get_device", "register_hook", "__len__",
    )),
    torch.autograd.grad,
    torch.autograd.backward,
}  # fmt: skip
_LIKE = {
    *(getattr(torch, f"{name}_like") for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")),
    *(getattr(Tensor, f"new_{name}") for name in ("empty", "empty_strided", "full", "ones", "tensor", "zeros")),
}
"""Functions that take shape, type or device from their first argument and do not read its values."""
_NAMES = {
    _TENSOR.data.__get__: ".data", _TENSOR.data.__set__: ".data =", _TENSOR.grad.__get__: GRADIENT,
    _TENSOR.grad.__set__: GRADIENT, _TENSOR.grad.__delete__: GRADIENT,
    _TENSOR.requires_grad.__set__: THAW, _TENSOR.requires_grad_: THAW,
}  # fmt: skip


class GuardedParameter:
    """Base class of closed parameters, mixed with the parameter's own class; ``guard`` is the guard of all of them.

    The reference is weak: a class is garbage that is collected late, and must not keep parameters alive until then.
    """

    guard: weakref.ref[Guard]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow reads of metadata, refuse everything else."""
        with without_torch_function():
            if func not in _HARMLESS:
                what: str = _NAMES.get(func) or getattr(func, "__name__", "") or str(func)
                read = [*args, *(kwargs or {}).values()]
                if func in _LIKE:
                    read = [*args[1:], *(value for name, value in (kwargs or {}).items() if name != "input")]
                for p in (leaf for leaf in tree_leaves(read) if isinstance(leaf, GuardedParameter)):
                    if what != THAW or p.requires_grad is not (args[1] if len(args) > 1 else True):  # type: ignore[attr-defined]
                        _refuse(p, what)
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        _refuse(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(self, "pickle")

    def __repr__(self, **_: Any) -> str:
        guard = self.guard()
        return f"Parameter({guard.name_of(self) if guard else '?'}, closed)"


def _refuse(parameter: GuardedParameter, what: str) -> None:
    guard = type(parameter).guard()
    if guard is None:
        raise RuntimeError(
            f"this parameter cannot be used any more ({what}): its run was dropped without close(), and it is "
            "sharded. Keep what parallelize() returns, and close() it"
        )
    guard.refuse(parameter, what)


class Guard:
    """Opens and closes ``parameters`` together; they start open. ``refuse`` chooses the error of a use while closed."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], refuse: Refuse) -> None:
        self._refuse, self.is_open = refuse, True
        closed = {kind: self._closed_class(kind) for kind in {type(p) for _, p in parameters}}
        self._parameters = [(name, p, type(p), closed[type(p)]) for name, p in parameters]

    def _closed_class(self, opened: type[nn.Parameter]) -> type[nn.Parameter]:
        return type(f"Closed{opened.__name__}", (GuardedParameter, opened), {"guard": weakref.ref(self)})

    def open(self) -> None:
        """Allow every use of the parameters."""
        if not self.is_open:
            self.is_open = True
            for _, p, opened, _ in self._parameters:
                p.__class__ = opened

    def close(self) -> None:
        """Refuse every use of the parameters except autograd's."""
        if self.is_open:
            self.is_open = False
            for _, p, _, closed in self._parameters:
                p.__class__ = closed

    def name_of(self, parameter: Any) -> str:
        """Return the name of one of its parameters."""
        return next(name for name, p, _, _ in self._parameters if p is parameter)

    def refuse(self, parameter: Any, what: str) -> None:
        """Raise the error for this use of the closed ``parameter``, unless the use is allowed."""
        error = self._refuse(self.name_of(parameter), what)
        if error is not None:
            raise error
