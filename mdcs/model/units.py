"""Units of a live model: sets of parameters that are sharded, gathered, reduced and updated together.

A wrap policy names the modules that become units. Parameters outside of them form one unit per module that owns
parameters directly. Parameters shared between modules (tied weights) form a unit of their own, whose uses are the
forwards of all owners. A unit has one type, and is trainable or frozen: what differs is another unit around the same
modules. So is what another optimizer has (:func:`mdcs.model.optimizers.by_optimizer`).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mdcs.model.guard import Alias, buffer_over_parameter, folded_parameter, shared_parameters

_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_ALIKE = 3
"""Blocks of a list are at most so many times as large as each other; members that differ more are stages of blocks."""
_PARTS = 16
"""A model without blocks is divided into about so many units."""
_TINY = 1 / 16
T = TypeVar("T")


class UnsupportedModel(ValueError):
    """A model that mdcs refuses: the message names the parameter or module."""


@dataclass(frozen=True, eq=False)
class ModelUnit:
    """A unit of a live model: (name, parameter) pairs of one type on one device, all trainable or all frozen, and the
    modules whose forward uses them.

    Units around the same modules are told apart in brackets: ``blocks.3``, ``blocks.3[float32]``, ``blocks.3[frozen]``.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements of all its parameters, without padding."""
        return sum(p.numel() for _, p in self.parameters)


class WrapPolicy(Protocol):
    """Chooses the modules that become units."""
    def roots(self, model: nn.Module) -> set[str]:
        """Return the names of these modules; where they nest, the innermost owns its parameters."""


@dataclass(frozen=True)
class ByClass:
    """Every instance of a block class, by class name (``GPT2Block``, ``BertLayer`` …)."""

    classes: tuple[str, ...]

    def roots(self, model: nn.Module) -> set[str]:
        """Return the names of the instances in ``model``. Raises UnsupportedModel if there is none."""
        names = {name for name, m in model.named_modules() if type(m).__name__ in self.classes}
        if not names:
            there = sorted({type(m).__name__ for m in model.modules() if next(m.children(), None) is not None})
            raise UnsupportedModel(
                f"no module of class {' or '.join(self.classes)} in {type(model).__name__}, which has "
                f"{', '.join(there)}: name one of these, or give partition() no policy"
            )
        return names


@dataclass(frozen=True)
class BySize:
    """fairscale's auto_wrap: the smallest modules with at least ``min_params`` parameters not yet wrapped."""

    min_params: int = 1_000_000

    def __post_init__(self) -> None:
        if importlib.util.find_spec("fairscale") is None:
            raise ModuleNotFoundError("mdcs.BySize needs fairscale: pip install 'mdcs[wrap]'", name="fairscale")

    def roots(self, model: nn.Module) -> set[str]:
        """Return the names of the modules that auto_wrap would wrap; the model stays as it is."""
        from fairscale.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap

        wrapped: set[nn.Module] = set()

        class Wrapper:
            def __new__(cls, module: nn.Module, **_: object) -> nn.Module:  # type: ignore[misc]  # wraps nothing
                wrapped.add(module)
                return module

        policy = functools.partial(default_auto_wrap_policy, min_num_params=self.min_params)
        with enable_wrap(auto_wrap_policy=policy, wrapper_cls=Wrapper):
            auto_wrap(model)
        return {name for name, module in model.named_modules() if module in wrapped}


@dataclass(frozen=True)
class ByLeaf:
    """Every module that owns parameters directly."""

    def roots(self, model: nn.Module) -> set[str]:
        """Return no names: every module that no root contains becomes a unit of its own."""
        return set()


