"""Whole units outside of the plan's messages: for passes that no plan has, state dicts, and readers of parameters.

In evaluations and side passes units are whole for any number of forward and backward passes per rank.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.model.optimizers import Updates
from mdcs.runtime.communicator import ProcessGroups
from mdcs.runtime.context import RunContext
from mdcs.runtime.initialization import broadcast, write
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.wire import Wire
from mdcs.sizes import MIB
from mdcs.torch_compat import named_range, without_autograd

_NONE = -1  # no unit's number


class Unsharder:
    """Gathers and frees units. No message of the plan may be in flight; every rank must gather the same units."""

    def __init__(self, context: RunContext, wire: Wire) -> None:
        self.storages, self.place, self._wire = wire.storages, context.place, wire
        self._kept: set[int] = set()

    def keep(self) -> set[int]:
        """Keep the sharded units that are whole now at the end of their use, until the next call. Return them."""
        self._kept = {u for u, s in enumerate(self.storages) if s.strategy.sharded and s.is_full}
        return self._kept

    def one_by_one(self, units: Iterable[int] | None = None) -> Iterator[UnitStorage]:
        """Gather each of these units (None: all) in turn, and free it before the next one."""
        self.keep()  # what the plan has gathered by now: the next forward relies on it
        for u in range(len(self.storages)) if units is None else units:
            self.unshard(u)
            yield self.storages[u]
            self.reshard(u)

    @contextmanager
    def unsharded(self, units: Iterable[int]) -> Iterator[None]:
        """Gather these units, and free them at the end, after an error too."""
        self.keep()
        with ExitStack() as ends:
            for u in units:
                ends.callback(self.reshard, u)
                self.unshard(u)
            yield

    def unshard(self, unit: int, to: UnitStorage | None = None) -> None:
        """Make the unit whole and up to date, or what this rank has of it in ``to``; open its parameters."""
        storage = self.storages[unit]
        if storage.strategy.value != "dp":
            with without_autograd():
                self._wire.gather(unit, to)
        storage.guard.open()

    def reshard(self, unit: int) -> None:
        """Free the memory that :meth:`unshard` took; close the parameters unless they are all there is of the unit."""
        storage = self.storages[unit]
        if storage.strategy.sharded and unit not in self._kept:
            storage.free()
        if not storage.is_open_between_steps:
            storage.guard.close()

    def start_gather(
        self, unit: int, blocks: dict[int, Tensor], what: str, to: UnitStorage | None = None
    ) -> Callable[[], Tensor]:
        """Begin to gather a flat tensor, or what this rank has of it in ``to``; return what waits for the tensor.

        ``blocks``: this rank's part of each block, flat [elements of the block / parts].
        """
        storage = self.storages[unit]
        whole = torch.zeros(storage.layout.elements, dtype=next(iter(blocks.values())).dtype, device=storage.device)
        for b, part in blocks.items():
            whole[storage.owned[b]] = part
        if storage.strategy.value == "dp":
            return lambda: whole
        return self._wire.start_gather(unit, whole, f"{storage.name}'s {what}", to)

    def fits(self, size: int) -> bool:
        """Return whether ``size`` bytes fit beside the reserved bytes."""
        with self._wire.lock:
            return self._wire.queue.admission.fits(size)


class Evaluation:
    """Gathers units that are sharded at rest: once if the budget has room for all of them, else for each forward.

    A unit whose memory other modules use through views is always gathered once. If units are gathered for each forward,
    a rank that has finished its batches joins the gathers of the others. No message of the plan may be in flight.
    """

    def __init__(self, context: RunContext, unsharder: Unsharder, groups: ProcessGroups) -> None:
        self._storages, self._unsharder, self._groups = unsharder.storages, unsharder, groups
        self._place = context.place
        self._slot_bytes = max(slot.peak for slot in context.ledger.slots)
        self._on_demand: set[int] = set()
        self._in_use: Counter[int] = Counter()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Have all units whole inside the block, or those that are in use (:meth:`enter`). Collective."""
        missing = sum(s.full_bytes for s in self._storages if s.strategy.sharded and not s.is_full)
        at_once = self._unsharder.fits(missing + self._slot_bytes)
        before = [u for u, s in enumerate(self._storages) if at_once or s.is_aliased or not s.strategy.sharded]
        self._on_demand = set(range(len(self._storages))) - set(before)
        with named_range("evaluation"), self._unsharder.unsharded(before):
            try:
                yield
                # Take part in the gathers of other ranks until all have finished.
                while not at_once and (unit := self._agree(_NONE)) != _NONE:
                    self._unsharder.unshard(unit)
                    self._unsharder.reshard(unit)
            finally:
                for u in +self._in_use:  # still in use: their forward raised
                    self._unsharder.reshard(u)
                self._in_use.clear()
                self._on_demand.clear()

    def enter(self, unit: int) -> None:
        """Begin a use of a unit. All ranks gather it now, if it is not whole."""
        if unit in self._on_demand:
            self._in_use[unit] += 1
            if self._in_use[unit] == 1:
                self._agree(unit)
                self._unsharder.unshard(unit)

    def leave(self, unit: int) -> None:
        """End a use of a unit."""
        if unit in self._on_demand:
            self._in_use[unit] -= 1
            if self._in_use[unit] == 0:
                self._unsharder.reshard(unit)

    def keep(self) -> list[int]:
        """Leave the sharded units that are whole to the caller, at the end of the block. Return them."""
        return sorted(self._unsharder.keep())

    def _agree(self, unit: int) -> int:
        """Return the unit that all ranks gather next; ``_NONE`` when no rank needs one."""
        with self._place.during("evaluate()"):
            wanted = {*self._groups.agree_on_call("a forward pass in evaluate()", unit)} - {(_NONE,)}
        if len(wanted) > 1:
            parts = " and ".join(self._storages[u].name for (u,) in sorted(wanted))
            raise self._place.error(
                f"ranks evaluate different parts of the model: {parts}. Run the same layers on every rank"
            )
        return wanted.pop()[0] if wanted else _NONE


