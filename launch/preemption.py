"""Being told by SLURM to stop: a signal comes to every process of a job, and only sets a flag in its ranks.

Those that start ranks ignore it, and so do their children from the start, until they listen. What the flag means is for the
ranks to agree on. All of it is done only where `hydra_plugins._mdcs_slurm`, or a script, has set `REQUEUE`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType

REQUEUE = "MDCS_REQUEUE"
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""sbatch's `--signal` sends what it is told to, submitit USR2; one that is preempted gets TERM first."""

asked = threading.Event()
"""Set in a rank that was told to stop."""


def expected() -> bool:
    """Whether this job is to go on later when it is told to stop."""
    return REQUEUE in os.environ


def ignore() -> None:
    """Leave the signals to the ranks, here and in all processes that this one starts."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def listen() -> None:
    """Set the flag when a signal comes, in this process."""
    for each in SIGNALS:
        signal.signal(each, _ask)


def requeue() -> str:
    """Have SLURM start this job again from its beginning; why it does not, empty if it does. A job that is cancelled is not."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    try:
        state = _said("squeue", "-h", "-j", job, "-o", "%T").strip()
        if state != "RUNNING":
            return f"job {job} is {state.lower() or 'over'}"
        _said("scontrol", "requeue", job)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"job {job} cannot be requeued: {getattr(error, 'stderr', '') or error}".strip()
    return ""


def restarted() -> bool:
    """Whether SLURM has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0


def _ask(signum: int, frame: FrameType | None) -> None:
    asked.set()


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
