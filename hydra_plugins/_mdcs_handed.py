"""The scheduler's job to which a run's folder was handed in, and whether that job has ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

FILE = "handed_in.json"
BEFORE = "before.txt"
"""File in a job's folder that lists the folders of jobs that must end first: one relative path a line."""
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


def note(folder: Path, executor: str, job: str) -> None:
    """Record in the folder how it was handed in: as a SLURM job ("slurm") or a process of this machine ("local")."""
    (folder / FILE).write_text(json.dumps({"executor": executor, "job": job}), encoding="utf-8")


def before(folder: Path) -> list[Path]:
    """The folders of the jobs that must end before this one begins."""
    try:
        lines = (folder / BEFORE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [(folder / line).resolve() for line in lines]


def number(folder: Path) -> str | None:
    """The number of the job that the folder was handed in as, or None if it was not handed in."""
    try:
        return str(json.loads((folder / FILE).read_text(encoding="utf-8"))["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def queue() -> dict[str, str] | None:
    """SLURM's state of every job that has not ended, by job number; None if SLURM does not answer."""
    try:
        listed = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # the controller may be unavailable for a moment
        return None
    known = (line.split() for line in listed.splitlines())
    return {job: state for job, state in known if state not in _OVER}


def state(folder: Path) -> str:
    """State of the job that the folder was handed in as. Empty if the job has ended or there was none."""
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
        executor, job = str(said["executor"]), str(said["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if executor == "slurm":
        known = queue()
        return "unknown" if known is None else known.get(job, "")
    return "RUNNING" if job.isdigit() and os.path.exists(f"/proc/{job}") else ""


def cancel(executor: str, job: str) -> None:
    """End a SLURM job, or a child of this process. Does nothing if the number is no longer such a job."""
    if executor == "slurm":
        subprocess.run(["scancel", job], capture_output=True, check=False)
    elif int(job) in _children(os.getpid()):
        end(int(job))


def end(pid: int) -> None:
    """Kill a process with all of its descendants. A signal to the process alone reaches only the shell that starts it.
    """
    tree = [pid]
    for each in tree:  # the list grows during the loop
        tree += _children(each)
    for each in tree:
        with contextlib.suppress(OSError):
            os.kill(each, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, children.read_text(encoding="ascii").split())
    return found
