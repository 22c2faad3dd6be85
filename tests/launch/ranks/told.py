"""A rank without torch: rank 1 raises, hangs or is killed, as the last argument says; rank 0 waits for it forever."""

import os
import signal
import sys
import time
from pathlib import Path

from launch import status

folder, what = Path(sys.argv[1]), sys.argv[2]
(folder / f"told{os.environ['RANK']}").write_text(os.environ["MDCS_SAYS"])
print(f"rank {os.environ['RANK']}, process {os.getpid()}, was told: {os.environ['MDCS_SAYS']}", flush=True)
status.set(step=3, phase="all-reduce")
if what == "all raise":
    raise ValueError("no such luck for anybody")
if what != "fine":
    if os.environ["RANK"] == "0" or what == "hung":
        time.sleep(600)
    if what == "raised":
        raise ValueError("no such luck")
    if what == "killed":  # once rank 0's process knows the step
        job = (folder / "rank1.log").resolve().parent
        while (said := status.read(job, 1)) is None or said.step != 3:
            time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
