"""The workload of a job: model, units, optimizer with its schedule, and data; their profile and throughput."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import mdcs
from experiments.config.identity import RECOMPUTATION, about, measures_recomputation
from experiments.config.schema import Config
from experiments.job import profiles
from experiments.job.profiles import job_of, require_activations
from launch import status
from mdcs.api.loop_plan import Choice, must_shard
from mdcs.api.offline import STEPS
from mdcs.model.optimizers import Optimizers
from mdcs.model.units import block_roots
from mdcs.planner.recompute import is_measured
from mdcs.planner.trials import proposals
from mdcs.profile.link import Collectives
from mdcs.profiler.consensus import on_rank_zero
from mdcs.profiler.measurement import Measurement
from mdcs.profiler.stages import Ran, Stage, Trial, chosen, take_turns
from mdcs.sizes import aligned
from mdcs.telemetry.memory_meter import unmeasured

_TRIALS, _TRIALS_FROM = 3, 250  # default number of plans that are tried, and steps of the shortest run that tries them
_PLANS, _RECOMPUTING = 3, 2  # plans under which messages are measured, at most, and those under which units recompute
T = TypeVar("T")
_TURNS = 3
_PATIENCE = datetime.timedelta(days=7)
"""The watchdog ends a job in which no rank works: a rank that waits for its turn needs no limit."""

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
        freeze(self.model, config.model.frozen)
        self.plan: mdcs.Plan | None = None
        self.choice: Choice | None = None
        self.floor: int | None = None
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
        inner_first = sorted(named.items(), key=lambda each: -each[0].count("."))
        return [module for name, module in inner_first if name in chosen]

    def batches(self, **options: Any) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's batches on its device. Raises ValueError at the call if the samples make no batch. On CUDA
        the host does not wait for their copies."""
        with status.working():
            made = self.config.data.batches(
                self.task.inputs, rank=self.rank, world=self.world, pinned=self.device.type == "cuda", **options
            )

        def on_device(value: Tensor) -> Tensor:
            value = value.to(self.device, non_blocking=True)  # a copy that changes the type as well is not asynchronous
            return value.to(self.dtype) if value.is_floating_point() else value

        return ({key: on_device(value) for key, value in batch.items()} for batch in made)

    def loss(self, batch: dict[str, Tensor], model: nn.Module | None = None) -> Tensor:
        """Loss of the model, or of `model`, which wraps it. Raises ValueError for data of another model."""
        try:
            return self.task.loss(self.model if model is None else model, batch)
        except KeyError as error:
            if not error.args or error.args[0] in batch:
                raise
            of = f"model.loss: a batch of data={self.config.data.name}"
            raise ValueError(f"{of} has no {error}, only {', '.join(batch)}") from error

    def shown(self, value: float) -> float | None:
        """A loss or a norm; None for emulated ranks, where it has no meaning."""
        return None if self.emulate else value

    def known_profile(self) -> mdcs.Profile | None:
        """The profile that the config names or describes. None: it has to be measured."""
        known = on_rank_zero(lambda: profiles.known(self.config))  # the file is on rank 0's host
        if known is not None:
            self._require_same_units(known)
        return known

    @property
    def trials_asked(self) -> int:
        """Number of plans that take turns before one is chosen."""
        asked: int | None = getattr(self.config.strategy, "trials", 1)
        return (_TRIALS if self.config.run.steps >= _TRIALS_FROM else 1) if asked is None else asked

    @property
    def _stages(self) -> int:
        """Number of plans under which a profile is measured."""
        return 1 + _RECOMPUTING * measures_recomputation(self.config) + _PLANS * (self.world > 1)

    @property
    def iterations(self) -> int:
        """Timed steps of each plan under which the first half of training measures a profile. 0: it is too short."""
        run, trials = self.config.run, self.trials_asked
        room = run.steps // 2 - (2 * trials if trials > 1 else 0)
        return max(0, min(run.profile_iterations, room // self._stages - 1))

    def choosing(self, plan: mdcs.Plan, *, measured: bool) -> Generator[Stage, Ran, mdcs.Plan]:
        """Yield the plan and others that differ, in turns, if the config asks for trials; return the fastest. measured:
        whether a profile was measured in the steps before."""
        if self.trials_asked == 1:
            return plan
        plans = on_rank_zero(lambda: proposals(plan, self.trials_asked))
        room = self.config.run.steps // 2 - (self._stages * (1 + self.iterations) if measured else 0)
        steps = min(STEPS * len(plans), max(2 * len(plans), room))
        self.trials = yield from take_turns(plans, steps)
        return chosen(self.trials)

    def measuring(self) -> Generator[Stage, Ran, mdcs.Profile]:
        """Yield the first steps of training, and the plans under which they are measured; return the profile. Raises
        ValueError for a budget where memory cannot be measured, and InfeasibleBudget as soon as it is known."""
        config, optimizers = self.config, Optimizers(self.optimizer)
        budget, named = config.budget.value, config.collectives.named
        if config.budget.limited:
            require_activations(unmeasured(self.device))
        collectives = None if named is None else Collectives(named, config.cluster.resolved_backend())
        link, collectives = profiles.emulated(config) or (None, collectives)
        measurement = Measurement(
            self.units, optimizers, self.device, budget, config.recompute,
            sharded=must_shard(self.units, optimizers, budget.size)[0], job=partial(job_of, config),
            iterations=self.iterations, link=link, collectives=collectives, depth=config.link.depth,
            emulate=self.emulate, master_dtype=self.master_dtype, grad_dtype=self.grad_dtype, about=about(config),
        )  # fmt: skip
        try:
            plan = measurement.provisional(measurement.unmeasured())
            profile = yield from measurement.profile(plan)
        except mdcs.InfeasibleBudget as error:
            worded = error if budget.of_ddp is not None else error.in_words_of(budget, lambda: 0)
            worded.args = (f"budget: {worded}",)
            raise worded from None
        return dataclasses.replace(profile, about=profile.about | (RECOMPUTATION if is_measured(profile) else {}))

    def profile(self) -> mdcs.Profile:
        """Measure a profile before training, on all ranks, with recomputation where the budget needs it."""
        measured = self._measured(self.config)
        if on_rank_zero(lambda: profiles.is_short(self.config, measured)):
            status.set(phase="profiling recomputation")
            measured = self._measured(profiles.with_recomputation(self.config))
        return measured

    def _measured(self, config: Config) -> mdcs.Profile:
        emulated, batches = profiles.emulated(config), self.batches()

        def step() -> Tensor:
            status.set()  # reports progress: many ranks on few cores may measure for longer than the timeout
            return self.loss(next(batches))

        return mdcs.autoprofile(
            self.model, self.optimizer, self.units, step, link=emulated[0] if emulated else None,
            depth=config.link.depth, algorithm=config.collectives.named, master_dtype=self.master_dtype,
            grad_dtype=self.grad_dtype, iterations=config.run.profile_iterations, about=about(config),
            emulate=self.emulate, progress=False, recompute=measures_recomputation(config),
        )  # fmt: skip

    def _require_same_units(self, profile: mdcs.Profile) -> None:
        """Raise ValueError if the profile's model has other units, e.g. because its code has changed."""
        of_profile = [(unit.name, unit.numel, unit.trainable) for unit in profile.units]
        of_model = [(u.name, sum(aligned(p.numel()) for _, p in u.parameters), u.trainable) for u in self.units]
        for number, (there, here) in enumerate(zip_longest(of_profile, of_model)):
            if there != here:
                raise ValueError(
                    f"the profile {self.config.profile.path} is of another model: its unit {number} is {_unit(there)}, "
                    f"the model's is {_unit(here)}; measure it anew (profile.refresh=true, without profile.path)"
                )


def prepared(phase: str, make: Callable[[], T], *, in_turn: bool = False) -> T:
    """Return what `make` returns, on every rank. The job is not taken for hung while `make` computes or writes files.
    in_turn: rank 0 goes first, then one rank of each other host, then the rest. Collective."""
    status.set(phase=phase)
    if not in_turn or not dist.is_initialized() or dist.get_world_size() == 1:
        with status.working():
            return make()
    turn = 0 if dist.get_rank() == 0 else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    for each in range(_TURNS):
        if each == turn:
            with status.working():
                made = make()
        dist.barrier(group)
    dist.destroy_process_group(group)
    return made


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


def wrap_policy(config: Config, block_classes: tuple[str, ...]) -> mdcs.ByClass | mdcs.BySize | mdcs.ByLeaf | None:
    """The policy that chooses units; None: repeated blocks are found (:func:`mdcs.partition`)."""
    if config.model.wrap == "size":
        return mdcs.BySize(config.model.wrap_min_params)
    if config.model.wrap == "leaf":
        return mdcs.ByLeaf()
    return mdcs.ByClass(block_classes) if block_classes else None


def make_schedule(config: Config, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.optimizer.factor(step, config.run.steps))


@dataclass(frozen=True)
class Throughput:
    """Work of one step of a job; None where it is not known, or not asked for."""

    samples: int  # of all ranks
    tokens: int | None = None  # of all ranks
    flops: float | None = None  # of forward and backward on one rank, without recomputation
    peak: float | None = None  # of one device, FLOPs/s

    def in_step(self, seconds: float) -> dict[str, float]:
        """The rates of a step that took `seconds`, by their names in events."""
        return {
            "throughput_samples_s": self.samples / seconds,
            **({} if self.tokens is None else {"throughput_tokens_s": self.tokens / seconds}),
            **({} if self.flops is None or self.peak is None else {"mfu": self.flops / seconds / self.peak}),
        }


def throughput_of(workload: Workload) -> Throughput:
    """The throughput of a workload whose model no engine has wrapped yet. FLOPs are counted if `cluster.peak_tflops`
    says what to compare them with: three times those of a forward pass."""
    config, samples = workload.config, workload.samples_per_step
    each = config.data.tokens(workload.task.inputs)
    tokens = None if each is None else samples * each
    if config.cluster.peak_tflops is None or not config.model.computes:
        return Throughput(samples, tokens)
    peak = config.cluster.peak_tflops * 1e12
    batch = next(config.data.batches(workload.task.inputs, rank=workload.rank, world=workload.world))
    try:
        meta = {key: v.to("meta", workload.dtype if v.is_floating_point() else None) for key, v in batch.items()}
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            workload.task.loss(_OnMeta(workload.model), meta)
    except Exception:  # the model's own code, on tensors without values
        return Throughput(samples, tokens)
    return Throughput(samples, tokens, 3.0 * counter.get_total_flops() * config.run.accumulation, peak)


class _OnMeta(nn.Module):
    """A model, called with parameters and buffers on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._call = model
        self._state = {name: v.to("meta") for name, v in [*model.named_parameters(), *model.named_buffers()]}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._call, self._state, args, kwargs)
