"""The optimizer's state: on shards while a plan runs, whole for a plain loop and for checkpoints.

Parameters of a unit that are in one parameter group are updated together and have one step count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.runtime.gathering import Gathering
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Run, Updates

STEP = "step"  # key of the step count; all other state has the parameter's shape
State = Mapping[Any, Mapping[str, Any]]
"""Parameter -> {key: value}."""
Together = dict[tuple[int, int], Any]
"""(unit, parameter group) -> (step count, keys of the other state)."""


def together(units: Sequence[Sequence[tuple[str, nn.Parameter]]], groups: Mapping[nn.Parameter, int], state: State) -> Together:
    """Return step count and keys of the parameters that are updated together and have state.

    Raises ValueError where neighbours' states differ, or a state's shape is not its parameter's.
    """
    found: Together = {}
    first: dict[tuple[int, int], str] = {}
    for u, parameters in enumerate(units):
        for name, p in parameters:
            if p not in groups or not p.requires_grad:
                continue
            own = {key: value for key, value in state.get(p, {}).items() if value is not None}
            for key, value in own.items():
                if key != STEP and value.shape != p.shape:
                    raise ValueError(f"{name} is {tuple(p.shape)}, its {key} in the optimizer's state {tuple(value.shape)}")
            here, seen = (u, groups[p]), (float(own.get(STEP, 0)), sorted(own))
            if found.setdefault(here, seen) != seen:
                raise ValueError(
                    f"{first[here]} and {name} are updated together, and the optimizer's state has {_told(*found[here])} for "
                    f"one, {_told(*seen)} for the other: give one a parameter group of its own, or clear optimizer.state"
                )
            first.setdefault(here, name)
    return {here: seen for here, seen in found.items() if seen[1]}


def _told(step: float, names: list[str]) -> str:
    return f"{', '.join(names)} after {step:g} steps" if names else "nothing"


class OptimizerState:
    """Loads and gathers state on shards. ``exchange`` returns every rank's value
    (:meth:`mdcs.runtime.groups.Groups.exchange`).
    """

    def __init__(
        self, updates: Updates, storages: Sequence[UnitStorage], gathering: Gathering, exchange: Callable[[Any], list[Any]]
    ) -> None:
        self._updates, self._storages, self._gathering, self._exchange = updates, storages, gathering, exchange
        self._groups = {p: i for i, group in enumerate(updates.optimizer.param_groups) for p in group["params"]}
        self._trained = {p for storage in storages if storage.trainable for p in storage.parameters}
        self._kept: dict[Any, dict[str, Any]] = {}  # state of parameters that are frozen now

    def load(self, state: State) -> None:
        """Load this rank's part of whole state, which :func:`together` has checked; replaces the state on shards."""
        self._kept = {p: dict(own) for p, own in state.items() if p not in self._trained}
        for u, storage in enumerate(self._storages):
            if not storage.trainable:
                continue
            self._clear(u)
            for key in sorted({key for p in storage.parameters for key in state.get(p, {})}):
                self._load(u, key, state)
        self._updates.make_state()

    def _load(self, u: int, key: str, state: State) -> None:
        storage = self._storages[u]
        values = {self._groups[p]: state[p][key] for p in storage.parameters if state.get(p, {}).get(key) is not None}
        wholes: dict[int, Tensor] = {}  # by section, [elements with padding], in the optimizer's type
        if key != STEP:
            for b, s in enumerate(storage.sections):
                if s not in wholes:
                    wholes[s] = torch.zeros(storage.layout.sizes[s], dtype=storage.at_rest(b).dtype, device=storage.device)
            for p, (s, offset, n, shape) in zip(storage.parameters, storage.places, strict=True):
                if state.get(p, {}).get(key) is not None:
                    wholes[s][offset : offset + n].view(shape).copy_(state[p][key])
        for b in range(len(storage.blocks)):
            for run in self._runs(u, b):
                if run.group in values:
                    whole = values[run.group] if key == STEP else wholes[storage.sections[b]][storage.own(b)][run.place]
                    with self._updates.meter.tag("optimizer"):
                        run.restore(key, self._count(whole, run) if key == STEP else whole.clone())

    def whole(self, *, keep: bool, cpu: bool, release: bool = False) -> dict[nn.Parameter, dict[str, Any]]:
        """Return whole state by parameter, in the shards' precision, on ranks that ``keep`` it. Collective; nothing in
        flight.

        Gathers one state of one unit at a time. ``release``: free the shards' state of each unit once gathered.
        """
        found = {p: {key: _kept(value, cpu) for key, value in own.items()} for p, own in self._kept.items()} if keep else {}
        here = self.started()
        for u, storage in enumerate(self._storages):
            if not storage.trainable:
                continue
            keys = {key for (unit, _), (_, of) in here.items() if unit == u for key in of}
            for key in sorted(keys):  # in one order on every rank
                values = self._gathering.by_parameter(u, self._parts(u, key), "optimizer state")
                for name, p in zip(storage.names, storage.parameters, strict=True):
                    if keep and (u, self._groups[p]) in here:
                        found.setdefault(p, {})[key] = values[name].cpu() if cpu else values[name]
            for p in storage.parameters:
                step, _ = here.get((u, self._groups[p]), (None, None))
                if keep and step is not None:
                    group = self._updates.optimizer.param_groups[self._groups[p]]
                    count = step.clone() if cpu else _count(step, group, p)
                    found[p] = {STEP: count, **found[p]}
            if release:
                self._clear(u)
        return found

    # -- for checkpoints, which write and read what is on shards

    def started(self) -> Together:
        """Return step count and keys of all state, of all ranks. Collective."""
        here: Together = {}
        for ranks in self._exchange(self._local()):
            here |= ranks
        return here

    def parts(self) -> Iterator[tuple[int, int, slice, str, Tensor]]:
        """Yield (unit, block, place in this rank's part, key, values) of this rank's state, without step counts."""
        for u, storage in enumerate(self._storages):
            for b in range(len(storage.blocks) if storage.trainable else 0):
                for run in self._runs(u, b):
                    for key, value in run.saved.items():
                        if key != STEP:
                            yield u, b, run.place, key, value

    @property
    def kept(self) -> State:
        """Whole state of frozen parameters."""
        return self._kept

    def begin(self, wanted: Together, kept: State) -> None:
        """Allocate zeros on shards for the keys in ``wanted``, with its step counts; replaces the state on shards."""
        self._kept = {p: dict(own) for p, own in kept.items()}
        for u, storage in enumerate(self._storages):
            self._clear(u)
            for b in range(len(storage.blocks) if storage.trainable else 0):
                for run in self._runs(u, b):
                    step, keys = wanted.get((u, run.group), (None, ()))
                    with self._updates.meter.tag("optimizer"):
                        if step is not None and STEP in keys:
                            run.restore(STEP, self._count(step, run))
                        for key in keys:
                            if key != STEP:
                                run.restore(key, torch.zeros_like(run.parameter))
        self._updates.make_state()

    def _local(self) -> Together:
        """Return step count (on the CPU) and keys of this rank's state."""
        out: Together = {}
        for u, storage in enumerate(self._storages):
            for b in range(len(storage.blocks) if storage.trainable else 0):
                for run in self._runs(u, b):
                    own = dict(run.saved)
                    if own:
                        step = own.pop(STEP, None)
                        out[u, run.group] = None if step is None else step.cpu(), sorted(own)
        return out

    def _parts(self, u: int, key: str) -> dict[int, Tensor]:
        """Return this rank's part of one state of a unit, by block: flat, in the type that is updated, zeros where
        there is none.
        """
        storage, parts = self._storages[u], {}
        for b in range(len(storage.blocks)):
            parts[b] = torch.zeros_like(storage.at_rest(b))
            for run in self._runs(u, b):
                if key in run.saved:
                    parts[b][run.place] = run.saved[key]
        return parts

    def _runs(self, u: int, b: int) -> Sequence[Run]:
        return self._updates.runs.get((u, b), ())

    def _clear(self, u: int) -> None:
        for b in range(len(self._storages[u].blocks)):
            for run in self._runs(u, b):
                run.clear()

    def _count(self, step: Any, run: Run) -> Tensor:
        return _count(step, self._updates.optimizer.param_groups[run.group], run.parameter)


def _count(step: Any, group: Mapping[str, Any], p: Tensor) -> Tensor:
    """Return a step count as torch's optimizers keep it: on the host, unless a kernel reads it."""
    device = p.device if group.get("capturable") or group.get("fused") else "cpu"
    return torch.as_tensor(step, dtype=None if isinstance(step, Tensor) else torch.float32).to(device, copy=True)


def _kept(value: Any, cpu: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to("cpu", copy=True) if cpu else value.clone()


# ---- in the form of torch.optim


def for_parameters(state: State) -> dict[Tensor, dict[str, Any]]:
    """Return state for a plain loop's optimizer: in the parameters' own precision."""
    return {p: {key: v if key == STEP else v.to(p.dtype) for key, v in own.items()} for p, own in state.items()}


def packed(optimizer: torch.optim.Optimizer, state: State) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` as it would be with this state."""
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group in optimizer.param_groups:
        own = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": own})
    return {"state": {numbers[p]: dict(own) for p, own in state.items()}, "param_groups": groups}


def unpacked(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> State:
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


def take_options(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load learning rate and other options, as ``load_state_dict()`` does."""
    for group, their in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in their.items() if key not in ("params", "param_names")})