# ---- state dicts and parameters, as the plain model has them


class Fragment(NamedTuple):
    """Neighbouring elements of a parameter that this rank has: ``values`` [flat] from element ``start`` in memory on,
    whose dimensions are in this ``order`` (:class:`mdcs.model.optimizers.ParameterPlace`).
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
    """Yield the fragments in ``values`` [flat], from element ``start`` of the flat buffer on, inside of ``within``."""
    stop = start + values.numel()
    first, last = (start, stop) if within is None else (max(start, within.start), min(stop, within.stop))
    for p, place in zip(storage.parameters, storage.places, strict=True):
        a, b = max(first, place.offset), min(last, place.offset + place.numel)
        if a < b:
            yield Fragment(p, a - place.offset, values[a - start : b - start], place.order)


def fragments_in_memory(storage: UnitStorage) -> Iterator[Fragment]:
    """Yield all that a load must set: fragments of the shards, and whole parameters where the unit is whole."""
    for b in range(len(storage.blocks) if storage.shard is not None else 0):
        yield from fragments(storage, storage.owned[b].start, storage.owned_shard(b))
    if storage.is_full:  # includes units that the plan has gathered for the next forward
        yield from fragments(storage, 0, storage.flat_param)


def full_state_dict(model: nn.Module, unsharder: Unsharder, *, keep: bool, cpu: bool) -> dict[str, Tensor]:
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
    unsharder: Unsharder, units: Sequence[int], *, keep: bool, cpu: bool, writeback: bool,
    group: dist.ProcessGroup | None,
) -> Iterator[None]:  # fmt: skip
    """Hold whole parameters of these ``units`` on the ranks that ``keep`` them. With ``writeback`` rank 0's changes are
    broadcast over ``group`` at the end; otherwise changes are lost.
    """
    chosen = [unsharder.storages[u] for u in units]
    target = torch.device("cpu") if cpu else unsharder.storages[0].device
    moved: list[UnitStorage] = []  # units whose parameters are copies
    try:
        for storage in unsharder.one_by_one(units):
            if keep:
                storage.move(target)
                moved.append(storage)
        for storage in chosen:
            storage.guard.open() if keep else storage.guard.close()
        yield
        for storage in chosen if writeback else ():
            storage.allocate()
            if keep:
                storage.move_back(keep_changes=True)
                moved.remove(storage)
            with without_autograd(), unsharder.place.during(f"broadcast of {storage.name}"):
                if group is not None:
                    broadcast(storage.flat_param, group)
                storage.update_shard_from_flat()
            unsharder.reshard(storage.unit)
    finally:
        for storage in moved:
            storage.allocate()  # a view of freed memory cannot be made
            storage.move_back(keep_changes=False)
            unsharder.reshard(storage.unit)
        for storage in chosen:
            storage.guard.open() if storage.is_open_between_steps else storage.guard.close()


def beyond_budget(storages: Sequence[UnitStorage], updates: Updates, room: int | None) -> str:
    """Return why the whole model, the optimizer's state and one unit more exceed ``room`` (bytes; None: no limit); ""
    if they fit.
    """
    sizes = [storage.full_bytes for storage in storages]
    trained = [p for storage in storages if storage.trainable for p in storage.parameters]
    state = sum(p.numel() * p.element_size() * updates.layout_of(p).tensors(p.element_size()) for p in trained)
    size = sum(sizes) + max(sizes) + state
    if room is None or size <= room:
        return ""
    return f"the whole model and the optimizer's state take {size / MIB:.1f} MiB of a budget of {room / MIB:.1f} MiB"


def units_of(model: nn.Module, storages: Sequence[UnitStorage], names: Sequence[str], call: str) -> list[int]:
    """Return the units that have these parameters; all for no ``names``. Raises ValueError for an unknown name."""
    known = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"{call}: no parameter is called {name!r}" + f", but {near[0]!r} is" * len(near))
    wanted = {known[name] for name in names}
    return [u for u, storage in enumerate(storages) if not names or not wanted.isdisjoint(storage.parameters)]


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
    wholes = {v: full[name] for name, v in named.items()}
    held = {p for storage in storages for p in storage.parameters}
    for v, whole in wholes.items():
        if v not in held:  # buffers, and parameters without elements, are in no unit
            write(v, whole)
    for storage in storages:
        for fragment in fragments_in_memory(storage):
            fragment.load(wholes[fragment.parameter])
