"""A rank that tokenizes for longer than the job's timeouts, unless another rank has done it: `FOLDER TIMEOUT_S`."""

import datetime
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from experiments.job.workload import prepared

folder, timeout_s = Path(sys.argv[1]), float(sys.argv[2])


def tokenize() -> None:
    until = time.monotonic() + 2 * timeout_s
    while not (folder / "cache").exists() and time.monotonic() < until:
        sum(range(10_000))
    (folder / "cache").touch(exist_ok=True)
    with (folder / "order").open("a") as order:
        order.write(os.environ["RANK"])


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
prepared("tokenizing", tokenize, in_turn=True)
dist.barrier()
dist.destroy_process_group()
