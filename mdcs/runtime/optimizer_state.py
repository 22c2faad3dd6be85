"""The optimizer's state: on shards while a plan runs, whole for a plain loop and for checkpoints.

A state per element is cut as its parameter is. The other state of a parameter, such as a step count, is replicated: it
is its *history*. Neighbours with one history are updated together. State of a parameter that is updated as a whole is
on the rank that owns the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.model.elementwise import StateLayout
from mdcs.model.flat_optimizer import options_of
from mdcs.model.optimizers import Updates
from mdcs.runtime.sharded_optimizer import ShardedOptimizer, UpdateRun
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.unshard import Fragment, Unsharder, copy_of, fragments

State = Mapping[Any, Mapping[str, Any]]
"""Parameter -> {key: value}."""
Started = Mapping[nn.Parameter, tuple[dict[str, Any], list[str]]]
"""Parameter -> (its replicated state, the keys of its state per element)."""
History = dict[str, Any]
"""Key of a parameter's state -> number, or None for a state per element. Empty before the first update."""


def histories(
    units: Sequence[Sequence[tuple[str, nn.Parameter]]], updates: Updates, state: State
) -> dict[tuple[int, int], History]:
    """Return histories by unit and place in the unit. Raises ValueError for a state per element of another shape."""
    by_place: dict[tuple[int, int], History] = {}
    for u, parameters in enumerate(units):
        for i, (name, p) in enumerate(parameters):
            values = {key: value for key, value in state.get(p, {}).items() if value is not None}
            if p in updates.groups and p.requires_grad and values:
                layout = updates.layout_of(p)
                for key in values.keys() - layout.replicated:
                    shape = getattr(values[key], "shape", ())
                    if shape != p.shape:
                        raise ValueError(
                            f"{name} is {tuple(p.shape)}, its {key} in the optimizer's state {tuple(shape)}"
                        )
                copies = {key: _number(values[key]) for key in values.keys() & layout.replicated}
                by_place[u, i] = {key: copies.get(key) for key in sorted(values)}
    return by_place