def partition(model: nn.Module, policy: WrapPolicy | None = None) -> list[ModelUnit]:
    """Return the units, in the order in which the model registers their first module.

    ``policy`` chooses the modules that become units. None: repeated blocks (:func:`block_roots`), and layers outside of
    them merged with their neighbours while they are smaller than a block.

    Every parameter with elements is in one unit. Raises UnsupportedModel for a parameter that no unit can hold (not
    floating-point, not strided, with sparse gradients), a unit on several devices, parameters and buffers that share
    memory, and a model without a trainable parameter.
    """
    roots = block_roots(model) if policy is None else policy.roots(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}  # parameter -> (module name, parameter name)
    for module_name, module in modules.items():
        for local, p in module._parameters.items():
            if p is not None:
                path = f"{module_name}.{local}" if module_name else local
                owners.setdefault(p, []).append((_caller_of(module_name, modules), path))

    owners = {p: places for p, places in owners.items() if nn.parameter.is_lazy(p) or p.numel()}
    for p, places in owners.items():
        _refuse(places[0][1], p)
    refuse_shared_memory(model)
    groups: dict[tuple[str, ...], list[tuple[str, nn.Parameter]]] = {}
    for p, places in owners.items():
        distinct = {id(modules[m]): m for m, _ in reversed(places)}  # one module under two names is no tie
        if len(distinct) > 1:
            key = tuple(sorted(distinct.values(), key=list(modules).index))
        else:
            key = (_root_of(places[0][0], roots),)
        groups.setdefault(key, []).append((places[0][1], p))
    if policy is None:
        groups = merged(groups, [sum(p.numel() for _, p in members) for members in groups.values()], roots)

    units = []
    for key, members in groups.items():
        name, around = "+".join(m or "model" for m in key), tuple(modules[m] for m in key)
        alike: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        for n, p in members:
            alike.setdefault((not p.requires_grad, p.dtype), []).append((n, p))
        # First the one that has the module's plain name: trainable, and the most elements.
        order = sorted(alike, key=lambda kind: (kind[0], -sum(p.numel() for _, p in alike[kind])))
        for frozen, dtype in order:
            devices = {p.device for _, p in alike[frozen, dtype]}
            if len(devices) > 1:
                raise UnsupportedModel(
                    f"unit {name} is on several devices, {sorted(map(str, devices))}: move it to one, or make units of "
                    "smaller modules, mdcs.partition(model, mdcs.ByClass((…)))"
                )
            marks = [dtype_name(dtype)] * (dtype != order[0][1]) + ["frozen"] * (frozen != order[0][0])
            units.append(ModelUnit(name + marked(marks), around, tuple(alike[frozen, dtype]), not frozen))
    for name, module in modules.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            what = "sparse gradients are not supported: make the layer with sparse=False"
            raise UnsupportedModel(f"{name}.weight: {what}")
    if not any(u.trainable for u in units):
        raise UnsupportedModel("the model has no trainable parameter: requires_grad_() those that the optimizer has")
    return units


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a type in torch, as in ``bfloat16``; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def marked(marks: Iterable[str]) -> str:
    """Return the end of a unit's name that tells it from others around the same modules: ``[float32, frozen]``."""
    text = ", ".join(marks)
    return f"[{text}]" if text else ""


def _root_of(module: str, roots: Iterable[str]) -> str:
    """Return the innermost unit root that contains the module, or the module itself."""
    parts = module.split(".") if module else []
    around = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    return next((name for name in around if name in roots), module)


def _caller_of(module: str, modules: dict[str, nn.Module]) -> str:
    """Return the module whose forward uses the parameters of ``module``: itself, or the one around lists of them."""
    lists = nn.ParameterList, nn.ParameterDict
    if isinstance(modules[module], lists):
        while module and isinstance(modules[module], (*lists, nn.ModuleList, nn.ModuleDict)):
            module = module.rpartition(".")[0]
    return module


def _refuse(name: str, p: nn.Parameter) -> None:
    if nn.parameter.is_lazy(p):
        raise UnsupportedModel(f"{name}: is not initialised yet: run a forward pass of the plain model first")
    kind: Any = p
    if is_traceable_wrapper_subclass(kind):
        raise UnsupportedModel(
            f"{name}: is already sharded (FSDP2 or tensor parallel) or quantized ({type(p).__name__}): remove "
            "fully_shard() or the quantization, mdcs shards the model"
        )
    if not p.is_floating_point():
        raise UnsupportedModel(
            f"{name}: {p.dtype} parameters are not supported: register_buffer() keeps what is not trained"
        )
    if p.layout is not torch.strided:
        raise UnsupportedModel(f"{name}: {p.layout} parameters are not supported: make it dense, .to_dense()")


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise UnsupportedModel if two parameters, or a buffer and a parameter, share memory: a run moves each alone."""
    if (folded := folded_parameter(model)) is not None:
        raise UnsupportedModel(
            f"{folded}: several of its elements are the same memory (expand()), which no optimizer can update: "
            f"model.{folded} = nn.Parameter(model.{folded}.detach().clone(memory_format=torch.contiguous_format))"
        )
    if (pair := shared_parameters(model)) is not None:
        name, other, is_whole = pair
        remedy = (
            f"make them one before the optimizer is made: model.{name} = model.{other}" if is_whole else
            "make one parameter of both, and slice it in forward, or give each its own memory (clone())"
        )  # fmt: skip
        raise UnsupportedModel(
            f"{name}: is another parameter than {other} and shares {'its' if is_whole else 'a part of its'} memory, "
            f"so they would be trained as two: {remedy}"
        )
    if (buffer := buffer_over_parameter(model)) is not None:
        raise alias_refused(buffer, "buffer ")


def alias_refused(alias: Alias, what: str = "") -> UnsupportedModel:
    """Return the error for a tensor over a parameter's memory: a run moves the parameter, and not the tensor."""
    return UnsupportedModel(
        f"{what}{alias.path}: shares memory with the parameter {alias.parameter}, which has other memory while a plan "
        "runs: use the parameter itself in forward, or keep a copy (clone())"
    )


