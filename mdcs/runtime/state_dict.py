"""State dicts and parameters of a sharded model, as the plain model has them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.model.optimizers import Updates
from mdcs.runtime.buffers import broadcast, write
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.unshard import Unsharder
from mdcs.sizes import MIB
from mdcs.torch_compat import without_autograd


class Fragment(NamedTuple):
    """Neighbouring elements of a parameter that this rank holds: ``values`` [flat] begin at element ``start`` in
    memory.

    ``order``: the parameter's dimensions in memory (:class:`mdcs.runtime.storage.ParameterPlace`).
    """

    parameter: nn.Parameter
    start: int
    values: Tensor
    order: tuple[int, ...]

    def load(self, whole: Tensor) -> None:
        """Set the values from a whole tensor of the parameter's shape."""
        flat = whole.permute(self.order).reshape(-1)
        self.values.copy_(flat[self.start : self.start + self.values.numel()])


def fragments(storage: UnitStorage, start: int, values: Tensor, within: slice | None = None) -> Iterator[Fragment]:
    """Yield the fragments in ``values`` [flat], which begin at element ``start`` of the flat buffer.

    Padding is left out, and so is everything outside of ``within``, a slice of that buffer.
    """
    stop = start + values.numel()
    first, last = (start, stop) if within is None else (max(start, within.start), min(stop, within.stop))
    for p, place in zip(storage.parameters, storage.places, strict=True):
        a, b = max(first, place.offset), min(last, place.offset + place.numel)
        if a < b:
            yield Fragment(p, a - place.offset, values[a - start : b - start], place.order)


def fragments_in_memory(storage: UnitStorage) -> Iterator[Fragment]:
    """Yield all that a load must set: fragments of the shards, and whole parameters where the unit is whole."""
    for b in range(len(storage.blocks) if storage.shard is not None else 0):
        yield from fragments(storage, storage.owned_slice(b).start, storage.owned_shard(b))
    if storage.is_full:  # includes units that the plan has gathered for the next forward
        yield from fragments(storage, 0, storage.flat_param)


def full_state_dict(
    model: nn.Module, storages: Sequence[UnitStorage], unsharder: Unsharder, *, keep: bool, cpu: bool
) -> dict[str, Tensor]:
    """Return the state dict [shapes of the plain model] where ``keep``, else {}. Gathers one unit at a time."""
    values: dict[nn.Parameter, Tensor] = {}
    for storage in unsharder.one_by_one():
        if keep:
            values |= {p: copy_of(p, cpu) for p in storage.parameters}
    named = model.state_dict(keep_vars=True) if keep else {}
    return {name: values[v] if v in values else copy_of(v, cpu) for name, v in named.items()}


def copy_of(value: Any, cpu: bool) -> Any:
    """Return a copy of a tensor, on its device or on the ``cpu``; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", copy=True) if cpu else value.detach().clone()


@contextmanager
def full_parameters(
    storages: Sequence[UnitStorage], unsharder: Unsharder, units: Sequence[int], *, keep: bool, cpu: bool,
    writeback: bool, group: dist.ProcessGroup | None,
) -> Iterator[None]:  # fmt: skip
    """Hold whole parameters of these ``units`` on the ranks that ``keep`` them.

    With ``writeback`` rank 0's changes are broadcast over ``group`` at the end; otherwise changes are lost.
    """
    chosen = [storages[u] for u in units]
    target = torch.device("cpu") if cpu else storages[0].device
    moved: set[int] = set()  # units whose parameters are copies
    try:
        for storage in unsharder.one_by_one(units):
            if keep:
                storage.move(target)
                moved.add(storage.unit)
        for storage in chosen:
            storage.guard.open() if keep else storage.guard.close()
        yield
        for u, storage in zip(units, chosen, strict=True) if writeback else ():
            storage.allocate()
            if keep:
                storage.move_back(keep_changes=True)
                moved.remove(u)
            with without_autograd(), unsharder.place.during(f"broadcast of {storage.name}"):
                if group is not None:
                    broadcast(storage.flat_param, group)
                storage.update_shard_from_flat()
            unsharder.reshard(u)
    finally:
        for u in moved:
            storages[u].allocate()  # a view of freed memory cannot be made
            storages[u].move_back(keep_changes=False)
            unsharder.reshard(u)
        for storage in chosen:
            storage.guard.open() if storage.is_open_between_steps else storage.guard.close()


def beyond_budget(storages: Sequence[UnitStorage], updates: Updates, room: int | None) -> str:
    """Return in words why the whole model, with the optimizer's state and one unit more, does not fit in ``room``
    (bytes); "" if it does. None: no limit.
    """
    size, trained = 0.0, [p for storage in storages if storage.trainable for p in storage.parameters]
    size += sum(storage.full_bytes for storage in storages) + max(storage.full_bytes for storage in storages)
    size += sum(p.numel() * p.element_size() * updates.layout_of(p).tensors(p.element_size()) for p in trained)
    if room is None or size <= room:
        return ""
    return f"the whole model and the optimizer's state take {size / MIB:.1f} MiB of a budget of {room / MIB:.1f} MiB"


def units_of(model: nn.Module, storages: Sequence[UnitStorage], names: Sequence[str], call: str) -> list[int]:
    """Return the units that have these parameters; all for no ``names``. Raises ValueError for an unknown name."""
    if not names:
        return list(range(len(storages)))
    known = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"{call}: no parameter is called {name!r}" + f", but {near[0]!r} is" * len(near))
    wanted = {known[name] for name in names}
    return [u for u, storage in enumerate(storages) if not wanted.isdisjoint(storage.parameters)]


@torch.no_grad()
def load_full_state_dict(model: nn.Module, storages: Sequence[UnitStorage], full: dict[str, Tensor]) -> None:
    """Load a plain model's state dict. Raises KeyError for a missing or unknown name, ValueError for a shape."""
    named = model.state_dict(keep_vars=True)
    if unknown := [name for name in full if name not in named]:
        raise KeyError(
            f"the model has no {', '.join(unknown[:3])}{', …' * (len(unknown) > 3)}: leave it out of the state dict"
        )
    for name, v in named.items():
        if name not in full:
            raise KeyError(f"state dict has no {name}")
        if v.shape != full[name].shape:
            raise ValueError(f"{name} is {tuple(v.shape)}, the state dict has {tuple(full[name].shape)}")
    held = {p for storage in storages for p in storage.parameters}
    for name, v in named.items():
        if v not in held:  # buffers, and parameters without elements, are in no unit
            write(v, full[name])
    wholes = {v: full[name] for name, v in named.items() if v in held}
    for storage in storages:
        for fragment in fragments_in_memory(storage):
            fragment.load(wholes[fragment.parameter])
