"""Ranks that step together until rank 1 does, at step 3, what the first argument says.

killed: SIGKILL; raised: an exception; exited: os._exit(3): the other rank notices through its connection. hung: both wait
for good, and the file `ready` exists; that takes no torch.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launch import status

rank, what, folder = int(os.environ["RANK"]), sys.argv[1], Path(sys.argv[2])
if what != "hung":
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
(folder / f"pid{rank}").write_text(str(os.getpid()))
child = subprocess.Popen(["sleep", "600"])  # as a solver or a tracker would be
(folder / f"child{rank}").write_text(str(child.pid))
for step in range(1, 100):
    status.set(step=step, phase="all-reduce")
    if step == 3 and rank == 1:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raised":
            raise ValueError("no such luck")
        if what == "exited":
            os._exit(3)
        while not (folder / "child0").exists():
            time.sleep(0.01)
        (folder / "ready").touch()
    if what != "hung":
        dist.all_reduce(torch.ones(1))
    elif step == 3:
        time.sleep(600)
