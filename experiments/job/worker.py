"""Program of every rank of a job: `python -m experiments.job.worker RUN_DIR [--profile-only | --plan-only]`.

It builds the workload of the resolved config, and trains with the config's engine (`experiments.engines`), in a loop
that is the same for all: a peer needs no plan, mdcs runs the one that is planned on rank 0. Without a profile the first
steps of training measure it. A run that is too short, or that goes on from a checkpoint, measures before it trains.
Rank 0 writes the files of the run folder, and the events to metrics.jsonl.
"""

from __future__ import annotations

import datetime
import gc
import os
import statistics
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mdcs
from analysis.events import METRICS, last_attempt, read_events
from experiments.config.checks import load
from experiments.config.schema import Config
from experiments.engines.base import Engine, Record
from experiments.job import checkpoints, events
from experiments.job.checkpoints import Checkpoints
from experiments.job.profiles import floor_of, job_of, make_plan, write_plan
from experiments.job.record import INFEASIBLE
from experiments.job.tracking import JsonLines
from experiments.job.workload import Workload, make_schedule, throughput_of
from launch import preemption, rendezvous, status
from launch.elastic import Cluster
from mdcs.api.loop_plan import Choice
from mdcs.profiler.consensus import on_rank_zero
from mdcs.profiler.stages import Ran, Stage, with_trials

_STOP_EVERY_S, _STOP_MOST_STEPS = 1.0, 1000
"""Time and largest number of steps between two exchanges of ranks about stopping."""


def main(folder: Path, only: str | None = None) -> None:
    """Run this rank to its end, or until the "profile" or the "plan" is written. Every error is raised, and
    `launch.rank` reports it."""
    config = load(folder / "config.yaml")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    status.set(phase=status.JOINING)
    if preemption.expected():
        preemption.listen()
    device = start(config)
    workload = Workload(config, rank, world, device)
    checkpoints.require_same_model(config, folder, workload.model)
    try:
        if config.engine.plans:
            plan_job(folder, workload, only)
        if only is None:
            train(folder, workload)
    except mdcs.InfeasibleBudget as error:  # on every rank: a result, and no failure of a rank
        if workload.writes:
            with JsonLines(folder / METRICS) as metrics:
                metrics.write(events.failure_event(str(error), status=INFEASIBLE))
    dist.barrier()
    if preemption.expected():
        preemption.ignore()  # Python removes its signal handlers before it exits
    dist.destroy_process_group()


def plan_job(folder: Path, workload: Workload, only: str | None) -> None:
    """Make the workload's plan, or the choice of one in its first steps; for "profile" only write the profile."""
    status.set(phase="profiling")
    profile = workload.known_profile()
    in_training = only is None and workload.iterations > 0
    if profile is None and not (in_training and not checkpoints.resumes(workload.config, folder)):
        profile = workload.profile()
    if only is None:
        workload.choice = Choice(stages(folder, workload, profile))
        return
    assert profile is not None
    if only == "profile":
        write_profile(folder, workload, profile)
    else:
        write_planned(folder, workload, planned(folder, workload, profile))


def stages(folder: Path, workload: Workload, profile: mdcs.Profile | None) -> Generator[Stage, Ran, mdcs.Plan]:
    """Yield the first steps of training, in which a profile is measured where none is known, and plans are tried.
    Return the plan of the other steps."""
    measured = profile is None
    if profile is None:
        profile = yield from workload.measuring()
    plan = yield from workload.choosing(planned(folder, workload, profile), measured=measured)
    write_planned(folder, workload, plan)
    return plan


def write_profile(folder: Path, workload: Workload, profile: mdcs.Profile) -> None:
    print(f"collectives: {profile.collectives}", flush=True)
    if workload.writes:
        (folder / "profile.json").write_text(profile.to_json(), encoding="utf-8")


def planned(folder: Path, workload: Workload, profile: mdcs.Profile) -> mdcs.Plan:
    """Write the profile, and return the plan of the config."""
    write_profile(folder, workload, profile)
    job = job_of(workload.config, profile)
    workload.floor = floor = floor_of(workload.config, job)
    status.set(phase="planning")
    return on_rank_zero(lambda: make_plan(workload.config, job, floor))


