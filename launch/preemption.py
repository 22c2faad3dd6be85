"""Handle signals by which SLURM tells a job to stop, where `hydra_plugins.mdcs_slurm` or a script has set `REQUEUE`.

A signal reaches every process of the job. In a rank it sets a flag; the ranks agree among themselves what that means.
Processes that start ranks ignore the signals, and so do their children until they call `listen`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType
from typing import NoReturn

REQUEUE = "MDCS_REQUEUE"
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""sbatch sends the signal of its `--signal`, and a preempted job gets TERM first."""

_ENDING = {"COMPLETING": "was cancelled or is out of time", "": "is over"}

asked = threading.Event()
"""Set in a rank that has received a signal to stop."""


class Terminated(KeyboardInterrupt):
    """A signal told this process to end: perhaps torchrun or srun, because a rank's process has ended. It is handled as
    Ctrl-C is: the ranks end before this process."""


def terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def expected() -> bool:
    """Return whether this job goes on later after a signal to stop."""
    return REQUEUE in os.environ


def ignore() -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def listen() -> None:
    for each in SIGNALS:
        signal.signal(each, lambda *_: asked.set())


def requeue() -> str:
    """Have SLURM start this job again, unless it was cancelled. Return why it does not, else an empty text."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    try:
        state = _said("squeue", "-h", "-j", job, "-o", "%T").strip()
        if state != "RUNNING":
            return f"job {job} " + _ENDING.get(state, f"is {state.lower()}")
        _said("scontrol", "requeue", job)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"job {job} cannot be requeued: {getattr(error, 'stderr', '') or error}".strip()
    return ""


def restarted() -> bool:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
