"""Program of every rank of a job: `python -m experiments.job.worker RUN_DIR [--profile-only | --plan-only]`.

It builds the workload of the resolved config, and trains with the config's engine (`experiments.engines`): a peer needs
no plan, mdcs runs the one that is planned on rank 0. Without a profile the first steps of training measure it. A run
that is too short, or that goes on from a checkpoint, measures before it trains. Rank 0 writes the files of the run
folder.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Generator
from pathlib import Path

import torch
import torch.distributed as dist

import mdcs
from analysis.events import METRICS
from experiments.config.checks import load
from experiments.config.schema import Config
from experiments.job import checkpoints
from experiments.job.events import failure_event
from experiments.job.profiles import floor_of, job_of, make_plan, write_plan
from experiments.job.record import INFEASIBLE
from experiments.job.tracking import JsonLines
from experiments.job.training import train
from experiments.job.workload import Workload
from launch import preemption, rendezvous, status
from launch.elastic import Cluster
from mdcs.api.loop_plan import Choice
from mdcs.profiler.consensus import on_rank_zero
from mdcs.profiler.stages import Ran, Stage, with_trials


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
        if config.engine.plans:
            plan_job(folder, workload, only)
        if only is None:
            train(folder, workload)
    except mdcs.InfeasibleBudget as error:  # on every rank: a result, and no failure of a rank
        if workload.writes:
            with JsonLines(folder / METRICS) as metrics:
                metrics.write(failure_event(str(error), status=INFEASIBLE))
    dist.barrier()
    if preemption.expected():
        preemption.ignore()  # Python removes its signal handlers before it exits
    dist.destroy_process_group()


def plan_job(folder: Path, workload: Workload, only: str | None) -> None:
    """Make the workload's plan, or the choice of one in its first steps; for "profile" only write the profile."""
    status.set(phase="profiling")
    profile = workload.known_profile()
    is_measured = profile is None and only is None and workload.iterations > 0
    if profile is None and not (is_measured and not checkpoints.resumes(workload.config, folder)):
        profile = workload.profile()
    if only == "profile":
        assert profile is not None
        write_profile(folder, workload, profile)
    elif only == "plan":
        assert profile is not None
        write_planned(folder, workload, planned(folder, workload, profile))
    else:
        workload.choice = Choice(stages(folder, workload, profile))


def stages(folder: Path, workload: Workload, profile: mdcs.Profile | None) -> Generator[Stage, Ran, mdcs.Plan]:
    """Yield the first steps of training, in which a profile is measured where none is known, and plans are tried.

    Return the plan of the other steps.
    """
    measured = profile is None
    if profile is None:
        profile = yield from workload.measuring()
    plan = yield from workload.choosing(planned(folder, workload, profile), measured=measured)
    write_planned(folder, workload, plan)
    return plan


def write_profile(folder: Path, workload: Workload, profile: mdcs.Profile) -> None:
    """Write profile.json."""
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
    """Write the plan of the workload from now on."""
    workload.plan = with_trials(plan, workload.trials)
    if workload.writes:
        write_plan(folder, workload.plan)


def start(config: Config) -> torch.device:
    """Set up threads, device and process group of this rank. Return the device."""
    torch.set_num_threads(config.cluster.resolved_threads())
    timeout = datetime.timedelta(seconds=config.cluster.timeout_s)
    if config.cluster.device == "cuda":
        if not torch.cuda.is_available():  # on another host than the program's
            raise ValueError("cluster.device: needs a GPU, and torch finds none; got cuda")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    rendezvous.meet(config.cluster.timeout_s + Cluster.startup_s)
    dist.init_process_group(config.cluster.resolved_backend(), timeout=timeout)
    return device


if __name__ == "__main__":
    main(Path(sys.argv[1]), next((what for what in ("profile", "plan") if f"--{what}-only" in sys.argv[2:]), None))