def _number(value: Any) -> Any:
    """Return a value to compare with: the number, or what identifies a larger tensor."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.tolist()
    flat = value.detach().double().cpu().flatten()
    return tuple(value.shape), float(flat.sum()), float(flat.dot(torch.arange(1.0, flat.numel() + 1, dtype=flat.dtype)))


class OptimizerState:
    """State on shards. ``exchange`` returns every rank's value. ``kept``: whole state of parameters frozen by now."""

    def __init__(
        self, updates: ShardedOptimizer, storages: Sequence[UnitStorage], unsharder: Unsharder,
        exchange: Callable[[Any], list[Any]],
    ) -> None:  # fmt: skip
        self._updates, self._storages, self._unsharder, self._exchange = updates, storages, unsharder, exchange
        self._groups, self.layout_of = updates.updates.groups, updates.updates.layout_of
        self._places = {p: (u, i) for u, s in enumerate(storages) for i, p in enumerate(s.parameters)}
        self.kept: dict[Any, dict[str, Any]] = {}

    # -- in

    def begin(self, state: State) -> None:
        """Allocate zeros on shards for all state per element in the whole ``state`` (tensors may be on the meta
        device), and take over the other state. Drops the state before. Raises ValueError as :func:`histories` does.
        """
        named = [list(zip(s.names, s.parameters, strict=True)) for s in self._storages]
        wanted = histories(named, self._updates.updates, state)
        trained = {p for storage in self._storages if storage.trainable for p in storage.parameters}
        frozen = [(p, values) for p, values in state.items() if p not in trained]
        self.kept = {p: {key: _made(v, p) for key, v in values.items()} for p, values in frozen}
        self._updates.make_runs()
        for u in range(len(self._storages)):
            self._prepare(u, wanted, state)
        self._updates.make_state()

    def _prepare(self, unit: int, wanted: Mapping[tuple[int, int], History], state: State) -> None:
        """Allocate zeros for a unit's state per element, and take over its other state."""
        for u, b, run in list(self._runs(unit)):
            history: History | None = None
            for place, p in self._parameters(u, b, run):
                current = wanted.get(self._places[p], {})
                if history is not None and current != history:
                    self._updates.cut((u, b), [place])
                history = current
        for u, b, run in self._runs(unit):
            group, layout = self._updates.optimizers.param_groups[run.group], self._updates.layout_of(run)
            for _, p in self._parameters(u, b, run)[:1]:
                with self._updates.meter.tag("optimizer"):
                    for key in wanted.get(self._places[p], {}):
                        if key in layout.replicated:
                            run.restore(key, self._replicated(layout, key, state[p][key], group, run.parameter))
                        else:
                            run.restore(key, torch.zeros_like(run.parameter, dtype=layout.per_element.get(key)))

    def _replicated(self, layout: StateLayout, key: str, value: Any, group: Mapping[str, Any], p: Tensor) -> Any:
        """Return a copy as torch's optimizers keep it: numbers on the host, unless a kernel reads them."""
        if key in layout.plain:
            return value.item() if isinstance(value, Tensor) else value
        is_number = not isinstance(value, Tensor) or value.dim() == 0
        device = p.device if group.get("capturable") or group.get("fused") or not is_number else "cpu"
        return torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float32).to(device, copy=True)

    def load(self, state: State) -> None:
        """Replace the state by this rank's part of whole state. Raises ValueError as :func:`histories` does."""
        self.begin(state)
        for key, fragment in self.fragments():
            fragment.load(state[fragment.parameter][key])

    def take_over(self, before: OptimizerState) -> None:
        """Take over another plan's units and their state, unit by unit; that plan loses them. Collective.

        A rank keeps what it goes on to update, and gets what it updates from now on. Of units that change the
        parameters, then one key of the state after the other, take as many bytes as if they were whole, or all at once
        where the budget has room for that. Units that need fewer bytes than before come first.
        """
        self.kept = before.kept
        pairs = [*zip(before._storages, self._storages, strict=True)]
        moves = {u for u, (old, new) in enumerate(pairs) if not new.stays_in_parts(old)}
        started = before.started(moves)
        grows = [new.bytes_at_rest - old.bytes_at_rest for old, new in pairs]
        for u in sorted(range(len(pairs)), key=grows.__getitem__):
            old, new = pairs[u]
            if u in moves:
                shared = [each.parts == old.parts > 1 and not each.strategy.in_node for each in (old, new)]
                to = new if all(shared) and (new.trainable or new.strategy.sharded) else None
                gathers = before._start_gathers(u, started, to)
                before._unsharder.unshard(u, to)
                new.take_over(old)
                self._updates.make_runs([u])
                self._take_state(u, before, started, gathers)
            else:
                new.take_over(old)
                self._updates.keep(u, before._updates)
        self._updates.make_state()

    def _start_gathers(
        self, u: int, started: Started, to: UnitStorage | None
    ) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Return (key, gather) of a unit's state, whole or in parts of ``to``; all begin now if there is room."""
        keys = sorted({key for p in self._storages[u].parameters if p in started for key in started[p][1]})
        gathers = ((key, self._unsharder.start_gather(u, self._parts(u, key), "optimizer state", to)) for key in keys)
        storage = self._storages[u]
        size = storage.layout.elements * (storage.master_dtype or storage.flat_param.dtype).itemsize
        at_once = self._unsharder.fits(2 * (len(keys) + 1) * size)  # each whole, and the parts that change hands
        return iter([*gathers]) if at_once else gathers

    def _take_state(
        self, u: int, before: OptimizerState, started: Started, gathers: Iterator[tuple[str, Callable[[], Tensor]]]
    ) -> None:
        storage = self._storages[u]
        begun = {p: started[p] for p in storage.parameters if p in started}
        state = {
            p: copies | {key: torch.empty_like(p, device="meta") for key in keys} for p, (copies, keys) in begun.items()
        }
        named = list(zip(storage.names, storage.parameters, strict=True))
        known = histories([named], self._updates.updates, state)
        self._prepare(u, {(u, i): history for (_, i), history in known.items()}, state)
        for key, gather in gathers:
            whole = gather()
            for name, fragment in self.fragments(unit=u):
                if name == key:
                    place = before._storages[u].places[before._places[fragment.parameter][1]]
                    fragment.load(place.view(whole))
        for _, _, run in before._runs(u):
            run.clear()

    # -- out

    @contextmanager
    def in_parameters(self, key: str | None) -> Iterator[None]:
        """Exchange parameters and their state ``key`` (None: nothing) in the block: what is gathered is the state.

        Then call :meth:`gather_again`. Raises ValueError for state that the optimizer does not keep per element.
        """
        if key is None:
            yield
            return
        if not any(key in self.layout_of(p).per_element for p in self._groups):
            raise ValueError(
                f"weights={key!r}: the optimizer has no such state for each weight; mdcs.WithAverage has 'average'"
            )
        pairs = [(run.parameter, run.saved[key]) for _, _, run in self._runs() if key in run.saved]
        _exchange(pairs)
        try:
            self._place_replicas()
            yield
        finally:
            _exchange(pairs)

    def gather_again(self) -> None:
        """Gather the units that are whole: the next forward relies on what the plan has gathered. Collective."""
        self._place_replicas()
        for _ in self._unsharder.one_by_one(u for u, storage in enumerate(self._storages) if storage.is_full):
            pass

    def _place_replicas(self) -> None:
        """Copy masters into the units that are not gathered."""
        for storage in self._storages:
            if storage.strategy.value == "dp":
                storage.copy_shard_into_flat()

    def fragments(
        self, within: Callable[[UnitStorage, int], slice] | None = None, unit: int | None = None
    ) -> Iterator[tuple[str, Fragment]]:
        """Yield (key, fragment) of this rank's state per element, of one ``unit`` or of all, inside of the slice of the
        flat buffer that ``within`` returns for a block.
        """
        for u, b, run in self._runs(unit):
            storage = self._storages[u]
            start = storage.owned[b].start + run.place.start
            limit = None if within is None else within(storage, b)
            layout = self._updates.layout_of(run)
            for key, value in run.saved.items():
                if key not in layout.replicated:
                    for fragment in fragments(storage, start, run.flat(value), limit):
                        yield key, fragment

    def started(self, units: Collection[int] | None = None) -> Started:
        """Return by parameter its replicated state and the keys of its state per element, of all ranks. Collective.
        ``units``: of these, None: of all. Of units that every rank updates no rank is asked.
        """
        here: list[tuple[dict[str, Any], list[str], list[tuple[int, int]]]] = []
        for u, b, run in self._runs():
            if units is not None and u not in units:
                continue
            values, layout = dict(run.saved), self._updates.layout_of(run)
            if values:
                copies = {k: copy_of(values.pop(k), cpu=True) for k in list(values) if k in layout.replicated}
                here.append((copies, sorted(values), [self._places[p] for _, p in self._parameters(u, b, run)]))
        asks = any(s.parts > 1 for u, s in enumerate(self._storages) if units is None or u in units)
        return {
            self._storages[u].parameters[i]: (copies, keys)
            for ranks in (self._exchange(here) if asks else [here])  # a rank that has padding only has no state
            for copies, keys, places in ranks
            for u, i in places
        }

    def full(
        self, *, keep: bool, cpu: bool, release: bool = False, only: Collection[Any] | None = None
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Return whole state by parameter, in the shards' precision, where ``keep``. Collective; nothing in flight.

        Gathers one state of one unit at a time. ``release``: free the shards' state of each unit then. ``only``: of
        these parameters, None: of all.
        """
        frozen = self.kept.items() if keep else ()
        state = {p: {key: copy_of(value, cpu) for key, value in values.items()} for p, values in frozen}
        started = {p: values for p, values in self.started().items() if only is None or p in only}
        for u in range(len(self._storages)):
            state |= self._whole(u, started, keep=keep, cpu=cpu)
            for _, _, run in self._runs(u) if release else ():
                run.clear()
        return state

    def _whole(self, unit: int, started: Started, *, keep: bool, cpu: bool) -> dict[nn.Parameter, dict[str, Any]]:
        """Return the whole state of a unit's parameters in ``started``, on ranks that ``keep`` it. Collective."""
        storage, state = self._storages[unit], dict[nn.Parameter, dict[str, Any]]()
        for p in storage.parameters if keep else ():
            if p in started:
                group, own = self._updates.optimizers.param_groups[self._groups[p]], started[p][0]
                state[p] = {
                    key: copy_of(value, cpu) if cpu else self._replicated(self.layout_of(p), key, value, group, p)
                    for key, value in own.items()
                }
        for key in sorted({key for p in storage.parameters for key in started.get(p, ({}, ()))[1]}):
            whole = self._unsharder.start_gather(unit, self._parts(unit, key), "optimizer state")()
            for p, place in zip(storage.parameters, storage.places, strict=True):
                if keep and key in started.get(p, ({}, ()))[1]:
                    state[p][key] = copy_of(place.view(whole), cpu)
        return state

    def _parts(self, u: int, key: str) -> dict[int, Tensor]:
        """Return this rank's part of one state of a unit, by block: flat, zeros where there is none."""
        storage = self._storages[u]
        stored, updated = self.layout_of(storage.parameters[0]).per_element.get(key), storage.master_dtype
        dtype = stored or updated or storage.flat_param.dtype
        sizes = [size // storage.parts for size in storage.blocks]
        parts = {b: torch.zeros(size, dtype=dtype, device=storage.device) for b, size in enumerate(sizes)}
        for _, b, run in self._runs(u):
            if key in run.saved and key not in self._updates.layout_of(run).replicated:
                parts[b][run.place] = run.flat(run.saved[key])
        return parts

    def _runs(self, unit: int | None = None) -> Iterator[tuple[int, int, UpdateRun]]:
        """Yield (unit, block, run) of every run of one unit, or of all."""
        for (u, b), runs in self._updates.runs.items():
            for run in runs if unit in (None, u) else ():
                yield u, b, run

    def _parameters(self, u: int, b: int, run: UpdateRun) -> list[tuple[int, nn.Parameter]]:
        """Return the parameters of a run, each with its first element in this rank's part of the block."""
        storage = self._storages[u]
        start = storage.owned[b].start
        pieces = fragments(storage, start + run.place.start, run.flat(run.parameter))
        offsets = {p: place.offset for p, place in zip(storage.parameters, storage.places, strict=True)}
        places = ((max(offsets[f.parameter] - start, run.place.start), f.parameter) for f in pieces)
        return sorted(places, key=lambda place: place[0])


def _made(value: Any, p: Tensor) -> Any:
    return torch.empty_like(value, device=p.device) if isinstance(value, Tensor) and value.is_meta else value


@torch.no_grad()
def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        if one.shape == other.shape:
            before = one.clone()
            one.copy_(other)
            other.copy_(before)


# ---- in the form of torch.optim


def for_parameters(state: State, layout_of: Callable[[Any], StateLayout]) -> dict[Tensor, dict[str, Any]]:
    """Return state for a plain loop's optimizer: in the shapes and the precision of the parameters."""
    out = {}
    for p, values in state.items():
        layout = layout_of(p)
        exact = {key for key, dtype in layout.per_element.items() if dtype is not None} | layout.replicated
        out[p] = {k: v if k in exact else v.to(p.dtype) for k, v in values.items()}
    return out


def to_state_dict(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` as it would be with this state."""
    numbers: dict[nn.Parameter, int] = {}
    groups = [
        {**group, "params": [numbers.setdefault(p, len(numbers)) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": {numbers[p]: dict(values) for p, values in state.items() if p in numbers}, "param_groups": groups}


def from_state_dict(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> State:
    """Return an ``optimizer.state_dict()``'s state by parameter. Raises ValueError for another optimizer's."""
    groups, theirs = optimizer.param_groups, saved["param_groups"]
    sizes, saved_sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in theirs]
    if sizes != saved_sizes:
        raise ValueError(f"the optimizer has groups of {sizes} parameters, the state dict of {saved_sizes}")
    parameters = {
        number: p
        for group, their in zip(groups, theirs, strict=True)
        for number, p in zip(their["params"], group["params"], strict=True)
    }
    return {parameters[number]: values for number, values in saved["state"].items()}


def load_options(groups: Sequence[dict[str, Any]], saved: Mapping[str, Any]) -> None:
    """Load learning rate and other options of parameter groups, as ``load_state_dict()`` does."""
    for group, their in zip(groups, saved["param_groups"], strict=True):
        group.update(options_of(their))