def write_planned(folder: Path, workload: Workload, plan: mdcs.Plan) -> None:
    workload.plan = with_trials(plan, workload.trials)
    if workload.writes:
        write_plan(folder, workload.plan)


def start(config: Config) -> torch.device:
    """Set up threads, device and process group of this rank. Return the device."""
    torch.set_num_threads(config.cluster.resolved_threads())
    timeout = datetime.timedelta(seconds=config.cluster.timeout_s)
    device = torch.device("cpu")
    if config.cluster.device == "cuda":
        if not torch.cuda.is_available():  # on another host than the program's
            raise ValueError("cluster.device: needs a GPU, and torch finds none; got cuda")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rendezvous.meet(config.cluster.timeout_s + Cluster.startup_s)
    dist.init_process_group(config.cluster.resolved_backend(), timeout=timeout)
    return device


def train(folder: Path, workload: Workload) -> None:
    """Train with the config's engine. The first steps may measure and choose the plan: they are warm-up."""
    config, run = workload.config, workload.config.run
    metrics = JsonLines(folder / METRICS) if workload.writes else None
    throughput = throughput_of(workload)
    parameters = sum(p.numel() for p in workload.model.parameters())

    def tell_plan() -> None:
        if metrics:
            plan, floor, trials = workload.plan, workload.floor, workload.trials
            metrics.write(events.start_event(config, plan, floor, trials, throughput, parameters))

    tell_plan()
    choosing = workload.plan is None and workload.choice is not None
    if run.eval_every:
        workload.batches(held_out=True, epochs=1)  # raises now if there are too few samples
    losses, processor, learning_rates = dict[int, float | Tensor](), dict[int, float](), dict[int, float]()
    beside_s = {"evaluation_s": 0.0, "checkpoint_s": 0.0}  # work that is in no step
    kept: list[Record] = []
    first: float | None = None  # unix time at which the first step ended
    gc.collect()
    gc.disable()  # a collection in the middle of a slot would be measured as compute
    with config.engine.prepare(config, workload) as engine:
        used = time.process_time()
        schedule = make_schedule(config, engine.optimizer)
        checkpoints = Checkpoints(config, folder, engine, schedule, metrics)
        done = checkpoints.resume()
        warmup = min(done + run.unmeasured_steps, run.steps - 1)  # the first steps after a resumption are warm-up again

        def tell(*, flush: bool) -> list[Record]:
            """Write the events of steps that have ended on the device. Return the records."""
            records = engine.records(flush=flush)
            for record in records:
                losses[record.step] = loss = float(losses[record.step])
                if metrics:
                    known = {"learning_rate": learning_rates[record.step], "processor_s": processor[record.step]}
                    is_warmup = choosing or record.step <= warmup
                    metrics.write(events.step_event(workload, engine, record, loss, is_warmup, throughput) | known)
            return records

        @contextmanager
        def beside(what: str) -> Iterator[None]:
            """Time the block by itself, not as a part of the next step, to which messages in flight belong."""
            nonlocal used
            engine.drain()
            began, used_before = time.perf_counter(), time.process_time()
            with engine.pause():
                yield
            beside_s[what] += time.perf_counter() - began
            used += time.process_time() - used_before

        batches = workload.batches(first_step=done * run.accumulation, workers=config.data.workers)
        stop = Stop(done) if preemption.expected() and config.engine.plans else None
        for step in range(done + 1, run.steps + 1):
            status.set(step=step, phase="measuring" if choosing else "training")
            losses[step] = train_step(workload, batches, engine)
            engine.step()
            first = first or time.time()
            learning_rates[step] = float(engine.optimizer.param_groups[0]["lr"])
            schedule.step()
            processor[step], used = time.process_time() - used, time.process_time()
            if choosing and workload.plan is not None:
                choosing, warmup = False, min(max(warmup, step + 1), run.steps - 1)  # the next step has a handover
                tell_plan()
            if step == warmup:
                engine.reset_memory()
            kept += tell(flush=False)
            if run.eval_every and step % run.eval_every == 0:
                with beside("evaluation_s"):
                    evaluate(metrics, workload, engine, step)
            if checkpoints.due(step):
                with beside("checkpoint_s"):
                    checkpoints.save(step)
            if stop is not None and step < run.steps and stop.asked(step):
                engine.drain()
                tell(flush=True)
                checkpoints.leave(step)
                return
            if step % 50 == 0:
                with engine.pause():
                    gc.collect()
        engine.drain()
        if choosing:
            few = f"{run.steps} steps are too few to choose a plan"
            raise ValueError(f"run.steps: {few}: raise it, or run mdcs profile first")
        status.set(phase="finishing")
        checkpoints.finish()
        kept += tell(flush=True)
        departures = events.departures([record for record in kept if not record.plan])
        kept = [record for record in kept if record.step > warmup]
        of_engine = engine.summary(events.whole_step(kept).bytes)  # before collectives that take bytes, too
        loss, peak = over_ranks(workload, float(losses[run.steps]), engine.peak_bytes())
        summary = events.summary_event(workload, kept, loss, peak, processor, throughput)
        engine.write(folder)
    gc.enable()
    if metrics:
        began = last_attempt(read_events(folder / METRICS))[0]["began"]
        first_step = {"first_step_s": None if first is None else first - began}
        metrics.write(summary | departures | beside_s | of_engine | first_step)
        metrics.close()


