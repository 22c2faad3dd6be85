"""Handle signals by which SLURM tells a job to stop.

A signal reaches every process of the job. In a rank it sets a flag.

Processes that start ranks ignore the signals. Their children ignore the signals too, until they call `listen`. The
ranks agree among themselves what the flag means. All of this happens only where `REQUEUE` is set, by
`hydra_plugins.mdcs_slurm` or by a script.
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
    """A signal told this process to end: perhaps torchrun or srun, because a rank's process has ended."""


def terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM as Ctrl-C is handled: the ranks end before this process."""
    raise Terminated


def expected() -> bool:
    """Return whether this job continues later after a signal to stop."""
    return REQUEUE in os.environ


def ignore() -> None:
    """Ignore the signals in this process and in all processes that it starts."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def listen() -> None:
    """Set the flag of this process when a signal arrives."""
    for each in SIGNALS:
        signal.signal(each, _ask)


def requeue() -> str:
    """Have SLURM start this job again from its beginning. Return the reason if SLURM does not, else an empty text.

    A job that was cancelled is not started again.
    """
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
    """Return whether SLURM has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0


def _ask(signum: int, frame: FrameType | None) -> None:
    asked.set()


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
