"""The workload of a job: model, units, optimizer with its schedule, and data, as in the config; and their profile."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

import mdcs
from experiments.config.identity import about, measures_recomputation
from experiments.config.schema import Config
from experiments.job import profiles
from experiments.job.preparation import prepared
from launch import status
from mdcs.api.offline import cost_s, fastest
from mdcs.model.units import block_roots
from mdcs.planner.trials import proposals
from mdcs.profiler.autotune import Trial
from mdcs.profiler.consensus import on_rank_zero
from mdcs.sizes import aligned
from mdcs.torch_compat import has_batch_statistics

_TRIALS, _TRIALS_COST = 3, 0.03
"""Default number of plans that are tried, and the largest share of a run that the trials may take."""

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


class Workload:
    """The user's side of a training run on one rank: model, units, optimizer, data, and the plan once it is made."""

    def __init__(self, config: Config, rank: int, world: int, device: torch.device) -> None:
        """``rank`` and ``world`` are those of the process. With emulation, the attributes are the emulated ones."""
        self.processes, self.writes, self.device = world, rank == 0, device
        self.emulate = mdcs.Emulation(config.cluster.rank, config.cluster.ranks) if config.cluster.emulated else None
        self.rank, self.world = (self.emulate.rank, self.emulate.world) if self.emulate else (rank, world)
        self.dtype = PRECISIONS[config.run.precision]
        # In mixed precision, masters start from the rounded weights. Buffers (BatchNorm's statistics) are rounded too.
        self.master_dtype = torch.float32 if self.dtype.itemsize < 4 else None
        self.grad_dtype = torch.float32 if config.run.grad_precision == "fp32" else None
        model, data = config.model, config.data
        self.task = prepared("loading the model", lambda: model.build(seed=config.run.seed), in_turn=model.fills_cache)
        if data.fills_cache:
            data.require(self.task.inputs)
            for held_out in (False, True)[: 1 + bool(config.run.eval_every)]:
                prepared("preparing data", partial(data.samples, self.task.inputs, held_out), in_turn=True)
        self.model: nn.Module = self.task.model.to(device=device, dtype=self.dtype)
        if config.model.norms_fp32:
            widen_norms(self.model)
        freeze(self.model, config.model.frozen)
        self.plan: mdcs.Plan | None = None
        self.trials: tuple[Trial, ...] = ()
        self.config = config
        self.samples_per_step = config.data.batch_size * config.run.accumulation * self.world

    @cached_property
    def units(self) -> list[mdcs.ModelUnit]:
        return mdcs.partition(self.model, wrap_policy(self.config, self.task.block_classes))

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer_of(self.model)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.config.optimizer.make([p for p in model.parameters() if p.requires_grad])

    def blocks(self) -> list[nn.Module]:
        """The modules that the wrap policy names, in the model's order. Where they nest, inner modules come first."""
        named = {name: module for name, module in self.model.named_modules() if name}
        policy = wrap_policy(self.config, self.task.block_classes)
        chosen = block_roots(self.model) if policy is None else policy.roots(self.model)
        if not chosen:  # no roots: the modules that have a unit of their own
            units = mdcs.partition(self.model, policy)
            owners = {u.modules[0] for u in units if len(u.modules) == 1}
            chosen = {name for name, module in named.items() if module in owners}
        return [
            module for name, module in sorted(named.items(), key=lambda each: -each[0].count(".")) if name in chosen
        ]

    def batches(self, **options: Any) -> Iterator[dict[str, Tensor]]:
        """This rank's batches on its device. Raises ValueError at the call if there are too few samples for one batch.

        On CUDA the host does not wait for their copies.
        """
        with status.working():
            made = self.config.data.batches(
                self.task.inputs, rank=self.rank, world=self.world, pinned=self.device.type == "cuda", **options
            )
        return ({key: self._on_device(value) for key, value in batch.items()} for batch in made)

    def _on_device(self, value: Tensor) -> Tensor:
        # first: a copy that changes the type as well is not asynchronous
        value = value.to(self.device, non_blocking=True)
        return value.to(self.dtype) if value.is_floating_point() else value

    def loss(self, batch: dict[str, Tensor], model: nn.Module | None = None) -> Tensor:
        """Loss of the model, or of `model`, which wraps it. Raises ValueError for data of another model."""
        try:
            return self.task.loss(self.model if model is None else model, batch)
        except KeyError as error:
            if not error.args or error.args[0] in batch:
                raise
            there = ", ".join(batch)
            raise ValueError(
                f"model.loss: a batch of data={self.config.data.name} has no {error}, but {there}"
            ) from error

    def shown(self, value: float) -> float | None:
        """A loss or a norm; None for emulated ranks, where it has no meaning."""
        return None if self.emulate else value

    def profile(self) -> mdcs.Profile:
        """The profile that is known, or one that all ranks measure now, with recomputation where the budget needs it.
        """
        config = self.config
        known = on_rank_zero(lambda: profiles.known(config))  # the file is on rank 0's host
        if known is not None:
            self._require_same_units(known)
            return known
        measured = self._measured(config)
        if on_rank_zero(lambda: profiles.is_short(config, measured)):
            status.set(phase="profiling recomputation")
            measured = self._measured(profiles.with_recomputation(config))
        return measured

    def _measured(self, config: Config) -> mdcs.Profile:
        emulated = profiles.emulated(config)
        return mdcs.autoprofile(
            self.model, self.optimizer, self.units, self._trying(), link=emulated[0] if emulated else None,
            depth=config.link.depth, algorithm=config.collectives.named, master_dtype=self.master_dtype,
            grad_dtype=self.grad_dtype, iterations=config.run.profile_iterations, about=about(config),
            emulate=self.emulate, progress=False, recompute=measures_recomputation(config),
        )  # fmt: skip

    def _require_same_units(self, profile: mdcs.Profile) -> None:
        """Raise ValueError if the profile's model has other units, for instance because the model's code has changed.
        """
        of_profile = [(unit.name, unit.numel, unit.trainable) for unit in profile.units]
        of_model = [(u.name, sum(aligned(p.numel()) for _, p in u.parameters), u.trainable) for u in self.units]
        if of_profile == of_model:
            return
        pairs = zip_longest(of_profile, of_model)
        number, there, here = next((i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise ValueError(
            f"the profile {self.config.profile.path} is of another model: its unit {number} is {_unit(there)}, the "
            f"model's is {_unit(here)}; measure it anew (profile.refresh=true, without profile.path)"
        )

    def try_plans(self) -> None:
        """Measure the plan and others that differ if the config asks for trials, and keep the fastest."""
        plan, asked = self.plan, getattr(self.config.strategy, "trials", 1)
        assert plan is not None and plan.prediction is not None
        if asked is None:
            cost = cost_s([plan] * _TRIALS)
            asked = _TRIALS if cost <= _TRIALS_COST * self.config.run.steps * plan.prediction.step_s else 1
        if asked == 1:
            return
        status.set(phase="trying plans")
        plans = on_rank_zero(lambda: proposals(plan, asked))
        self.plan, self.trials = fastest(
            plans, self.model, self.units, self._trying(), self.optimizer, emulate=self.emulate
        )

    def _trying(self) -> Callable[[], Tensor]:
        """A function that runs forward passes on the first batches, for measurements before training."""
        batches = self.batches()

        def step() -> Tensor:
            status.set()  # reports progress: many ranks on few cores may measure for longer than the timeout
            return self.loss(next(batches))

        return step


def _unit(unit: tuple[str, int, bool] | None) -> str:
    if unit is None:
        return "missing"
    name, numel, trainable = unit
    return f"{name} of {numel:,} parameters{'' if trainable else ', frozen'}"


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze the parameters that match the patterns. Raises ValueError for a pattern that matches no parameter."""
    for pattern in patterns:
        matched = [p for name, p in model.named_parameters() if fnmatch.fnmatch(name, pattern)]
        if not matched:
            raise ValueError(f"model.frozen: {pattern!r} matches no parameter")
        for p in matched:
            p.requires_grad_(False)


def widen_norms(model: nn.Module) -> None:
    """Let norms compute in float32, parameters and statistics included, in a model of lower precision.

    They take inputs of the lower precision, and their outputs have it too.
    """
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) or has_batch_statistics(module):
            module.float()


def wrap_policy(config: Config, block_classes: tuple[str, ...]) -> mdcs.ByClass | mdcs.BySize | mdcs.ByLeaf | None:
    """The policy that chooses units; None: repeated blocks are found (:func:`mdcs.partition`)."""
    if config.model.wrap == "size":
        return mdcs.BySize(config.model.wrap_min_params)
    if config.model.wrap == "leaf":
        return mdcs.ByLeaf()
    return mdcs.ByClass(block_classes) if block_classes else None


def make_schedule(config: Config, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate of every step of the run, from the config's optimizer."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.optimizer.factor(step, config.run.steps))
