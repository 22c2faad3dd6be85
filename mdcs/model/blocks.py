"""Find the repeated blocks of a model: the units of :func:`mdcs.partition` where no wrap policy is given."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar

from torch import nn

_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_ALIKE = 3
"""Blocks of a list are at most so many times as large as each other; members that differ more are stages of blocks."""
_PARTS = 16
"""A model without blocks is divided into about so many units."""
_TINY = 1 / 16
T = TypeVar("T")


def block_roots(model: nn.Module) -> set[str]:
    """Return the names of the repeated blocks in ``model``; none for a model of single layers.

    Blocks are modules of one class in a list (``nn.ModuleList``, ``nn.ModuleDict``, ``nn.Sequential``), or attributes
    of one class, and all others of their classes. A module without children is a layer, no block. Where members of a
    list differ much in size they are stages (of a ResNet, for example), and the blocks inside of them are taken; so are
    those inside of attributes.
    """
    kinds = {type(model.get_submodule(name)) for name in _repeated(model, "")}
    found: list[str] = []
    for name, module in model.named_modules():  # a module comes before those inside of it
        if type(module) in kinds and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return set(found)


def _repeated(model: nn.Module, prefix: str) -> set[str]:
    """Return the names of repeated blocks below ``model``."""
    alike: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for name, child in model.named_children():
        if next(child.parameters(), None) is not None:
            alike.setdefault(type(child), []).append((prefix + name, child))
    found: set[str] = set()
    for kind, members in alike.items():
        is_only = len(members) == 1 and not isinstance(model, nn.ModuleList)
        repeated = not is_only and kind not in _LISTS and all(_has_layers(m) for _, m in members)
        sizes = [sum(p.numel() for p in m.parameters()) for _, m in members]
        is_whole = repeated and isinstance(model, _LISTS) and max(sizes) <= _ALIKE * min(sizes)
        for name, module in members:
            inner = set() if is_whole else _repeated(module, f"{name}.")
            found |= inner or ({name} if repeated else set())
    return found


def _has_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def merged(
    groups: dict[tuple[str, ...], list[T]], sizes: Sequence[int], roots: Collection[str]
) -> dict[tuple[str, ...], list[T]]:
    """Return the groups (module names -> members) with small layers outside of the blocks merged with their neighbours.

    A message for a single norm costs more than it saves. Neighbours are merged while they are no larger than the
    largest block, or 1/16 of a model without blocks; a tiny layer is merged with any neighbour. Tied parameters, and
    parameters of a module that contains blocks, stay alone.

    - ``sizes``: elements of the groups.
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


def in_words(units: Sequence[tuple[str, Sequence[nn.Module]]]) -> str:
    """Return one line about units, given by name and modules: ``14 units: 12 x GPT2Block, transformer.wpe, …``."""
    kinds = [type(modules[0]).__name__ if len(modules) == 1 and _has_layers(modules[0]) else "" for _, modules in units]
    counts = Counter(kinds)
    named = zip(kinds, units, strict=True)
    parts = [f"{counts[kind]} x {kind}" if kind and counts[kind] > 1 else name for kind, (name, _) in named]
    return f"{len(units)} unit{'s' * (len(units) > 1)}: {', '.join(dict.fromkeys(parts))}"
