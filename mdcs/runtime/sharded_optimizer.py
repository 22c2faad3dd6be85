"""The optimizers on shards, run by run, so that a block is updated as soon as it is reduced.

A run (:meth:`mdcs.plan.plan.Plan.runs`) is a view of the rank's part of a block, with one parameter group's options. It
is updated as one tensor: by torch's functional kernels for SGD, Adam and AdamW, by the optimizer's own class otherwise,
with the state that torch's optimizer would keep for it. Elementwise optimizers give the same bits on any cut. Where the
histories of neighbours differ, such as their step counts, runs are cut further. Where the optimizer needs whole
parameters, each one that the rank owns is a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mdcs.model.elementwise import FUNCTIONAL, StateLayout
from mdcs.model.flat_optimizer import Counts, FlatOptimizer, Options, options_of
from mdcs.model.optimizers import NOT_TRAINED, ParameterPlace, Updates
from mdcs.plan.period import Strategy
from mdcs.runtime.context import RunContext
from mdcs.runtime.storage import UnitStorage
from mdcs.telemetry.memory_meter import Meter
from mdcs.torch_compat import nothing_compiles, version_of

Part = tuple[int, int]
"""(unit, block)."""

_OF_SGD = ("lr", "weight_decay", "momentum", "nesterov", "maximize", "foreach", "fused")
_OF_ADAM = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Options that torch's functions take by the same names."""


class UpdateRun:
    """A piece of a block that is updated as one tensor.

    - ``group``: number of its parameter group. ``place``: its slice in this rank's part of the block.
    - ``parameter``: what is updated [elements of the run, or ``whole`` in its shape].
    - ``state``: as in ``optimizer.state[parameter]``. ``started``: it comes from an update; if not, it is not saved.
    """

    __slots__ = ("group", "parameter", "place", "started", "state", "whole")

    def __init__(self, group: int, place: slice, part: Tensor, whole: ParameterPlace | None = None) -> None:
        self.group, self.place, self.whole = group, place, whole
        self.parameter = self.piece(part)
        self.clear()

    def piece(self, part: Tensor) -> Tensor:
        """Return this run's elements of the rank's part of the block [flat], in the shape that is updated."""
        flat = part[self.place]
        return flat if self.whole is None else self.whole.shaped(flat)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the shape that is updated as it lies in the flat buffers."""
        return tensor if self.whole is None else self.whole.flattened(tensor)

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
        assert self.whole is None
        (start, stop), whole, sides = (self.place.start, self.place.stop), self.parameter.shape, []
        for place in (slice(start, at), slice(at, stop)):
            cut = slice(place.start - start, place.stop - start)
            side = UpdateRun(self.group, cut, self.parameter)
            side.place = place
            side.state = {
                key: value if not isinstance(value, Tensor) else value[cut] if value.shape == whole else value.clone()
                for key, value in self.state.items()
            }
            side.started = self.started
            sides.append(side)
        return sides[0], sides[1]


def rule_for(optimizer: torch.optim.Optimizer, layout: StateLayout, meter: Meter) -> Functional | OwnClass:
    """Return the rule of an optimizer that passed the trial (:func:`mdcs.model.elementwise.state_layouts`)."""
    return Functional(type(optimizer)) if type(optimizer) in FUNCTIONAL else OwnClass(optimizer, layout, meter)


class Functional:
    """torch's ``sgd``, ``adam`` or ``adamw``: half of the host's time of the class, and one call for several runs."""

    def __init__(self, algorithm: type[torch.optim.Optimizer]) -> None:
        self._algorithm = algorithm

    def reserve(self, options: Options, parameter: Tensor) -> dict[str, Any]:
        """Return the state [shape of the parameter] that torch's optimizer makes in its first step."""
        p = parameter
        if self._algorithm is torch.optim.SGD:
            # torch copies the first gradient. -0.0 + gradient has the same bits, for -0.0 and NaN, too.
            return {"momentum_buffer": torch.full_like(p, -0.0)} if options["momentum"] else {}
        is_read_by_kernel = options["capturable"] or options["fused"]
        exact = torch.get_default_dtype() is torch.float64 and not options["fused"]
        dtype = torch.float64 if exact else torch.float32
        # As torch makes it: a step that no kernel reads is a number of the host's, which reading does not wait for the
        # device.
        step = torch.zeros((), dtype=dtype, device=p.device) if is_read_by_kernel else torch.tensor(0.0, dtype=dtype)
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options["amsgrad"] else ("exp_avg", "exp_avg_sq")
        return {"step": step, **{name: torch.zeros_like(p) for name in names}}

    def update(self, options: Options, updates: Sequence[tuple[UpdateRun, Tensor]]) -> None:
        """Call torch's function once for (run, gradient [shape of its parameter]) pairs: all started, or none is."""
        tensors = [run.parameter for run, _ in updates], [gradient for _, gradient in updates]
        states = [run.state for run, _ in updates]
        if self._algorithm is torch.optim.SGD:
            momenta = [state.get("momentum_buffer") for state in states]
            # torch does not dampen the first gradient
            dampening = options["dampening"] if updates[0][0].started else 0.0
            sgd(*tensors, momenta, dampening=dampening, **{name: options[name] for name in _OF_SGD})
            for state, momentum in zip(states, momenta, strict=True):
                if momentum is not None:  # else made here: momentum was 0 when the state was made
                    state["momentum_buffer"] = momentum
        else:
            function = adamw if options.get("decoupled_weight_decay", self._algorithm is torch.optim.AdamW) else adam
            averages, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            largest = [state["max_exp_avg_sq"] for state in states] if options["amsgrad"] else []
            beta1, beta2 = options["betas"]
            others = {name: options[name] for name in _OF_ADAM}
            function(*tensors, averages, squares, largest, steps, beta1=beta1, beta2=beta2, **others)
        for run, _ in updates:
            run.started = True


