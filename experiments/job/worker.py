"""What every rank of a job runs: `python -m experiments.job.worker RUN_DIR [--profile-only | --plan-only]` under torch's
elastic agent.

Builds model and data from the resolved config, measures a profile (or reads one), plans on rank 0, and trains with the
config's engine (`experiments.engines`): mdcs runs the plan, a peer needs none. Rank 0 writes the files of the run folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from experiments import engines
from experiments.config.checks import load
from experiments.config.schema import Config, measured_for
from experiments.engines.base import Engine, Record
from experiments.job import profiles
from experiments.job.tracking import METRICS, JsonLines
from experiments.tasks import data, models
from launch import network, status
from mdcs.calibrate.autoplan import agree, on_rank_zero
from mdcs.calibrate.interference import measure_interference
from mdcs.calibrate.link_timing import measure_link
from mdcs.calibrate.rehearsal import rehearse
from mdcs.measure.timeline import PREDICTED_RANK, RankTimeline, SlotMemory, Timeline
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.interfaces import JointPlanner, Scheduler, StrategyPlanner
from mdcs.planner.named import SCHEDULERS, STRATEGIES

MIB, GIB = 2**20, 2**30
EVAL_BATCHES = 8
PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(folder: Path, only: str | None = None) -> None:
    """Run this rank to its end, or until the "profile" or the "plan" is written; whatever goes wrong is raised, for
    `launch.rank` to report.
    """
    config = load(folder / "config.yaml")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    status.set(phase="starting")
    device = start(config)
    job = Job(config, rank, world, device)
    floor = plan_job(folder, config, job, only) if config.engine.plans else None
    if only is None:
        train(folder, config, job, floor)
    dist.barrier()
    dist.destroy_process_group()


def plan_job(folder: Path, config: Config, job: Job, only: str | None) -> int:
    """Give the job its plan, or only write the profile that it would be made of; returns the floor in bytes."""
    status.set(phase="profiling")
    profile = job.profile(config)
    print(f"collectives: {profile.collectives}", flush=True)
    if job.writes:
        (folder / "profile.json").write_text(profile.to_json(), encoding="utf-8")
    floor = mdcs.floor_bytes(mdcs.Job(profile, **job.planning))
    if only != "profile":
        status.set(phase="planning")
        job.plan = on_rank_zero(lambda: make_plan(config, profile, floor, job.planning))
        if job.writes:
            write_plan(folder, job.plan)
    return floor


def start(config: Config) -> torch.device:
    """Threads, device and process group of this rank."""
    torch.set_num_threads(config.cluster.resolved_threads())
    timeout = datetime.timedelta(seconds=config.cluster.timeout_s)
    if config.cluster.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("cluster.device=cuda: torch finds no GPU here")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group(config.cluster.resolved_backend(), timeout=timeout)
    return device


class Job:
    """The user's side of a training run: model, units, optimizer, data; and the plan, once there is one."""

    def __init__(self, config: Config, rank: int, world: int, device: torch.device) -> None:
        """``rank`` and ``world`` are those of the process; an emulated world has others."""
        self.processes, self.writes, self.device = world, rank == 0, device
        self.emulate = mdcs.Emulation(config.cluster.rank, config.cluster.ranks) if config.cluster.emulated else None
        self.rank, self.world = (self.emulate.rank, self.emulate.world) if self.emulate else (rank, world)
        self.dtype = PRECISIONS[config.run.precision]
        # In mixed precision masters start from the rounded weights; buffers (BatchNorm's statistics) are rounded like them.
        self.master_dtype = torch.float32 if self.dtype.itemsize < 4 else None
        self.grad_dtype = torch.float32 if config.run.grad_precision == "fp32" else None
        self.task = models.build(config.model.name, seed=config.run.seed, **config.model.options())
        self.model: nn.Module = self.task.model.to(device=device, dtype=self.dtype)
        freeze(self.model, config.model.frozen)
        self.plan: mdcs.Plan | None = None
        self.config = config
        self.samples_per_step = config.data.batch_size * config.run.accumulation * self.world
        self.planning = planning_options(config)

    @cached_property
    def units(self) -> list[mdcs.ModelUnit]:
        return mdcs.partition(self.model, wrap_policy(self.config, self.task.block_classes))

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer_of(self.model)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(self.config, model)

    def blocks(self) -> list[nn.Module]:
        """The modules that the wrap policy names, in the order of the model; where they nest, the inner ones first."""
        named = {name: module for name, module in self.model.named_modules() if name}
        policy = wrap_policy(self.config, self.task.block_classes)
        chosen = policy.roots(self.model)
        if not chosen:  # every module that has parameters, all of its own
            units = mdcs.partition(self.model, policy)
            owners = {u.modules[0] for u in units if len(u.modules) == 1}
            chosen = {name for name, module in named.items() if module in owners}
        return [module for name, module in sorted(named.items(), key=lambda each: -each[0].count(".")) if name in chosen]

    def batches(self, **options: Any) -> Iterator[dict[str, Tensor]]:
        d = self.config.data
        made = data.batches(
            d.name, self.task.inputs, rank=self.rank, world=self.world, batch_size=d.batch_size, seed=d.seed,
            max_bytes=d.max_bytes, **options,
        )  # fmt: skip
        for batch in made:
            yield {
                key: value.to(self.device, self.dtype if value.is_floating_point() else None)
                for key, value in batch.items()
            }

    def loss(self, batch: dict[str, Tensor], model: nn.Module | None = None) -> Tensor:
        """Of the model, or of another one that wraps it."""
        return self.task.loss(self.model if model is None else model, batch)

    def shown(self, value: float) -> float | None:
        """A loss or a norm, unless the ranks are emulated: then it means nothing."""
        return None if self.emulate else value

    def profile(self, config: Config) -> mdcs.Profile:
        """The profile that is known, or one measured now on all ranks at once."""
        known = profiles.known(config)
        if known is not None:
            return known
        made = profiles.emulated(config)
        link, collectives, spread = (*made, {}) if made else measure_link(
            self.device, depth=config.link.depth, wanted=config.collectives.named()
        )
        batches = self.batches()

        def step() -> Tensor:
            status.set()  # it goes on: with many ranks on few cores for longer than a rank may be silent
            return self._next_loss(batches)

        status.set()
        dist.barrier()
        profile = mdcs.measure_profile(
            self.model, self.units, step, self.optimizer, world=self.world, link=link,
            iterations=config.run.profile_iterations, collectives=collectives, about=about(config),
            master_dtype=self.master_dtype, grad_dtype=self.grad_dtype,
        )  # fmt: skip
        profile = dataclasses.replace(profile, spread=profile.spread | spread)
        profile = measure_interference(agree(profile), self.model, step, self.optimizer, emulate=self.emulate)
        return rehearse(profile, self.model, self.units, step, self.optimizer, emulate=self.emulate)

    def _next_loss(self, batches: Iterator[dict[str, Tensor]]) -> Tensor:
        return self.loss(next(batches))


