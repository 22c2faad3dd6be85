"""Ranks that step together until rank 1 does, at step 3, what the first argument says.

killed: SIGKILL; raised: an exception; exited: os._exit(3); hung: it stops taking part, and the file `ready`
exists. The other rank notices through its connection.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from launch import status

dist.init_process_group("gloo")
rank = dist.get_rank()
what, folder = sys.argv[1], Path(sys.argv[2])
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
        (folder / "ready").touch()
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
