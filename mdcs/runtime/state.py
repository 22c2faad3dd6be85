"""State dicts and parameters of a sharded model, as the plain model has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mdcs.runtime.buffers import write
from mdcs.runtime.gathering import Gathering
from mdcs.runtime.storage import UnitStorage


def _owners(storages: list[UnitStorage]) -> dict[nn.Parameter, tuple[int, int]]:
    return {p: (u, i) for u, s in enumerate(storages) for i, p in enumerate(s.parameters)}


def full_state(
    model: nn.Module, storages: list[UnitStorage], gathering: Gathering, *, keep: bool, cpu: bool
) -> dict[str, Tensor]:
    """Return the whole state dict on ranks that ``keep`` it, else {}. Gathers one unit at a time."""
    values: dict[nn.Parameter, Tensor] = {}
    gathering.begin()
    for u, storage in enumerate(storages):
        gathering.gather(u)
        if keep:
            values |= {p: _copy(p, cpu) for p in storage.parameters}
        gathering.free(u)
    named = model.state_dict(keep_vars=True) if keep else {}
    return {name: values[v] if v in values else _copy(v, cpu) for name, v in named.items()}


def _copy(tensor: Tensor, cpu: bool) -> Tensor:
    return tensor.detach().to("cpu", copy=True) if cpu else tensor.detach().clone()


@contextmanager
def full_parameters(
    storages: list[UnitStorage], gathering: Gathering, *, keep: bool, cpu: bool, writeback: Callable[[UnitStorage], None] | None
) -> Iterator[None]:
    """Hold whole parameters on the ranks that ``keep`` them. Without ``writeback`` changes are lost."""
    gathering.begin()
    device = storages[0].device
    target = torch.device("cpu") if cpu else device
    moved: set[int] = set()  # units whose parameters are copies
    try:
        for u, storage in enumerate(storages):
            gathering.gather(u)
            if keep and (target != device or not gathering.is_transient(u)):
                storage.move(target)
                moved.add(u)
            if not keep or target != device:
                gathering.free(u)
            storage.guard.open() if keep else storage.guard.close()
        yield
        for u, storage in enumerate(storages) if writeback else ():
            assert writeback is not None
            gathering.allocate(u)
            if u in moved:
                storage.move_back(keep_changes=True)
                moved.remove(u)
            writeback(storage)
            gathering.free(u)
    finally:
        for u, storage in enumerate(storages):
            if u in moved:
                storage.move_back(keep_changes=False)
            if storage.is_full:
                gathering.free(u)
            storage.guard.open() if storage.is_plain else storage.guard.close()


def load_full(model: nn.Module, storages: list[UnitStorage], full: dict[str, Tensor]) -> None:
    """Load a plain model's state dict. Raises KeyError for a missing name, ValueError for a shape that differs."""
    owners = _owners(storages)
    named = model.state_dict(keep_vars=True)
    missing = [name for name in named if name not in full]
    if missing:
        raise KeyError(f"state dict has no {missing[0]}")
    by_unit: dict[int, list[tuple[int, str]]] = {}
    for name, v in named.items():
        if v.shape != full[name].shape:
            raise ValueError(f"{name} is {tuple(v.shape)}, the state dict has {tuple(full[name].shape)}")
        if v in owners:
            u, i = owners[v]
            by_unit.setdefault(u, []).append((i, name))
        else:
            with torch.no_grad():  # buffers, and parameters without elements, are in no unit
                write(v, full[name])
    for u, members in by_unit.items():
        storage = storages[u]
        was_full = storage.is_full
        if not was_full:
            storage.allocate_full()
        with torch.no_grad():
            # Not through the parameters: masters may be more precise.
            wholes = [f if m is None else f.to(m.dtype) for f, m in zip(storage.fulls, storage.shards, strict=True)]
            storage.zero_padding(wholes)
            for i, name in members:
                section, offset, n, shape = storage.places[i]
                wholes[section][offset : offset + n].view(shape).copy_(full[name])
            storage.reshard(wholes)
            for whole, flat in zip(wholes, storage.fulls, strict=True):
                if whole is not flat:
                    flat.copy_(whole)
        if not was_full:
            storage.free_full()