class OwnClass:
    """The optimizer's own class, run by run. Only the class knows how to make a run's state, in its first step; until
    then its bytes are reserved: state that is made later would lie between buffers that come and go.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layout: StateLayout, meter: Meter) -> None:
        self._flat, self._layout, self._meter = FlatOptimizer(optimizer, layout.counts), layout, meter

    def reserve(self, options: Options, parameter: Tensor) -> dict[str, Any]:
        """Return memory for the state per element. Only the class knows the shapes of a whole parameter's state."""
        if self._layout.whole:
            return {}
        return {key: torch.empty_like(parameter, dtype=dtype) for key, dtype in self._layout.per_element.items()}

    def update(self, options: Options, updates: Sequence[tuple[UpdateRun, Tensor]]) -> None:
        """Step the class for one run after the other."""
        for run, gradient in updates:
            known = [id(value) for value in run.state.values()] if run.started else []
            if not run.started:
                run.state = {}  # frees what was reserved
                run.state = self._flat.first_state(options, run.parameter)
            run.state = self._flat.step(options, run.parameter, gradient, run.state)
            run.started = True
            for value in run.state.values():
                if isinstance(value, Tensor) and id(value) not in known:
                    self._meter.retag(value, "optimizer")


class ShardedOptimizer:
    """Updates the blocks of all units.

    ``clip_value``: limit of the elements of gradients. ``runs``: the runs of each (unit, block) that this rank updates.
    """

    def __init__(
        self, context: RunContext, storages: list[UnitStorage], updates: Updates, clip_value: float | None = None
    ) -> None:
        self.optimizers, self.updates, self.storages, self.meter = updates.optimizers, updates, storages, context.meter
        self._plan, self._rank, self._clip_value = context.plan, context.rank, clip_value
        rules = [rule_for(part.optimizer, part.layout, self.meter) for part in updates.parts]
        self.groups = len(self.optimizers.param_groups)
        self._rules = [rules[updates.part_of[group]] for group in range(self.groups)]
        self.runs: dict[Part, list[UpdateRun]] = {}
        counting = dict.fromkeys(part.optimizer for part in updates.parts if part.layout.counts)
        self._counts = [Counts(optimizer) for optimizer in counting]
        self._has_updated = False
        self.freeze_options()

    def layout_of(self, run: UpdateRun) -> StateLayout:
        """Return the state that is kept for a run."""
        return self.updates.parts[self.updates.part_of[run.group]].layout

    def make_state(self) -> None:
        """Make the state of all runs that have none."""
        for run in itertools.chain.from_iterable(self.runs.values()):
            if not run.state:
                with self.meter.tag("optimizer"):
                    run.state = self._rules[run.group].reserve(self._now[run.group], run.parameter)

    def keep(self, unit: int, before: ShardedOptimizer) -> None:
        """Take over the runs of a unit, with their state, from another plan's optimizer: the same ones (not copies)."""
        for part in [part for part in before.runs if part[0] == unit]:
            self.runs[part], before.runs[part] = before.runs[part], []
            for run in self.runs[part]:
                run.parameter = run.piece(self.storages[unit].owned_shard(part[1]))

    def make_runs(self, units: Iterable[int] | None = None) -> None:
        """Make the runs of these units (None: of all), without state. Parameters that are in no optimizer have none."""
        for u in range(len(self.storages)) if units is None else units:
            storage = self.storages[u]
            for b in range(len(storage.blocks) if storage.trainable else 0):
                self.runs[u, b] = [*(self._whole_runs if storage.layout.is_whole else self._flat_runs)(storage, b)]

    def _flat_runs(self, storage: UnitStorage, b: int) -> Iterator[UpdateRun]:
        pieces = self._plan.runs(storage.unit, b, self._rank)
        groups = [*dict.fromkeys(self.updates.groups.get(p, NOT_TRAINED) for p in storage.parameters)]  # by segment
        for begin, length, segment in pieces:
            if groups[segment] != NOT_TRAINED:
                start = begin - pieces[0][0]
                yield UpdateRun(groups[segment], slice(start, start + length), storage.owned_shard(b))

    def _whole_runs(self, storage: UnitStorage, b: int) -> Iterator[UpdateRun]:
        part, local = storage.owned[b], storage.owned_shard(b)
        for p, place in zip(storage.parameters, storage.places, strict=True):
            if part.start <= place.offset < part.stop:
                start = place.offset - part.start
                yield UpdateRun(self.updates.groups[p], slice(start, start + place.numel), local, place)

    def cut(self, part: Part, at: Iterable[int]) -> None:
        """Cut a block's runs at these elements of this rank's part: from now on each side has a state of its own."""
        with self.meter.tag("optimizer"):
            for element in at:
                self.runs[part] = [
                    side
                    for run in self.runs[part]
                    for side in (run.cut(element) if run.place.start < element < run.place.stop else (run,))
                ]

    def freeze_options(self) -> None:
        """Fix learning rate and other options for the updates of this iteration (schedules change them later)."""
        self.move_on()
        for counts in self._counts:
            with nothing_compiles():
                counts.look_ahead()
        groups = self.optimizers.param_groups[: self.groups]
        self._now = [  # tensors are copied, because schedules change them in place
            {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in options_of(group).items()}
            for group in groups
        ]
        # A tensor's version counter shows changes without a wait for its device.
        self._versions = [_versions(group) for group in groups]

    def move_on(self) -> None:
        """Move on what the optimizers count, once the updates of an iteration are done."""
        for counts in self._counts if self._has_updated else ():
            counts.move_on()
        self._has_updated = False

    def changed_option(self, optimizer: torch.optim.Optimizer | None = None) -> tuple[int, str] | None:
        """Return (parameter group, name) of an option that changed since the snapshot, of one optimizer or of all."""
        groups = self.optimizers.param_groups[: self.groups]
        for i, (group, now, versions) in enumerate(zip(groups, self._now, self._versions, strict=True)):
            if optimizer is not None and not any(group is other for other in optimizer.param_groups):
                continue
            if versions != _versions(group):
                return i, next(iter(dict(versions.items() ^ _versions(group).items())))
            for name, value in now.items():
                if not isinstance(value, Tensor) and group.get(name) != value:
                    return i, name
        return None

    def step(self, gradients: Mapping[Part, Tensor], scale: float | Tensor | None = None) -> None:
        """Update blocks with their reduced gradients times ``scale`` (None: 1), by (unit, block): this rank's part,
        flat. They are scaled in place, unless the optimizer updates a copy in another precision.
        """
        self._has_updated, together = True, dict[Any, list[tuple[UpdateRun, Tensor]]]()
        with nothing_compiles(), self.meter.tag("update_scratch"):
            unused_parts = self._used_by_none(gradients)
            for part, gradient in gradients.items():
                runs = self.runs.get(part)
                if not runs:
                    continue
                dtype = runs[0].parameter.dtype
                is_copy = gradient.dtype != dtype
                gradient = gradient.to(dtype) if is_copy else gradient
                if scale is not None:
                    gradient.mul_(scale)
                # not updated, as torch's optimizers leave one whose gradient is None
                if unused := unused_parts.get(part):
                    self.cut(part, [end for u in unused for end in (u.start, u.stop)])
                    runs = [r for r in self.runs[part] if not any(u.start <= r.place.start < u.stop for u in unused)]
                if self._clip_value is not None:
                    gradient.clamp_(-self._clip_value, self._clip_value)
                for run in runs:
                    # Only fused updates of the gradient itself need no scratch: one call updates all runs of a message.
                    # Others go one by one, and no name holds a copy of a gradient while the next one is made.
                    if self._now[run.group].get("fused") and not is_copy:
                        together.setdefault((run.group, dtype, run.started), []).append((run, run.piece(gradient)))
                    else:
                        self._rules[run.group].update(self._now[run.group], [(run, run.piece(gradient))])
            for (group, *_), updates in together.items():
                self._rules[group].update(self._now[group], updates)
        for unit, block in gradients:
            if self.storages[unit].strategy is Strategy.dp:  # of other units the gather places it
                self.storages[unit].copy_shard_into_flat(block)

    def _used_by_none(self, gradients: Mapping[Part, Tensor]) -> dict[Part, list[slice]]:
        """Return the slices of each part whose parameters no rank has used, with at most one wait for the device."""
        asked = [
            (part, *piece)
            for part, gradient in gradients.items()
            for piece in self.storages[part[0]].unused_on_this_rank(part[1], gradient)
        ]
        slices: dict[Part, list[slice]] = {}
        answers = torch.stack([answer for *_, answer in asked]).tolist() if asked else ()
        for (part, piece, _), is_unused in zip(asked, answers, strict=True):
            if is_unused:
                slices.setdefault(part, []).append(piece)
        return slices


def later_step(optimizer: torch.optim.Optimizer, layout: StateLayout) -> tuple[UpdateRun, Callable[[], object]]:
    """Return a run and a call that updates it as the runtime does, for timing. ``optimizer``: of one parameter."""
    (group,) = optimizer.param_groups
    (p,) = group["params"]
    rule, run = rule_for(optimizer, layout, Meter()), UpdateRun(0, slice(None), p.detach())
    options = options_of(group)
    run.state = rule.reserve(options, run.parameter)
    return run, lambda: rule.update(options, [(run, p.grad)])


def _versions(group: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {k: (id(v), version_of(v)) for k, v in group.items() if isinstance(v, Tensor)}
