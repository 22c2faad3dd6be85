"""`experiments.job.worker` for several jobs: starting ranks takes seconds, a small job a fraction of one.

The arguments are the jobs' folders. What a job refuses before step 1, on all ranks alike, is left in its folder, and
the next one starts. Where the machine is busy a job waits for longer than its config says. Of `model=timed` an evaluation and a
checkpoint take a second more. The config's `run.name` can be `another plan`: then rank 1 plans something else.
"""

import dataclasses
import datetime
import gc
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from experiments.config.checks import load
from experiments.job import worker
from experiments.job.checkpoints import Checkpoints
from tests.experiments import hurry  # noqa: F401

PATIENT = {"timeout": datetime.timedelta(seconds=200)}
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
init_process_group, on_rank_zero = dist.init_process_group, worker.on_rank_zero
evaluate, save = worker.evaluate, Checkpoints.save
pause = 0
worker.evaluate = lambda *arguments: (evaluate(*arguments), time.sleep(pause))
Checkpoints.save = lambda *arguments: (save(*arguments), time.sleep(pause))


def on_every_rank_its_own(make):
    plan = on_rank_zero(make)
    return dataclasses.replace(plan, job=dataclasses.replace(plan.job, reserve=plan.reserve + rank))


for folder in map(Path, sys.argv[1:]):
    # Each process group in a corner of the agent's store, where the one before it has left no keys.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    own = {"store": dist.PrefixStore(str(folder), agent), "rank": rank, "world_size": world}
    dist.init_process_group = lambda backend, own=own, **options: init_process_group(backend, **own, **options | PATIENT)
    config = load(folder / "config.yaml")
    pause = 1 if config.model.name == "timed" else 0
    worker.on_rank_zero = on_every_rank_its_own if config.run.name == "another plan" else on_rank_zero
    try:
        worker.main(folder)
    except ValueError as error:
        (folder / f"refused{rank}").write_text(f"{type(error).__name__}: {error}")
        dist.destroy_process_group()
    gc.collect()  # the memory of one job is not measured in the next
