"""State dicts of a sharded model: whole, for the plain model, or one part per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.runtime.buffers import write
from mdcs.runtime.gathering import Gathering
from mdcs.runtime.storage import UnitStorage

SCHEMA = 2


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


def sharded_state(model: nn.Module, storages: list[UnitStorage]) -> dict[str, Any]:
    """Return this rank's part: plain tensors and numbers only, for ``torch.save`` and ``weights_only`` loading."""
    owners: dict[nn.Parameter, list[int]] = {}  # [section, place in it]
    sections: list[dict[str, Any]] = []
    for storage in storages:
        for s in range(len(storage.fulls)):
            inside = [i for i, place in enumerate(storage.places) if place[0] == s]
            blocks = [b for b, section in enumerate(storage.sections) if section == s]
            owners |= {storage.parameters[i]: [len(sections), k] for k, i in enumerate(inside)}
            sections.append(
                {
                    "blocks": [storage.blocks[b] for b in blocks],
                    "ranks": storage.parts,
                    "places": [[offset, n, *shape] for _, offset, n, shape in (storage.places[i] for i in inside)],
                    "parts": [storage.at_rest(b).detach().clone() for b in blocks],
                }
            )
    named = model.state_dict(keep_vars=True)
    first = storages[0]
    return {
        "schema": SCHEMA,
        "rank": first.rank,
        "world": first.plan.world,
        "names": {name: owners[v] for name, v in named.items() if v in owners},
        "buffers": {name: v.detach().clone() for name, v in named.items() if v not in owners},
        "sections": sections,
    }


def merge_shards(parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the plain model's state dict from all ranks' :meth:`Parallel.sharded_state_dict`, in any order.

    Raises ValueError when a rank is missing or the parts are of different jobs.
    """
    ranks = {p["rank"]: p for p in parts}
    world = parts[0]["world"] if parts else 0
    if not parts:
        raise ValueError("need the parts of all ranks of a job, got none")
    if sorted(ranks) != list(range(world)) or any(p["world"] != world or p["schema"] != SCHEMA for p in parts):
        raise ValueError(f"need the parts of ranks 0 to {world - 1} of one job, got {sorted(ranks)}")
    first = ranks[0]
    flats = []
    for s, section in enumerate(first["sections"]):
        blocks = []
        for b in range(len(section["blocks"])):
            among = section.get("ranks", 1 if section.get("replicated") else world)  # parts of older versions have no "ranks"
            blocks.append(torch.cat([ranks[r]["sections"][s]["parts"][b] for r in range(among)]))
        flats.append(torch.cat(blocks))
    out = dict(first["buffers"])
    for name, (s, i) in first["names"].items():
        offset, n, *shape = first["sections"][s]["places"][i]
        out[name] = flats[s][offset : offset + n].view(shape).clone()
    return out


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
