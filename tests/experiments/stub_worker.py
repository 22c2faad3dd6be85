"""Stands in for `experiments.job.worker`: reads the config and writes the files of a run or of a plan, without training.
Its profile was measured elsewhere.

The config's `run.name` can hold what goes wrong: `early` (before the profile), `raise`, `breaks` (at step 2, on the last
rank), `kill`, `nothing` (no summary), `slow` (in a process of its own), `full` (the disk is, when rank 0 fails at step 2)
and `stays` (so afterwards).
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from analysis.events import METRICS
from experiments.config.checks import load
from experiments.job.tracking import JsonLines
from launch import status


def fill(keep: bool) -> None:
    """Fill the disk that the folder is on, until this process ends or, if `keep`, for good."""
    file = os.open(folder / "filling", os.O_CREAT | os.O_WRONLY)
    if not keep:
        (folder / "filling").unlink()
    for size in (1 << 16, 1):
        with contextlib.suppress(OSError):
            while os.write(file, b"x" * size):
                pass


folder = Path(sys.argv[1])
config = load(folder / "config.yaml")
rank = int(os.environ["RANK"])
what = config.run.name or ""
status.set(phase="planning")
if "early" in what:
    raise RuntimeError("the stub fails before it has a profile")
if rank == 0:
    (folder / "ran").write_text(" ".join(sys.argv[2:]))
    shutil.copy(Path(__file__).with_name("profile.json"), folder / "profile.json")
if rank == 0 and "--plan-only" in sys.argv:
    import mdcs
    from experiments.job.profiles import job_of, make_plan

    job = job_of(config, mdcs.Profile.from_json((folder / "profile.json").read_text()))
    (folder / "plan.json").write_text(make_plan(config, job, mdcs.floor_bytes(job)).to_json())
if "raise" in what and rank == 1:
    raise RuntimeError("the stub fails as told")
trains = not sys.argv[2:]
metrics = JsonLines(folder / METRICS) if rank == 0 and trains else None
if metrics:
    metrics.write({"event": "start", "time": time.time()})
for step in range(1, config.run.steps + 1) if trains else ():
    status.set(step=step, phase="step")
    if "kill" in what and rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if "breaks" in what and rank == config.cluster.ranks - 1 and step == 2:
        raise RuntimeError("the stub breaks as told")
    if "full" in what and rank == 0 and step == 2:
        fill(keep="stays" in what)
        raise RuntimeError("the stub fails on a full disk")
    if "slow" in what and "pytest" not in sys.modules:
        time.sleep(3 if step == 1 else 0.5)
    if metrics:
        metrics.write({"event": "step", "step": step, "warmup": False, "loss": 1.0 / step, "step_s": 0.1})
if metrics and "nothing" not in what:
    times = {"median": 0.1, "p10": 0.1, "p90": 0.1}
    summary = {"status": "ok", "steps": config.run.steps, "step_s": times, "peak_bytes": 1 << 20, "first_step_s": 2.5}
    metrics.write({"event": "summary", **summary})
