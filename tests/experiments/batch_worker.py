"""`experiments.worker` for several jobs: starting ranks takes seconds, a small job a fraction of one.

The arguments are the jobs' folders. What a job refuses before step 1, on all ranks alike, is left in its folder, and
the next one starts. The config's `run.name` can be `another plan`: then rank 1 plans something else.
"""

import dataclasses
import gc
import os
import sys
from pathlib import Path

import torch.distributed as dist

from experiments import worker
from experiments.config import load

rank = os.environ["RANK"]
on_rank_zero = worker.on_rank_zero


def on_every_rank_its_own(make):
    plan = on_rank_zero(make)
    return dataclasses.replace(plan, reserve=plan.reserve + int(rank))


for number, folder in enumerate(map(Path, sys.argv[1:])):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # names of a new process group in torch's store
    different = load(folder / "config.yaml").run.name == "another plan"
    worker.on_rank_zero = on_every_rank_its_own if different else on_rank_zero
    try:
        worker.main(folder, "--plan-only" in sys.argv)
    except ValueError as error:
        (folder / f"refused{rank}").write_text(f"{type(error).__name__}: {error}")
        dist.destroy_process_group()
    gc.collect()  # the memory of one job is not measured in the next
