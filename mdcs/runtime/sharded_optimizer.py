"""The optimizer on shards, run by run, so that a block is updated as soon as it is reduced.

A run (:func:`mdcs.plan.runs.runs`) is a view of the rank's part of a block, with one parameter group's options. It is
updated as one tensor, as :mod:`mdcs.runtime.update_rules` says. Elementwise optimizers give the same bits on any cut.
Where the histories of neighbours differ, such as their step counts, runs are cut further.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mdcs.model.elementwise import StateLayout, state_layout
from mdcs.model.optimizers import NOT_TRAINED
from mdcs.plan.plan import Plan
from mdcs.plan.runs import runs
from mdcs.plan.strategy import Strategy
from mdcs.runtime.storage import UnitStorage
from mdcs.runtime.update_rules import rule_for
from mdcs.telemetry.memory_meter import Meter
from mdcs.torch_compat import nothing_compiles, version_of

Part = tuple[int, int]
"""(unit, block)."""


class UpdateRun:
    """A piece of a block that is updated as one tensor.

    - ``group``: index of its parameter group in the optimizer.
    - ``place``: its slice in this rank's part of the block.
    - ``parameter``: what is updated [elements of the run].
    - ``state``: as in ``optimizer.state[parameter]``. Empty until it is made.
    - ``started``: whether the state comes from an update; if not, it is not saved.
    """

    __slots__ = ("group", "parameter", "place", "started", "state")

    def __init__(self, group: int, place: slice, parameter: Tensor) -> None:
        self.group, self.place, self.parameter = group, place, parameter
        self.clear()

    def clear(self) -> None:
        """Drop the state."""
        self.state: dict[str, Any] = {}
        self.started = False

    @property
    def saved(self) -> Mapping[str, Any]:
        """The state after the first update; empty before."""
        return {key: value for key, value in self.state.items() if value is not None} if self.started else {}

    def restore(self, key: str, value: Any) -> None:
        """Set a part of saved state."""
        if not self.started:
            self.clear()
        self.state[key], self.started = value, True

    def cut(self, at: int) -> tuple[UpdateRun, UpdateRun]:
        """Return the two sides of element ``at`` of this rank's part, each with its part of the state."""
        middle, whole = at - self.place.start, self.parameter.shape
        sides = []
        for own, place in ((slice(middle), slice(self.place.start, at)), (slice(middle, None), slice(at, self.place.stop))):
            side = UpdateRun(self.group, place, self.parameter[own])
            side.state = {
                key: value if not isinstance(value, Tensor) else value[own] if value.shape == whole else value.clone()
                for key, value in self.state.items()
            }
            side.started = self.started
            sides.append(side)
        return sides[0], sides[1]


