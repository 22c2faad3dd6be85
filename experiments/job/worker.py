"""Program of every rank of a job: `python -m experiments.job.worker RUN_DIR [--profile-only | --plan-only]`.

It builds the workload of the resolved config, measures a profile (or reads one),
plans on rank 0, and trains with the config's engine (`experiments.engines`): mdcs runs the plan, a peer needs none.
Rank 0 writes the files of the run folder.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mdcs
from analysis.events import METRICS
from experiments.config.checks import load
from experiments.config.schema import Config
from experiments.job import checkpoints
from experiments.job.events import failure_event
from experiments.job.planning import floor_of, job_of, make_plan, write_plan
from experiments.job.record import INFEASIBLE
from experiments.job.tracking import JsonLines
from experiments.job.training import train
from experiments.job.workload import Workload
from launch import preemption, rendezvous, status
from mdcs.profiler.consensus import on_rank_zero


def main(folder: Path, only: str | None = None) -> None:
    """Run this rank to its end, or until the "profile" or the "plan" is written.

    Every error is raised, and `launch.rank` reports it.
    """
    config = load(folder / "config.yaml")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    status.set(phase=status.JOINING)
    if preemption.expected():
        preemption.listen()
    device = start(config)
    workload = Workload(config, rank, world, device)
    checkpoints.require_same_model(config, folder, workload.model)
    try:
        floor = plan_job(folder, workload, only) if config.engine.plans else None
        if only is None:
            train(folder, workload, floor)
    except mdcs.InfeasibleBudget as error:  # on every rank: a result, and no failure of a rank
        if workload.writes:
            with JsonLines(folder / METRICS) as metrics:
                metrics.write(failure_event(str(error), status=INFEASIBLE))
    dist.barrier()
    if preemption.expected():
        preemption.ignore()  # Python removes its signal handlers before it exits
    dist.destroy_process_group()


def plan_job(folder: Path, workload: Workload, only: str | None) -> int:
    """Make the workload's plan, or, for "profile", only write the profile. Return the floor in bytes."""
    config = workload.config
    status.set(phase="profiling")
    profile = workload.profile()
    print(f"collectives: {profile.collectives}", flush=True)
    if workload.writes:
        (folder / "profile.json").write_text(profile.to_json(), encoding="utf-8")
    job = job_of(config, profile)
    floor = floor_of(config, job)
    if only != "profile":
        status.set(phase="planning")
        workload.plan = on_rank_zero(lambda: make_plan(config, job, floor))
        if only is None:
            workload.try_plans()
        if workload.writes:
            write_plan(folder, workload.plan)
    return floor


def start(config: Config) -> torch.device:
    """Set up threads, device and process group of this rank. Return the device."""
    torch.set_num_threads(config.cluster.resolved_threads())
    timeout = datetime.timedelta(seconds=config.cluster.timeout_s)
    if config.cluster.device == "cuda":
        if not torch.cuda.is_available():  # on another host than the program's
            raise ValueError("cluster.device: torch finds no GPU here, got cuda")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    rendezvous.meet(config.cluster.timeout_s + config.cluster.startup_s)
    dist.init_process_group(config.cluster.resolved_backend(), timeout=timeout)
    return device


if __name__ == "__main__":
    main(Path(sys.argv[1]), next((what for what in ("profile", "plan") if f"--{what}-only" in sys.argv[2:]), None))