class Stop:
    """Lets the ranks agree, about once a second, that one of them was told to stop a job that continues later. All
    ranks count the same number of steps between two exchanges. The slowest rank's step time decides how many."""

    def __init__(self, step: int) -> None:
        """Make the process group; all ranks must call this. `step` steps are done already."""
        self._said = torch.zeros(2, dtype=torch.float64)
        self._group = dist.new_group(backend="gloo")
        self._last, self._since, self._next = step, time.monotonic(), step + 1

    def asked(self, step: int) -> bool:
        """Return whether any rank was told to stop. The answer is the same on all ranks."""
        if step < self._next:
            return False
        now = time.monotonic()
        self._said[0], self._said[1] = float(preemption.asked.is_set()), (now - self._since) / (step - self._last)
        dist.all_reduce(self._said, op=dist.ReduceOp.MAX, group=self._group)
        told, step_s = self._said.tolist()
        steps = min(max(1, int(_STOP_EVERY_S / max(step_s, 1e-6))), _STOP_MOST_STEPS)
        self._last, self._since, self._next = step, now, step + steps
        return bool(told)


def train_step(workload: Workload, batches: Iterator[dict[str, Tensor]], engine: Engine) -> float | Tensor:
    """Run forward and backward of all micro-steps. Return this rank's mean loss. From a GPU the loss is copied to the
    host without a wait. It may be read once the step has ended on the device."""
    micro_steps = workload.config.run.accumulation
    total: float | Tensor = 0.0
    for micro in range(micro_steps):
        with engine.micro_step(last=micro == micro_steps - 1):
            loss = engine.loss(next(batches)) / micro_steps
            engine.backward(loss)
        total = total + (loss.item() if loss.is_cpu else loss.detach().double())
    return total if isinstance(total, float) else total.to("cpu", non_blocking=True)


def evaluate(metrics: JsonLines | None, workload: Workload, engine: Engine, step: int) -> None:
    """Record the mean loss over the first `run.eval_batches` held-out batches of every rank."""
    status.set(phase="evaluating")
    workload.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=workload.device)
    with engine.evaluate(), torch.no_grad():
        for batch in islice(workload.batches(held_out=True, epochs=1), workload.config.run.eval_batches):
            total += torch.stack([workload.loss(batch).double(), total.new_ones(())])
    workload.model.train()
    dist.all_reduce(total)
    if metrics and total[1] > 0:
        metrics.write({"event": "eval", "step": step, "loss": float(total[0] / total[1])})


def over_ranks(workload: Workload, loss: float, peak: int | None) -> tuple[float, int | None]:
    """Mean loss and highest peak in bytes of all ranks; no peak if a rank measures none. Called after training."""
    told: list[Any] = [None] * workload.processes
    dist.all_gather_object(told, (loss, peak))
    losses, peaks = zip(*told, strict=True)
    return statistics.fmean(losses), None if None in peaks else max(peaks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), next((what for what in ("profile", "plan") if f"--{what}-only" in sys.argv[2:]), None))
