"""Activation checkpointing of units: forwards that free their activations, and that backward computes again.

The checkpointed forward takes the place of ``module.forward``, inside of the module's hooks. So hooks run once, in
forward; in backward the slot of the module has begun, and its parameters are gathered, before its forward runs again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mdcs.model.guard import tensors_in
from mdcs.model.units import ModelUnit, UnsupportedModel
from mdcs.torch_compat import has_batch_statistics, operators, run_not_compiled, version_of

Recomputing = Callable[[], AbstractContextManager[Any]]
"""Returns the context in which a forward is computed again."""
Observer = Callable[[int], Recomputing]
"""Called with the unit at each forward."""

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
_KEPT = operators("mm", "addmm", "bmm", "baddbmm", "convolution", *_ATTENTION)
"""Operators whose outputs selective checkpointing keeps."""


def refuse_recomputation(model: nn.Module, units: Sequence[ModelUnit], chosen: Iterable[int]) -> None:
    """Raise UnsupportedModel for a chosen unit whose activations cannot be computed again."""
    reasons = reasons_to_keep(model, units)
    for u in chosen:
        if reasons[u]:
            raise UnsupportedModel(f"{units[u].name}: cannot compute its activations again: {reasons[u]}")


def reasons_to_keep(model: nn.Module, units: Sequence[ModelUnit]) -> list[str]:
    """Return for each unit why its activations cannot be computed again; "" if they can."""
    inside = {m for unit in units for m in unit.modules}
    taken: set[nn.Module] = set()
    out = []
    for unit in units:
        module, reason = unit.modules[0], ""
        if len(unit.modules) > 1:
            reason = "it has several modules"
        elif module is model:
            reason = "it is the whole model"
        elif module in taken:
            reason = "its module is another unit's"
        elif isinstance(module, torch.jit.ScriptModule):
            reason = "its module is scripted"
        elif any(m in inside for m in module.modules() if m is not module):
            reason = "other units run inside of it"
        taken.update(unit.modules)
        out.append(reason)
    return out


class Recomputation:
    """Checkpointed forwards of units until :meth:`remove`; ``selective``: by unit, of :func:`checkpoint_contexts`."""

    def __init__(self, units: Sequence[ModelUnit], selective: dict[int, bool], observer: Observer) -> None:
        self._restore: list[tuple[nn.Module, Any]] = []
        for u, keeps in selective.items():
            [module] = units[u].modules
            self._restore.append((module, vars(module).get("forward")))
            module.forward = CheckpointedForward(units[u].name, module, keeps, functools.partial(observer, u))

    def remove(self) -> None:
        """Restore the forwards."""
        for module, forward in self._restore:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
        self._restore.clear()


class CheckpointedForward:
    """The forward of a module, checkpointed while gradients are enabled.

    In a copy or pickle of the module it is a plain call of the module's own forward, which needs no mdcs.
    """

    def __init__(self, name: str, module: nn.Module, selective: bool, observer: Callable[[], Recomputing]) -> None:
        self._name, self._module, self._observer = name, module, observer
        self._own, self._forward = vars(module).get("forward"), module.forward
        self._contexts = functools.partial(checkpoint_contexts, module, selective)
        self._cache: Callable[[], Any] = ref(self)  # the last cache that was left out
        functools.update_wrapper(self, self._forward, updated=())  # so that inspect.signature finds the arguments
        self._call = run_not_compiled(self._checkpointed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return self._call(args, kwargs) if torch.is_grad_enabled() else self._forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        own = (type(self._module).forward, self._module) if self._own is None else (self._own,)
        return functools.partial, own

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(self._uncached(value) for value in args)
        kwargs = {name: self._uncached(value) for name, value in kwargs.items()}
        positional, names, recomputing = len(args), list(kwargs), self._observer()
        given = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
        held = list(tensors_in(given))

        def run(*values: Any) -> Any:
            return self._forward(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        before = buffer_versions(self._module)
        # Keywords as positions: checkpoint() sees whether a tensor is changed in place before it is used again.
        out = checkpoint(
            run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True,
            context_fn=functools.partial(self._contexts, recomputing),
        )  # fmt: skip
        if changed_buffers(self._module, before):
            self._refuse("changes a buffer")
        if [*map(id, held)] != [id(tensor) for tensor in tensors_in(given)]:
            self._refuse("changes an object that it is called with")
        return out

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModel(
            f"{self._name}: its forward {what}, so it cannot be computed again with the same result: plan it without "
            "recomputation"
        )

    def _uncached(self, value: Any) -> Any:
        """Return None in the place of an empty cache of transformers, as its own checkpointing does: a layer that is
        computed again would append its keys and values a second time. No step of training reads them.
        """
        if not hasattr(value, "get_seq_length") or getattr(self._module, "_can_checkpoint_with_cache", False):
            return value
        layer = next((m.layer_idx for m in self._module.modules() if hasattr(m, "layer_idx")), 0)
        if self._cache() is value or value.get_seq_length(layer):  # keys of earlier tokens
            self._refuse("reads a cache of keys and values")
        self._cache = ref(value)
        return None


Versions = dict[tuple[int, str], tuple[int, int]]


def buffer_versions(module: nn.Module) -> Versions:
    """Return identity and version of each buffer of the module, running statistics left out."""
    others = (m for m in module.modules() if m._buffers and not has_batch_statistics(m))
    held = [((i, name), b) for i, m in enumerate(others) for name, b in m._buffers.items() if b is not None]
    return {place: (id(b), 0 if b.is_inference() else version_of(b)) for place, b in held}


def changed_buffers(module: nn.Module, before: Versions) -> bool:
    """Return whether a buffer has changed since :func:`buffer_versions`; one that was made since is no change."""
    after = buffer_versions(module)
    return any(after.get(place) != version for place, version in before.items())


def checkpoint_contexts(
    module: nn.Module, selective: bool, recomputing: Recomputing = contextlib.nullcontext
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a module's forward, and of it computed again: ``context_fn`` of torch's checkpoint.
    ``selective``: whether outputs of matrix products, convolutions and attention are kept.
    """
    nothing = contextlib.nullcontext()
    forward, again = create_selective_checkpoint_contexts(_policy) if selective else (nothing, nothing)
    return forward, _Again(module, recomputing, again)


class _Again(contextlib.ExitStack):
    """Computes again, anew at each entry, with copies of running statistics, which the first forward has updated."""

    def __init__(self, module: nn.Module, recomputing: Recomputing, operators: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._module, self._recomputing, self._operators = module, recomputing, operators

    def __enter__(self) -> _Again:
        with contextlib.ExitStack() as begun:  # left at once if one of them raises
            for owner in (m for m in self._module.modules() if m.training and has_batch_statistics(m)):
                held: Any = owner._buffers
                begun.callback(held.update, dict(held))
                held.update({name: None if b is None else b.clone() for name, b in held.items()})
            begun.enter_context(self._recomputing())
            begun.enter_context(self._operators)
            self.push(begun.pop_all())
        return self


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator not in _KEPT or _drops_out(operator, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _drops_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers. Skipping it changes the numbers that are drawn after it."""
    names = _KEPT[operator]
    return "dropout_p" in names and bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))
