"""The optimizer's state: on shards while a plan runs, whole for a plain loop and for checkpoints.

A state per element is cut as its parameter is. The other state of a parameter, such as a step count, is replicated: it
is its *history*. Neighbours with one history are updated together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.model.elementwise import StateLayout
from mdcs.model.optimizers import parameter_groups
from mdcs.runtime.sharded_optimizer import ShardedOptimizer, UpdateRun
from mdcs.runtime.state_dict import Fragment, fragments
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.unshard import Unsharder

State = Mapping[Any, Mapping[str, Any]]
"""Parameter -> {key: value}."""
History = dict[str, Any]
"""Key of a parameter's state -> number, or None for a state per element. Empty before the first update."""


def histories(
    units: Sequence[Sequence[tuple[str, nn.Parameter]]], groups: Mapping[nn.Parameter, int], state: State, layout: StateLayout
) -> dict[tuple[int, int], History]:
    """Return the history of each parameter that has state, by unit and place in the unit.

    Raises ValueError where the shape of a state per element is not its parameter's.
    """
    found: dict[tuple[int, int], History] = {}
    for u, parameters in enumerate(units):
        for i, (name, p) in enumerate(parameters):
            own = {key: value for key, value in state.get(p, {}).items() if value is not None}
            if p in groups and p.requires_grad and own:
                for key in own.keys() - layout.replicated:
                    shape = getattr(own[key], "shape", ())
                    if shape != p.shape:
                        raise ValueError(f"{name} is {tuple(p.shape)}, its {key} in the optimizer's state {tuple(shape)}")
                found[u, i] = {key: _number(own[key]) if key in layout.replicated else None for key in sorted(own)}
    return found


