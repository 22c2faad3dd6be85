"""A rank without torch: rank 1 raises or is killed at step 3, as the last argument says, and rank 0 waits for it forever."""

import os
import signal
import sys
import time
from pathlib import Path

from launch import status

folder, what = Path(sys.argv[1]), sys.argv[2]
(folder / f"told{os.environ['RANK']}").write_text(os.environ["MDCS_SAYS"])
print(f"rank {os.environ['RANK']} was told: {os.environ['MDCS_SAYS']}", flush=True)
status.set(step=3, phase="all-reduce")
if what != "fine":
    if os.environ["RANK"] == "0":
        time.sleep(600)
    if what == "raised":
        raise ValueError("no such luck")
    os.kill(os.getpid(), signal.SIGKILL)
