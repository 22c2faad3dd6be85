"""The optimizer's state: on shards while a plan runs, whole for a plain loop and for checkpoints.

Parameters of a unit that are in one parameter group are updated together and have one step count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.model.optimizers import parameter_groups
from mdcs.runtime.gathering import Gathering
from mdcs.runtime.state import Fragment, fragments
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.updates import Run, Updates

STEP = "step"  # key of the step count; all other state has the parameter's shape
State = Mapping[Any, Mapping[str, Any]]
"""Parameter -> {key: value}."""
Together = dict[tuple[int, int], tuple[float, list[str]]]
"""(unit, parameter group) -> (step count, keys of the state)."""


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
    """State on shards. ``exchange`` returns every rank's value (:meth:`mdcs.runtime.groups.Groups.exchange`).

    ``kept``: whole state of parameters that are frozen now.
    """

    def __init__(
        self, updates: Updates, storages: Sequence[UnitStorage], gathering: Gathering, exchange: Callable[[Any], list[Any]]
    ) -> None:
        self._updates, self._storages, self._gathering, self._exchange = updates, storages, gathering, exchange
        self._groups = parameter_groups(updates.optimizer)
        self.kept: dict[Any, dict[str, Any]] = {}

    # -- in

    def begin(self, state: State) -> None:
        """Allocate zeros on shards for everything in the whole ``state``, and take over its step counts.

        Tensors of ``state`` may be on the meta device. The state before is dropped. Raises ValueError as
        :func:`together` does.
        """
        named = [list(zip(s.names, s.parameters, strict=True)) for s in self._storages]
        wanted = together(named, self._groups, state)
        trained = {p for storage in self._storages if storage.trainable for p in storage.parameters}
        self.kept = {p: {key: _made(v, p) for key, v in own.items()} for p, own in state.items() if p not in trained}
        for u, _, run in self._runs():
            step, keys = wanted.get((u, run.group), (0.0, []))
            group, p = self._updates.optimizer.param_groups[run.group], run.parameter
            run.clear()
            with self._updates.meter.tag("optimizer"):
                for key in keys:
                    run.restore(key, _count(step, group, p) if key == STEP else torch.zeros_like(p))
        self._updates.make_state()

    def load(self, state: State) -> None:
        """Load this rank's part of whole state; replaces the state before. Raises ValueError as :func:`together` does."""
        self.begin(state)
        for key, fragment in self.fragments():
            fragment.load(state[fragment.parameter][key])

    # -- out

    def fragments(
        self, within: Callable[[UnitStorage, int], slice] | None = None
    ) -> Iterator[tuple[str, Fragment]]:
        """Yield (key, fragment) of this rank's state, without step counts.

        ``within``: (unit, block) -> the slice of the section's flat buffer outside of which fragments are left out.
        """
        for u, b, run in self._runs():
            storage = self._storages[u]
            start, limit = storage.own(b).start + run.place.start, None if within is None else within(storage, b)
            for key, value in run.saved.items():
                for fragment in fragments(storage, storage.sections[b], start, value, limit) if key != STEP else ():
                    yield key, fragment

    def started(self) -> dict[nn.Parameter, tuple[Any, list[str]]]:
        """Return by parameter the step count (None if it has none) and the keys of all ranks' state. Collective."""
        here: dict[tuple[int, int], Any] = {}
        for u, _, run in self._runs():
            own = dict(run.saved)
            if own:
                step = own.pop(STEP, None)
                here[u, run.group] = None if step is None else step.cpu(), sorted(own)
        for ranks in self._exchange(here):  # a rank that has padding only has no state
            here |= ranks
        return {
            p: here[u, self._groups[p]]
            for u, storage in enumerate(self._storages)
            if storage.trainable
            for p in storage.parameters
            if (u, self._groups[p]) in here
        }

    def whole(self, *, keep: bool, cpu: bool, release: bool = False) -> dict[nn.Parameter, dict[str, Any]]:
        """Return whole state by parameter, in the shards' precision, on ranks that ``keep`` it. Collective; nothing in
        flight.

        Gathers one state of one unit at a time. ``release``: free the shards' state of each unit once gathered.
        """
        found = {p: {key: _copy(value, cpu) for key, value in own.items()} for p, own in self.kept.items()} if keep else {}
        started = self.started()
        for u, storage in enumerate(self._storages):
            for p in storage.parameters if keep else ():
                step, _ = started.get(p, (None, ()))
                if step is not None:
                    group = self._updates.optimizer.param_groups[self._groups[p]]
                    found[p] = {STEP: step.clone() if cpu else _count(step, group, p)}
            for key in sorted({key for p in storage.parameters for key in started.get(p, (None, ()))[1]}):
                values = self._gathering.by_parameter(u, self._parts(u, key), "optimizer state")
                for name, p in zip(storage.names, storage.parameters, strict=True):
                    if keep and p in started:
                        found.setdefault(p, {})[key] = values[name].cpu() if cpu else values[name]
            for _, _, run in self._runs(u) if release else ():
                run.clear()
        return found

    def _parts(self, u: int, key: str) -> dict[int, Tensor]:
        """Return this rank's part of one state of a unit, by block: flat, in the type that is updated, zeros where
        there is none.
        """
        storage = self._storages[u]
        parts = {b: torch.zeros_like(storage.at_rest(b)) for b in range(len(storage.blocks))}
        for _, b, run in self._runs(u):
            if key in run.saved:
                parts[b][run.place] = run.saved[key]
        return parts

    def _runs(self, unit: int | None = None) -> Iterator[tuple[int, int, Run]]:
        """Yield (unit, block, run) of every run of one unit, or of all."""
        for (u, b), runs in self._updates.runs.items():
            for run in runs if unit in (None, u) else ():
                yield u, b, run


def _count(step: Any, group: Mapping[str, Any], p: Tensor) -> Tensor:
    """Return a step count as torch's optimizers keep it: on the host, unless a kernel reads it."""
    device = p.device if group.get("capturable") or group.get("fused") else "cpu"
    return torch.as_tensor(step, dtype=None if isinstance(step, Tensor) else torch.float32).to(device, copy=True)


def _made(value: Any, p: Tensor) -> Any:
    return torch.empty_like(value, device=p.device) if isinstance(value, Tensor) and value.is_meta else value


def _copy(value: Any, cpu: bool) -> Any:
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
