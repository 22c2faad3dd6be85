"""Memory of parameters: guards of those whose values are not in memory, and tensors that share memory with them.

While the values of a parameter are not in memory, a read or a change of it raises. A closed parameter is the same
object with another class, whose ``__torch_function__`` sees every use from Python. An open parameter therefore costs
nothing, autograd's own work is never intercepted, and opening or closing takes 0.1 µs.

A run gives parameters memory of their own. A second parameter, a buffer or an attribute over the same memory would
silently keep the first values. Overlaps are found by address, not by type.
"""

from __future__ import annotations

import bisect
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mdcs.torch_compat import tree_leaves, without_torch_function

GRADIENT, THAW = ".grad", "requires_grad_"

Refuse = Callable[[str, str], Exception | None]
"""(parameter's name, use) -> exception to raise, or None to allow this: a torch function's name, GRADIENT or THAW."""

_ASSIGNMENTS = ("__setitem__", ".data =")


def changes(use: str) -> bool:
    """Return whether a use writes to a parameter: an operation in place (``mul_``), or an assignment."""
    return use.endswith("_") and not use.endswith("__") or use in _ASSIGNMENTS


def only_reads(use: str) -> bool:
    """Return whether a use computes with a parameter, and neither changes nor copies the parameter itself."""
    return not (changes(use) or use in (GRADIENT, THAW, "deepcopy", "pickle"))


_TENSOR: Any = Tensor  # typed Any: its attributes are descriptors, and its annotations do not say so
_HARMLESS = {
    *(getattr(_TENSOR, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_mps", "is_xpu",
        "names", "retains_grad", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
    ) if hasattr(_TENSOR, name)),
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
    """Base class of closed parameters, mixed with the parameter's own class. ``guard``: that of all of them, weak: a
    class is garbage that is collected late, and must not keep parameters alive until then.
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
    if (error := guard.refuse(guard.name_of(parameter), what)) is not None:
        raise error


class Guard:
    """Opens and closes ``parameters`` together; they start open. ``refuse`` chooses the error of a use while closed."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], refuse: Refuse) -> None:
        self.refuse, self.is_open = refuse, True
        members = {"guard": weakref.ref(self)}
        kinds = {type(p) for _, p in parameters}
        closed = {kind: type(f"Closed{kind.__name__}", (GuardedParameter, kind), members) for kind in kinds}
        self._parameters = [(name, p, type(p), closed[type(p)]) for name, p in parameters]

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


def leave_meta(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter these values [its shape] on their device. It stays the same object, with its attributes."""
    real = nn.Parameter(values.new_empty(0), parameter.requires_grad)
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)
    parameter.data = values


# ---- memory under two names, of which a plan can move only one

_MOST_OBJECTS = 100_000  # objects visited at most: a module may hold a data set
_LEAVES = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType,
    types.FrameType,
)  # fmt: skip
_REGISTERED = {"_parameters", "_buffers", "_modules"}


class Alias(NamedTuple):
    """A tensor (weak) that the model holds at ``path``, and the name of the parameter whose memory it shares."""

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

    @property
    def place(self) -> Any:
        """Its elements: equal where they are the same ones."""
        return self.begin, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


def shared_parameters(model: nn.Module) -> tuple[str, str, bool] | None:
    """Return the names of two parameters that share memory (the later first), and whether they share all, or None."""
    active: list[_Region] = []
    pairs: list[tuple[str, str, bool]] = []
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    for region in _regions(model.named_parameters()):
        active = [other for other in active if other.space == region.space and other.end > region.begin]
        for other in active:
            if _overlap(region, other):
                first, later = sorted((region, other), key=lambda r: order[r.name])
                pairs.append((later.name, first.name, first.place == later.place))
        active.append(region)
    return min(pairs, key=lambda pair: order[pair[0]], default=None)


def folded_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter several elements of which are the same memory (``expand`` makes such); or None."""
    return next((r.name for r in _regions(model.named_parameters()) if r.tensor.nbytes > r.end - r.begin), None)


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
        if isinstance(value, _LEAVES) or id(value) in visited or id(value) in registered:
            continue
        # a run's own objects hold the flat buffers under the parameters
        if type(value).__module__.partition(".")[0] == "mdcs":
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, types.FunctionType):  # not its module's globals
            inside = value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__
            queue.extend((path, inner) for inner in inside)
        else:
            queue.extend((path, inner) for inner in gc.get_referents(value))


def _regions(named: Iterable[tuple[str, Tensor]]) -> list[_Region]:
    """Return the regions of the tensors that have memory, by address; on the meta device by storage and offset."""
    out = []
    with without_torch_function():  # closed parameters would refuse these calls
        for name, tensor in named:
            try:
                storage = tensor.untyped_storage()
                if not tensor.numel() or not storage.nbytes():
                    continue
                size, sides = tensor.element_size(), zip(tensor.shape, tensor.stride(), strict=True)
                span = 1 + sum((n - 1) * stride for n, stride in sides)  # elements from first to last, gaps included
            except (RuntimeError, NotImplementedError):  # wrapper subclasses, tensors without strides or without memory
                continue
            if tensor.is_meta:
                space, begin = ("meta", storage._cdata), tensor.storage_offset() * size
            else:
                space, begin = (str(tensor.device), 0), tensor.data_ptr()
            out.append(_Region(space, int(begin), int(begin + span * size), name, tensor))
    return sorted(out, key=lambda r: (str(r.space), r.begin, r.end))


def _overlap(a: _Region, b: _Region) -> bool:
    """Return whether two regions that intersect share an element: the left and right halves of a matrix share none."""
    with without_torch_function():
        sizes = {r.tensor.element_size() for r in (a, b)}
        if len(sizes) > 1 or all(r.tensor.nbytes == r.end - r.begin for r in (a, b)):
            return True
        begin, size = min(a.begin, b.begin), sizes.pop()
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