# ---- repeated blocks: the units where no wrap policy is given


def block_roots(model: nn.Module) -> set[str]:
    """Return the names of the repeated blocks in ``model``; none for a model of single layers.

    Blocks are modules of one class in a list (``nn.ModuleList``, ``nn.ModuleDict``, ``nn.Sequential``), or attributes
    of one class, and all others of their classes. A module without children is a layer, no block. Where members of a
    list differ much in size they are stages, and the blocks inside are taken; so are those inside of attributes.
    """
    kinds = {type(model.get_submodule(name)) for name in _repeated(model, "")}
    roots: list[str] = []
    for name, module in model.named_modules():  # a module comes before those inside of it
        if type(module) in kinds and not any(name.startswith(f"{outer}.") for outer in roots):
            roots.append(name)
    return set(roots)


def _repeated(model: nn.Module, prefix: str) -> set[str]:
    alike: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for name, child in model.named_children():
        if next(child.parameters(), None) is not None:
            alike.setdefault(type(child), []).append((prefix + name, child))
    names: set[str] = set()
    for kind, members in alike.items():
        is_only = len(members) == 1 and not isinstance(model, nn.ModuleList)
        repeated = not is_only and kind not in _LISTS and all(_has_layers(m) for _, m in members)
        sizes = [sum(p.numel() for p in m.parameters()) for _, m in members]
        is_whole = repeated and isinstance(model, _LISTS) and max(sizes) <= _ALIKE * min(sizes)
        for name, module in members:
            inner = set() if is_whole else _repeated(module, f"{name}.")
            names |= inner or ({name} if repeated else set())
    return names


def _has_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def merged(
    groups: dict[tuple[str, ...], list[T]], sizes: Sequence[int], roots: Collection[str]
) -> dict[tuple[str, ...], list[T]]:
    """Return the groups (module names -> members) with small layers outside of the blocks merged with their neighbours:
    a message for a single norm costs more than it saves. ``sizes``: elements of the groups.

    Neighbours are merged while they are no larger than the largest block, or 1/16 of a model without blocks; a tiny
    layer is merged with any neighbour. Tied parameters, and parameters of a module that contains blocks, stay alone.
    """
    limit = max((n for key, n in zip(groups, sizes, strict=True) if key[0] in roots), default=sum(sizes) / _PARTS)
    out: list[tuple[tuple[str, ...], list[T], float]] = []  # with the elements; infinite: stays alone
    for (key, members), size in zip(groups.items(), sizes, strict=True):
        is_layer = len(key) == 1 and key[0] not in ("", *roots) and not any(r.startswith(f"{key[0]}.") for r in roots)
        before, earlier, elements = out[-1] if out else ((), [], math.inf)
        is_tiny = elements < math.inf and min(size, elements) <= _TINY * limit
        if is_layer and (elements + size <= limit or is_tiny):
            out[-1] = before + key, earlier + members, elements + size
        else:
            out.append((key, members, size if is_layer else math.inf))
    return {key: members for key, members, _ in out}


def describe_units(units: Sequence[tuple[str, Sequence[nn.Module]]]) -> str:
    """Return one line about units, given by name and modules: ``14 units: 12 x GPT2Block, transformer.wpe, …``."""
    kinds = [type(modules[0]).__name__ if len(modules) == 1 and _has_layers(modules[0]) else "" for _, modules in units]
    counts = Counter(kinds)
    named = zip(kinds, units, strict=True)
    parts = [f"{counts[kind]} x {kind}" if kind and counts[kind] > 1 else name for kind, (name, _) in named]
    return f"{len(units)} unit{'s' * (len(units) > 1)}: {', '.join(dict.fromkeys(parts))}"
