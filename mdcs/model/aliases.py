"""Memory that a model holds under two names: a plan can move only one of them. The tensors in a value.

A run gives parameters memory of their own. A second parameter, a buffer or an attribute over the same memory would
silently keep the first values. Overlaps are found by address, not by type.
"""

from __future__ import annotations

import bisect
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mdcs.torch_compat import without_torch_function

_MOST_OBJECTS = 100_000  # objects visited at most: a module may hold a data set
_OPAQUE = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType,
    types.FrameType,
)  # fmt: skip
_REGISTERED = {"_parameters", "_buffers", "_modules"}


class Alias(NamedTuple):
    """A tensor that the model holds at ``path``, and the name of the parameter whose memory it shares.

    The reference is weak: an Alias must not keep memory alive that the model has released.
    """

    path: str
    tensor: weakref.ref[Tensor]
    parameter: str


class _Region(NamedTuple):
    """The bytes [begin, end) from a tensor's first element to its last, in one address space."""

    space: Any
    begin: int
    end: int
    name: str
    tensor: Tensor


def shared_parameters(model: nn.Module) -> tuple[str, str, bool] | None:
    """Return the names of two parameters that share memory (the later first) and whether they share all; None if none
    do.
    """
    active: list[_Region] = []
    pairs: list[tuple[str, str, bool]] = []
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    for region in _regions(model.named_parameters()):
        active = [other for other in active if other.space == region.space and other.end > region.begin]
        for other in active:
            if _overlap(region, other):
                first, later = sorted((region.name, other.name), key=order.__getitem__)
                pairs.append((later, first, _same(region, other)))
        active.append(region)
    return min(pairs, key=lambda pair: order[pair[0]], default=None)


def folded_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter several elements of which are the same memory (``expand`` makes such); or None."""
    for region in _regions(model.named_parameters()):
        if region.tensor.numel() * region.tensor.element_size() > region.end - region.begin:
            return region.name
    return None


def buffer_over_parameter(model: nn.Module) -> Alias | None:
    """Return a buffer that shares memory with a parameter, or None."""
    aliases = _overlapping(model, ((name, b) for name, b in model.named_buffers() if b.layout is torch.strided))
    return aliases[0] if aliases else None


def attributes_over_parameters(model: nn.Module) -> list[Alias]:
    """Return the tensors over parameters' memory that modules hold in attributes, objects and closures."""
    return _overlapping(model, _held(model))


def still_held(model: nn.Module, aliases: Sequence[Alias]) -> Alias | None:
    """Return the first alias whose tensor the model still holds; None if forward has replaced all of them."""
    now = {id(tensor) for _, tensor in _held(model)} if aliases else set()
    return next((alias for alias in aliases if alias.tensor() is not None and id(alias.tensor()) in now), None)


def _overlapping(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> list[Alias]:
    """Return those of ``tensors`` that overlap a parameter, in the order of ``tensors``."""
    parameters = {id(p) for p in model.parameters()}
    regions = _regions(model.named_parameters())
    begins = [(str(r.space), r.begin) for r in regions]
    longest = max((r.end - r.begin for r in regions), default=0)
    aliases: dict[int, Alias] = {}
    others = [(path, t) for path, t in tensors if id(t) not in parameters]
    for region in _regions(others):
        # Only a parameter that begins less than the longest one's bytes before the tensor can reach it.
        first = bisect.bisect_left(begins, (str(region.space), region.begin - longest))
        last = bisect.bisect_left(begins, (str(region.space), region.end))
        over = next((r.name for r in regions[first:last] if r.end > region.begin and _overlap(region, r)), None)
        if over is not None:
            aliases[id(region.tensor)] = Alias(region.name, weakref.ref(region.tensor), over)
    return [aliases[id(t)] for _, t in others if id(t) in aliases]


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that modules hold outside of parameters and buffers, with the attribute that leads to each."""
    modules = dict(model.named_modules())
    registered = {id(m) for m in modules.values()}
    visited: set[int] = set()
    queue: deque[tuple[str, Any]] = deque()
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if attribute not in _REGISTERED:
                queue.append((f"{name}.{attribute}" if name else attribute, value))
    while queue and len(visited) < _MOST_OBJECTS:
        path, value = queue.popleft()
        if isinstance(value, _OPAQUE) or id(value) in visited or id(value) in registered:
            continue
        # a run's own objects hold the flat buffers under the parameters
        if type(value).__module__.partition(".")[0] == "mdcs":
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
        else:
            queue.extend((path, inner) for inner in _inside(value))


def _inside(value: Any) -> Sequence[Any]:
    """Return what an object refers to. For a function: its closure and defaults, not its module's globals."""
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)


def _regions(named: Iterable[tuple[str, Tensor]]) -> list[_Region]:
    """Return the regions of the tensors that have memory, by address; on the meta device by storage and offset."""
    out = []
    with without_torch_function():  # closed parameters would refuse these calls
        for name, tensor in named:
            try:
                storage = tensor.untyped_storage()
                if not tensor.numel() or not storage.nbytes():
                    continue
                size, span = tensor.element_size(), _span(tensor)
            except (RuntimeError, NotImplementedError):  # wrapper subclasses, tensors without strides or without memory
                continue
            if tensor.is_meta:
                space, begin = ("meta", storage._cdata), tensor.storage_offset() * size
            else:
                space, begin = (str(tensor.device), 0), tensor.data_ptr()
            out.append(_Region(space, int(begin), int(begin + span * size), name, tensor))
    return sorted(out, key=lambda r: (str(r.space), r.begin, r.end))


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last in memory, gaps included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _same(a: _Region, b: _Region) -> bool:
    """Return whether both regions are the same elements in the same places."""
    with without_torch_function():
        alike = [(r.begin, r.tensor.dtype, r.tensor.shape, r.tensor.stride()) for r in (a, b)]
    return alike[0] == alike[1]


def _overlap(a: _Region, b: _Region) -> bool:
    """Return whether two regions that intersect share an element: the left and right halves of a matrix share none."""
    with without_torch_function():
        if (
            all(_span(r.tensor) == r.tensor.numel() for r in (a, b))
            or a.tensor.element_size() != b.tensor.element_size()
        ):
            return True
        begin, size = min(a.begin, b.begin), a.tensor.element_size()
        taken = torch.zeros((max(a.end, b.end) - begin) // size, dtype=torch.bool, device="cpu")
        places = [taken.as_strided(r.tensor.shape, r.tensor.stride(), (r.begin - begin) // size) for r in (a, b)]
        places[0].fill_(True)
        return bool(places[1].any())


# ---- tensors in a value

_MOST_VISITED = 10_000  # objects looked into at most: one may refer to a whole program
_WITHOUT_TENSORS = str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType, nn.Module


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors [any shapes] in a value: in containers, and in attributes of objects of any class."""
    visited: set[int] = set()  # objects may refer to themselves
    queue = deque([value])
    while queue and len(visited) < _MOST_VISITED:
        each = queue.popleft()
        if isinstance(each, Tensor):
            yield each
        elif not isinstance(each, _WITHOUT_TENSORS) and id(each) not in visited:
            visited.add(id(each))
            if isinstance(each, dict):
                queue.extendleft(reversed(list(each.values())))
            elif isinstance(each, (list, tuple)):
                queue.extendleft(reversed(each))
            else:
                slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
                names = [*getattr(each, "__dict__", ()), *slots]
                queue.extendleft(getattr(each, name, None) for name in reversed(names))