class ShardedOptimizer:
    """Updates the blocks of all units. ``group_of[unit]``: the optimizer's parameter group of each segment.

    ``clip_value``: limit of the elements of gradients.
    ``runs``: the runs of each (unit, block) that this rank updates.
    """

    def __init__(
        self, plan: Plan, storages: list[UnitStorage], optimizer: torch.optim.Optimizer, layout: StateLayout,
        group_of: list[list[int]], rank: int, meter: Meter, clip_value: float | None = None,
    ) -> None:  # fmt: skip
        self.optimizer, self.storages, self.layout, self.meter = optimizer, storages, layout, meter
        self._plan, self._group_of, self._rank = plan, group_of, rank
        self._rule, self._clip_value = rule_for(optimizer, layout, meter), clip_value
        self.runs: dict[Part, list[UpdateRun]] = {}
        self.forget()
        self.captured_gradients: dict[int, dict[int, Tensor]] = {}  # watched unit -> {block: gradient of its last update}
        self.groups = len(optimizer.param_groups)
        self.freeze_options()

    def make_state(self) -> None:
        """Make the state of all runs that have none."""
        for run in itertools.chain.from_iterable(self.runs.values()):
            if not run.state:
                with self.meter.tag("optimizer"):
                    run.state = self._rule.reserve(self._now[run.group], run.parameter)

    def forget(self) -> None:
        """Drop all state, and the cuts that it needed. Parameters that are in no optimizer have no runs."""
        for u, storage in enumerate(self.storages):
            for b in range(len(storage.blocks) if storage.trainable else 0):
                pieces, local = runs(self._plan, u, b, self._rank), storage.owned_shard(b)
                places = [slice(begin - pieces[0][0], begin - pieces[0][0] + length) for begin, length, _ in pieces]
                groups = [self._group_of[u][segment] for *_, segment in pieces]
                self.runs[u, b] = [
                    UpdateRun(group, place, local[place])
                    for group, place in zip(groups, places, strict=True)
                    if group != NOT_TRAINED
                ]

    def cut(self, part: Part, at: Iterable[int]) -> None:
        """Cut a block's runs at these elements of this rank's part: from now on each side has a state of its own."""
        with self.meter.tag("optimizer"):
            for element in at:
                self.runs[part] = [
                    side
                    for run in self.runs[part]
                    for side in (run.cut(element) if run.place.start < element < run.place.stop else (run,))
                ]

    def _options(self, index: int) -> dict[str, Any]:
        """Return the options of a parameter group; tensors are copied, because schedules change them in place."""
        group = self.optimizer.param_groups[index]
        return {
            k: v.detach().clone() if isinstance(v, Tensor) else v
            for k, v in group.items()
            if k not in ("params", "param_names")
        }

    def freeze_options(self) -> None:
        """Fix learning rate and other options for the updates of this iteration (schedules change them later)."""
        self._now = [self._options(i) for i in range(len(self.optimizer.param_groups))]
        # A tensor's version counter shows changes without a wait for its device.
        self._versions = [_versions(group) for group in self.optimizer.param_groups]

    def changed_option(self) -> tuple[int, str] | None:
        """Return (parameter group, name) of an option that changed since the snapshot; None if none did."""
        for i, (now, versions) in enumerate(zip(self._now, self._versions, strict=True)):
            group = self.optimizer.param_groups[i]
            if versions != _versions(group):
                return i, next(iter(dict(versions.items() ^ _versions(group).items())))
            for name, value in now.items():
                if not isinstance(value, Tensor) and group.get(name) != value:
                    return i, name
        return None

    def step(self, gradients: Mapping[Part, Tensor], scale: float | Tensor | None = None) -> None:
        """Update blocks with their reduced gradients times ``scale`` (None: 1).

        ``gradients``: (unit, block) -> this rank's part, flat [elements of the part]. They are scaled in place, unless
        the optimizer updates a copy in another precision.
        """
        together: dict[Any, list[tuple[UpdateRun, Tensor]]] = {}
        with nothing_compiles(), self.meter.tag("update_scratch"):
            for part, gradient in gradients.items():
                own = self.runs.get(part)
                if not own:
                    continue
                dtype = own[0].parameter.dtype
                is_copy = gradient.dtype != dtype
                gradient = gradient.to(dtype) if is_copy else gradient
                if scale is not None:
                    gradient.mul_(scale)
                unused = self.storages[part[0]].used_by_none(part[1], gradient)
                if unused:  # not updated, as torch's optimizers leave a parameter whose gradient is None
                    self.cut(part, [end for u in unused for end in (u.start, u.stop)])
                    own = [r for r in self.runs[part] if not any(u.start <= r.place.start < u.stop for u in unused)]
                if self._clip_value is not None:
                    gradient.clamp_(-self._clip_value, self._clip_value)
                if part[0] in self.captured_gradients:
                    self.captured_gradients[part[0]][part[1]] = gradient.clone()
                for run in own:
                    # Only fused updates of the gradient itself need no scratch: one call updates all runs of a message. Others
                    # go one by one, and no name holds a copy of a gradient while the next one is made.
                    if self._now[run.group].get("fused") and not is_copy:
                        together.setdefault((run.group, dtype, run.started), []).append((run, gradient[run.place]))
                    else:
                        self._rule.update(self._now[run.group], [(run, gradient[run.place])])
            for (group, *_), updates in together.items():
                self._rule.update(self._now[group], updates)
        for unit, block in gradients:
            if self.storages[unit].strategy is Strategy.dp:  # of other units the gather places it
                self.storages[unit].copy_shard_into_flat(block)


def later_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return a call that updates as the runtime does, for timing. ``optimizer`` has one parameter, with a gradient."""
    (group,) = optimizer.param_groups
    (p,) = group["params"]
    rule, run = rule_for(optimizer, state_layout(optimizer), Meter()), UpdateRun(0, slice(None), p.detach())
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    run.state = rule.reserve(options, run.parameter)
    return lambda: rule.update(options, [(run, p.grad)])


def _versions(group: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {k: (id(v), version_of(v)) for k, v in group.items() if isinstance(v, Tensor)}
