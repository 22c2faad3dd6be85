"""The optimizer on shards: one torch.optim instance per block, so that a block is updated as soon as it is reduced.

A block's run (:func:`mdcs.plan.ledger.runs`) is a view of the rank's parameters with one parameter group's options.
Elementwise optimizers give the same bits on any cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mdcs.measure.memory import Meter
from mdcs.plan.ledger import runs
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy
from mdcs.runtime.storage import UnitStorage


class Updates:
    """``group_of[unit]`` maps a unit's segments to the optimizer's parameter groups."""

    def __init__(
        self, plan: Plan, storages: list[UnitStorage], optimizer: torch.optim.Optimizer,
        group_of: list[list[int]], rank: int, meter: Meter,
    ) -> None:  # fmt: skip
        self.optimizer, self.storages, self.meter = optimizer, storages, meter
        self.blocks: dict[tuple[int, int], tuple[torch.optim.Optimizer, list[slice]]] = {}
        self._tagged: set[tuple[int, int]] = set()
        self.kept: dict[int, dict[int, Tensor]] = {}  # of units that are watched: what their blocks were last updated with
        for u, storage in enumerate(storages):
            if not storage.trainable:
                continue
            for b in range(len(storage.blocks)):
                pieces = runs(plan, u, b, rank)
                local, groups, slices = storage.at_rest(b), [], []
                start = pieces[0][0] if pieces else 0
                for begin, length, segment in pieces:
                    part = slice(begin - start, begin - start + length)
                    slices.append(part)
                    index = group_of[u][segment]
                    groups.append({**self._options(index), "params": [local[part]], "mdcs_group": index})
                if groups:
                    self.blocks[u, b] = (type(optimizer)(groups), slices)  # type: ignore[call-arg]  # all have defaults
        self.groups = len(optimizer.param_groups)
        self.snapshot()

    def _options(self, index: int) -> dict[str, Any]:
        """Of a parameter group; tensors are copied, for schedules change them in place."""
        group = self.optimizer.param_groups[index]
        return {
            k: v.detach().clone() if isinstance(v, Tensor) else v
            for k, v in group.items()
            if k not in ("params", "param_names")
        }

    def snapshot(self) -> None:
        """Fix learning rate and other options for the updates of this iteration (schedules change them later)."""
        self._now = [self._options(i) for i in range(len(self.optimizer.param_groups))]
        # A tensor's version tells of changes without waiting for its device.
        self._versions = [_versions(group) for group in self.optimizer.param_groups]

    def changed_option(self) -> tuple[int, str] | None:
        """A parameter group, and the option that has changed in it since the snapshot."""
        for i, (now, versions) in enumerate(zip(self._now, self._versions, strict=True)):
            group = self.optimizer.param_groups[i]
            if versions != _versions(group):
                return i, next(iter(dict(versions.items() ^ _versions(group).items())))
            for name, value in now.items():
                if not isinstance(value, Tensor) and group.get(name) != value:
                    return i, name
        return None

    def gradients(self, unit: int, block: int, gradient: Tensor) -> list[Tensor]:
        """The pieces of a block's reduced gradient, one per run."""
        return [gradient[s] for s in self.blocks[unit, block][1]] if (unit, block) in self.blocks else []

    def step(self, unit: int, block: int, gradient: Tensor, scale: float | None = None) -> None:
        """Update a block with ``scale`` (None: 1) times this rank's reduced gradient of it, flat, as long as the rank's part.

        The gradient is scaled in place, unless the optimizer updates a copy in another precision.
        """
        if (unit, block) not in self.blocks:
            return
        optimizer, slices = self.blocks[unit, block]
        storage = self.storages[unit]
        with self.meter.tag("update_scratch"):
            gradient = gradient.to(storage.at_rest(block).dtype)
            if scale is not None:
                gradient.mul_(scale)
            if unit in self.kept:
                self.kept[unit][block] = gradient.clone()
            for group, part in zip(optimizer.param_groups, slices, strict=True):
                group.update(self._now[group["mdcs_group"]])
                group["params"][0].grad = gradient[part]
            optimizer.step()
        for group in optimizer.param_groups:
            group["params"][0].grad = None
        if storage.strategy is Strategy.dp:  # of the others their gather does it
            storage.place_own(block)
        if (unit, block) not in self._tagged:  # torch allocates optimizer state in the first step
            self._tagged.add((unit, block))
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.meter.retag(value, "optimizer")


def _versions(group: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {k: (id(v), v._version) for k, v in group.items() if isinstance(v, Tensor)}