def _number(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


class OptimizerState:
    """State on shards. ``exchange`` returns every rank's value (:meth:`mdcs.runtime.process_groups.ProcessGroups.exchange`).

    ``kept``: whole state of parameters that are frozen now.
    """

    def __init__(
        self,
        updates: ShardedOptimizer,
        storages: Sequence[UnitStorage],
        unsharder: Unsharder,
        exchange: Callable[[Any], list[Any]],
    ) -> None:
        self._updates, self._storages, self._unsharder, self._exchange = updates, storages, unsharder, exchange
        self._groups = parameter_groups(updates.optimizer)
        self._places = {p: (u, i) for u, s in enumerate(storages) for i, p in enumerate(s.parameters)}
        self.layout = updates.layout
        self.kept: dict[Any, dict[str, Any]] = {}

    # -- in

    def begin(self, state: State) -> None:
        """Allocate zeros on shards for all state per element in the whole ``state``, and take over the other state.

        Tensors of state per element may be on the meta device. The state before is dropped. Raises ValueError as
        :func:`histories` does.
        """
        named = [list(zip(s.names, s.parameters, strict=True)) for s in self._storages]
        wanted = histories(named, self._groups, state, self.layout)
        trained = {p for storage in self._storages if storage.trainable for p in storage.parameters}
        self.kept = {p: {key: _made(v, p) for key, v in own.items()} for p, own in state.items() if p not in trained}
        self._updates.forget()
        for u, b, run in list(self._runs()):
            history: History | None = None
            for place, p in self._parameters(u, b, run):
                own = wanted.get(self._places[p], {})
                if history is not None and own != history:
                    self._updates.cut((u, b), [place])
                history = own
        for u, b, run in self._runs():
            group = self._updates.optimizer.param_groups[run.group]
            for _, p in self._parameters(u, b, run)[:1]:
                with self._updates.meter.tag("optimizer"):
                    for key in wanted.get(self._places[p], {}):
                        run.restore(key, self._value(key, state[p][key], group, run.parameter))
        self._updates.make_state()

    def _value(self, key: str, value: Any, group: Mapping[str, Any], p: Tensor) -> Any:
        """Return a run's value of a key: zeros of state per element, else a copy."""
        if key in self.layout.replicated:
            return self._replicated(key, value, group, p)
        return torch.zeros_like(p, dtype=self.layout.per_element.get(key))

    def _replicated(self, key: str, value: Any, group: Mapping[str, Any], p: Tensor) -> Any:
        """Return a copy as torch's optimizers keep it: on the host, unless a kernel reads it."""
        if key in self.layout.plain:
            return value.item() if isinstance(value, Tensor) else value
        device = p.device if group.get("capturable") or group.get("fused") else "cpu"
        return torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float32).to(device, copy=True)

    def load(self, state: State) -> None:
        """Load this rank's part of whole state; replaces the state before. Raises ValueError as :func:`histories` does."""
        self.begin(state)
        for key, fragment in self.fragments():
            fragment.load(state[fragment.parameter][key])

    # -- out

    def fragments(
        self, within: Callable[[UnitStorage, int], slice] | None = None
    ) -> Iterator[tuple[str, Fragment]]:
        """Yield (key, fragment) of this rank's state per element.

        ``within``: (unit, block) -> the slice of the section's flat buffer outside of which fragments are left out.
        """
        for u, b, run in self._runs():
            storage = self._storages[u]
            start, limit = storage.owned_slice(b).start + run.place.start, None if within is None else within(storage, b)
            for key, value in run.saved.items():
                if key not in self.layout.replicated:
                    for fragment in fragments(storage, storage.sections[b], start, value, limit):
                        yield key, fragment

    def started(self) -> dict[nn.Parameter, tuple[dict[str, Any], list[str]]]:
        """Return by parameter its replicated state and the keys of its state per element, of all ranks. Collective."""
        here: list[tuple[dict[str, Any], list[str], list[tuple[int, int]]]] = []
        for u, b, run in self._runs():
            own = dict(run.saved)
            if own:
                copies = {k: _copy(own.pop(k), cpu=True) for k in list(own) if k in self.layout.replicated}
                here.append((copies, sorted(own), [self._places[p] for _, p in self._parameters(u, b, run)]))
        return {
            self._storages[u].parameters[i]: (copies, keys)
            for ranks in self._exchange(here)  # a rank that has padding only has no state
            for copies, keys, places in ranks
            for u, i in places
        }

    def full(self, *, keep: bool, cpu: bool, release: bool = False) -> dict[nn.Parameter, dict[str, Any]]:
        """Return whole state by parameter, in the shards' precision, on ranks that ``keep`` it. Collective; nothing in
        flight.

        Gathers one state of one unit at a time. ``release``: free the shards' state of each unit once gathered.
        """
        found = {p: {key: _copy(value, cpu) for key, value in own.items()} for p, own in self.kept.items()} if keep else {}
        started = self.started()
        for u, storage in enumerate(self._storages):
            for p in storage.parameters if keep else ():
                if p in started:
                    group, own = self._updates.optimizer.param_groups[self._groups[p]], started[p][0]
                    found[p] = {
                        key: _copy(value, cpu) if cpu else self._replicated(key, value, group, p) for key, value in own.items()
                    }
            for key in sorted({key for p in storage.parameters for key in started.get(p, ({}, ()))[1]}):
                values = self._unsharder.gather_by_parameter(u, self._parts(u, key), "optimizer state")
                for name, p in zip(storage.names, storage.parameters, strict=True):
                    if keep and key in started.get(p, ({}, ()))[1]:
                        found[p][key] = values[name].cpu() if cpu else values[name]
            for _, _, run in self._runs(u) if release else ():
                run.clear()
        return found

    def _parts(self, u: int, key: str) -> dict[int, Tensor]:
        """Return this rank's part of one state of a unit, by block: flat, zeros where there is none."""
        storage, dtype = self._storages[u], self.layout.per_element.get(key)
        parts = {b: torch.zeros_like(storage.owned_shard(b), dtype=dtype) for b in range(len(storage.blocks))}
        for _, b, run in self._runs(u):
            if key in run.saved:
                parts[b][run.place] = run.saved[key]
        return parts

    def _runs(self, unit: int | None = None) -> Iterator[tuple[int, int, UpdateRun]]:
        """Yield (unit, block, run) of every run of one unit, or of all."""
        for (u, b), runs in self._updates.runs.items():
            for run in runs if unit in (None, u) else ():
                yield u, b, run

    def _parameters(self, u: int, b: int, run: UpdateRun) -> list[tuple[int, nn.Parameter]]:
        """Return the parameters of a run, each with its first element in this rank's part of the block."""
        storage = self._storages[u]
        start = storage.owned_slice(b).start
        own = fragments(storage, storage.sections[b], start + run.place.start, run.parameter)
        offsets = {p: place.offset for p, place in zip(storage.parameters, storage.places, strict=True)}
        return sorted(
            ((max(offsets[f.parameter] - start, run.place.start), f.parameter) for f in own), key=lambda found: found[0]
        )


def _made(value: Any, p: Tensor) -> Any:
    return torch.empty_like(value, device=p.device) if isinstance(value, Tensor) and value.is_meta else value


def _copy(value: Any, cpu: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to("cpu", copy=True) if cpu else value.clone()


# ---- in the form of torch.optim


def for_parameters(state: State, layout: StateLayout) -> dict[Tensor, dict[str, Any]]:
    """Return state for a plain loop's optimizer: in the parameters' own precision."""
    own = {key for key, dtype in layout.per_element.items() if dtype is not None} | layout.replicated
    return {p: {k: v if k in own else v.to(p.dtype) for k, v in state[p].items()} for p in state}


def to_state_dict(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` as it would be with this state."""
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group in optimizer.param_groups:
        own = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": own})
    return {"state": {numbers[p]: dict(own) for p, own in state.items()}, "param_groups": groups}


def from_state_dict(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> State:
    """Return the state of an ``optimizer.state_dict()`` by parameter. Raises ValueError for one of another optimizer.
    """
    groups, theirs = optimizer.param_groups, saved["param_groups"]
    sizes, saved_sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in theirs]
    if sizes != saved_sizes:
        raise ValueError(f"the optimizer has groups of {sizes} parameters, the state dict of {saved_sizes}")
    parameters = {
        number: p
        for group, their in zip(groups, theirs, strict=True)
        for number, p in zip(their["params"], group["params"], strict=True)
    }
    return {parameters[number]: own for number, own in saved["state"].items()}


def load_options(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load learning rate and other options, as ``load_state_dict()`` does."""
    for group, their in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in their.items() if key not in ("params", "param_names")})