def about(config: Config) -> dict[str, str]:
    return {
        **measured_for(config),
        **({"emulated": f"rank {config.cluster.rank}"} if config.cluster.emulated else {}),
        "shaped_link": config.cluster.shaped_link(),
        "congestion_control": network.congestion_control(),
        "threads": str(config.cluster.threads),
        "device": profiles.device_name(config),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Raises ValueError for a pattern that matches no parameter."""
    for pattern in patterns:
        matched = [p for name, p in model.named_parameters() if fnmatch.fnmatch(name, pattern)]
        if not matched:
            raise ValueError(f"model.frozen: {pattern!r} matches no parameter")
        for p in matched:
            p.requires_grad_(False)


def wrap_policy(config: Config, block_classes: tuple[str, ...]) -> mdcs.ByClass | mdcs.BySize | mdcs.ByLeaf:
    if config.model.wrap == "size":
        return mdcs.BySize(config.model.wrap_min_params)
    return mdcs.ByLeaf() if config.model.wrap == "leaf" else mdcs.ByClass(block_classes)


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    o = config.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    common: dict[str, Any] = {
        "lr": o.lr, "weight_decay": o.weight_decay, "fused": o.fused, "foreach": o.foreach,
    }  # fmt: skip
    if o.name == "sgd":
        return torch.optim.SGD(parameters, momentum=o.momentum, **common)
    kind = torch.optim.Adam if o.name == "adam" else torch.optim.AdamW
    return kind(parameters, betas=(o.betas[0], o.betas[1]), eps=o.eps, **common)


def make_schedule(config: Config, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up to lr, then constant, or down to 0 at the last step."""
    import math

    warmup, total, name = config.optimizer.warmup_steps, config.run.steps, config.optimizer.schedule

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        if name == "linear":
            return 1 - progress
        return (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def planning_options(config: Config) -> dict[str, Any]:
    """What a plan depends on beside profile, planners and budget."""
    return {
        "micro_steps": config.run.accumulation,
        "cross_iteration": config.scheduler.cross_iteration
        and config.optimizer.clip_norm is None
        and config.run.precision != "fp16",  # whether its update is left out, all gradients say together
        "reserve": int(config.budget.reserve_mib * MIB),
    }


def make_plan(config: Config, profile: mdcs.Profile, floor: int, planning: dict[str, Any]) -> mdcs.Plan:
    s, b = config.strategy, config.budget
    if budget_bytes(config, floor) is not None and not any(slot.peak for slot in profile.slots):
        raise ValueError("a budget counts activations, and the profile has not measured them (see the warning above)")
    limits = {"solver": s.solver, "seconds": s.seconds}
    strategy: StrategyPlanner | JointPlanner
    scheduler: Scheduler | None = None
    if s.name == "joint":
        strategy = Joint(**limits, **scheduler_options(config))  # type: ignore[arg-type]
    else:
        scheduler = scheduler_of(config)
        own: dict[str, dict[str, Any]] = {"random": {"seed": s.seed}, "ilp": limits}
        strategy = STRATEGIES[s.kind or s.name](**own.get(s.name, {}))
    return mdcs.make_plan(
        mdcs.Job(profile, **planning), strategy, scheduler, budget=budget_bytes(config, floor),
        schedule_share=b.schedule_share,
    )  # fmt: skip


def scheduler_options(config: Config) -> dict[str, Any]:
    c, options = config.scheduler, dict[str, Any]()
    if c.seed is not None:
        options["seed"] = c.seed
    if c.bucket_mib is not None:
        options["bucket_mib"] = c.bucket_mib
    if c.block_mib is not None:
        options["block_mib"] = c.block_mib
    return options


def scheduler_of(config: Config) -> Scheduler:
    c, options = config.scheduler, scheduler_options(config)
    if c.name == "memory_aware":
        options |= {"solver": c.solver, "seconds": c.seconds}
    return SCHEDULERS[c.name](**options)


def budget_bytes(config: Config, floor: int | None) -> int | None:
    if config.budget.gib is not None:
        return int(config.budget.gib * GIB)
    if config.budget.over_floor is None:
        return None
    assert floor is not None, "over_floor is refused where there is no floor"
    return int(floor * (1 + config.budget.over_floor))


def write_plan(folder: Path, plan: mdcs.Plan) -> None:
    """The plan, and the replay of one period in the format of a measured timeline."""
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    replay = mdcs.replay(plan)
    names = tuple(plan.period.name(q) for q in range(plan.period.length))
    memory = tuple(SlotMemory(name, curve) for name, curve in zip(names, replay.curve, strict=True))
    timeline = Timeline(
        replay.period_s, names, (RankTimeline(PREDICTED_RANK, tuple(replay.intervals)),), memory
    )
    (folder / "predicted_timeline.json").write_text(timeline.to_json(), encoding="utf-8")


# ---- training


def train(folder: Path, config: Config, job: Job, floor: int | None) -> None:
    """Train with the config's engine; `floor` is that of the job's plan, if it has one."""
    metrics = JsonLines(folder / METRICS) if job.writes else None
    if metrics:
        metrics.write(start_event(config, job.plan, floor) if job.plan else start_of_peer(config, job))
    batches = job.batches()
    losses: dict[int, float] = {}
    kept: list[Record] = []
    warmup = config.run.warmup_steps
    gc.collect()
    gc.disable()  # a collection in the middle of a slot would be measured as compute
    with engines.prepare(config, job) as engine:
        schedule = make_schedule(config, engine.optimizer)
        for step in range(1, config.run.steps + 1):
            status.set(step=step, phase="training")
            losses[step] = train_step(config, batches, engine)
            engine.step()
            schedule.step()
            if step == warmup:
                engine.reset_memory()
            kept += report(metrics, config, job, engine, losses, flush=False)
            if config.run.eval_every and step % config.run.eval_every == 0:
                evaluate(metrics, job, engine, step)
            if step % 50 == 0:
                gc.collect()
        engine.drain()
        status.set(phase="finishing")
        kept += report(metrics, config, job, engine, losses, flush=True)
        summary = summary_event(config, job, [r for r in kept if r.step > warmup], losses, engine, floor)
        engine.write(folder)
    gc.enable()
    if metrics:
        metrics.write(summary)
        metrics.close()


def train_step(config: Config, batches: Iterator[dict[str, Tensor]], engine: Engine) -> float:
    """Forward and backward of all micro-steps; the rank's mean loss."""
    total = 0.0
    for micro in range(config.run.accumulation):
        with engine.micro_step(last=micro == config.run.accumulation - 1):
            loss = engine.loss(next(batches)) / config.run.accumulation
            engine.backward(loss)
        total += loss.item()
    return total


def evaluate(metrics: JsonLines | None, job: Job, engine: Engine, step: int) -> None:
    """Mean loss over the first held-out batches of all ranks."""
    status.set(phase="evaluating")
    job.model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with engine.evaluate(), torch.no_grad():
        for _, batch in zip(range(EVAL_BATCHES), job.batches(held_out=True, epochs=1), strict=False):
            total += torch.tensor([job.loss(batch).item(), 1.0], dtype=torch.float64)
    job.model.train()
    total = total.to(job.device)
    dist.all_reduce(total)
    if metrics and total[1] > 0:
        metrics.write({"event": "eval", "step": step, "loss": float(total[0] / total[1])})


def report(
    metrics: JsonLines | None, config: Config, job: Job, engine: Engine, losses: dict[int, float], *, flush: bool
) -> list[Record]:
    """Write the steps that have ended, messages included: one step later than compute."""
    records = engine.records(flush=flush)
    if metrics:
        retries = engine.allocator_retries()
        for r in records:
            metrics.write(
                {
                    "event": "step", "step": r.step, "warmup": r.step <= config.run.warmup_steps,
                    "loss": job.shown(losses[r.step]), **dataclasses.asdict(r.times), "bytes": r.bytes, "messages": r.messages,
                    "throughput_samples_s": job.samples_per_step / r.times.step_s,
                    "peak_bytes": engine.peak_bytes(),
                    **({} if retries is None else {"allocator_retries": retries}),
                    **({} if engine.grad_norm is None else {"grad_norm": job.shown(engine.grad_norm)}),
                }
            )  # fmt: skip
    return records


def start_event(config: Config, plan: mdcs.Plan, floor: int | None) -> dict[str, Any]:
    assert plan.prediction is not None
    predicted = dataclasses.asdict(plan.prediction)
    predicted["extra_communication_s"] = plan.job.cost.extra_communication_s(plan.sent_bytes())
    return {
        "event": "start", "time": time.time(), "emulated": plan.profile.link.emulated,
        "emulated_ranks": config.cluster.emulated, "plan_hash": plan.hash,
        "sweep": config.run.sweep, "name": config.run.name, "world": plan.world, "strategy": plan.strategy,
        "scheduler": plan.scheduler, "collectives": str(plan.profile.collectives), "model": config.model.name,
        "budget_bytes": budget_bytes(config, floor), "admission_bytes": plan.budget,
        "schedule_share": config.budget.schedule_share, "floor_bytes": floor,
        "shaped_gbit": config.cluster.rate_gbit, "congestion_control": network.congestion_control(),
        "cross_iteration": plan.cross_iteration, "outcome": plan.outcome, "bound_s": plan.bound_s,
        "predicted": predicted, "engine": config.engine.name,
    }  # fmt: skip


def start_of_peer(config: Config, job: Job) -> dict[str, Any]:
    """A peer has no plan: its name stands for the strategy, and the schedule is its own."""
    return {
        "event": "start", "time": time.time(), "emulated": False, "sweep": config.run.sweep, "name": config.run.name,
        "world": job.world, "strategy": config.engine.label, "scheduler": "own", "model": config.model.name,
        "budget_bytes": budget_bytes(config, None), "engine": config.engine.name,
    }  # fmt: skip


def summary_event(
    config: Config, job: Job, records: list[Record], losses: dict[int, float], engine: Engine, floor: int | None
) -> dict[str, Any]:
    """Medians over the steps after warm-up; bytes and messages of a whole period, as every one sends the same; memory of
    the rank that held most. By all ranks together.
    """
    times = [r.times for r in records]
    steps = sorted(t.step_s for t in times)

    def median(name: str) -> float | None:
        known = [value for t in times if (value := getattr(t, name)) is not None]
        return statistics.median(known) if known else None

    whole = records[-2] if len(records) > 1 else records[-1]  # the last is cut short by drain()
    of_engine = engine.summary(whole.bytes)  # before the ranks talk of it, which takes bytes too
    peaks: list[Any] = [None] * job.processes
    dist.all_gather_object(peaks, engine.peak_bytes())
    peak, budget = None if None in peaks else max(peaks), budget_bytes(config, floor)
    return {
        "event": "summary", "status": "ok", "steps": config.run.steps, "emulated_ranks": config.cluster.emulated,
        "step_s": {"median": statistics.median(steps), "p10": quantile(steps, 0.1), "p90": quantile(steps, 0.9)},
        **{n: median(n) for n in ("compute_s", "communication_s", "overlap_s", "exposed_s", "overlap_ratio")},
        "loss": job.shown(losses[config.run.steps]), "throughput_samples_s": job.samples_per_step / statistics.median(steps),
        "bytes": whole.bytes, "messages": whole.messages, "peak_bytes": peak,
        "fits": None if peak is None or budget is None else peak <= budget,
        **of_engine,
    }  # fmt: skip


def quantile(values: list[float], q: float) -> float:
    """Of sorted values, by linear interpolation."""
    where = q * (len(values) - 1)
    low = int(where)
    high = min(low + 1, len(values) - 1)
    return values[low] + (where - low) * (values[high] - values[low])


if __name__ == "__main__":
    main(Path(sys.argv[1]), next((what for what in ("profile", "plan") if f"--{what}-only" in sys.argv[2:]), None))
