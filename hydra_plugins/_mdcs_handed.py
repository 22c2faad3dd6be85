"""Which job of a scheduler a run's folder was handed in as, and whether that is still to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

FILE = "handed_in.json"
BEFORE = "before.txt"
"""In a job's folder: those of jobs that are to end before it begins, a path from its own on a line each."""
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


def note(folder: Path, executor: str, job: str) -> None:
    """Leave it in the folder: a job of SLURM's ("slurm"), or a process of this machine ("local")."""
    (folder / FILE).write_text(json.dumps({"executor": executor, "job": job}), encoding="utf-8")


def before(folder: Path) -> list[Path]:
    """The folders of the jobs that are to end before this one begins."""
    try:
        lines = (folder / BEFORE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [(folder / line).resolve() for line in lines]


def number(folder: Path) -> str | None:
    """The job that the folder was handed in as; None: it was not."""
    try:
        return str(json.loads((folder / FILE).read_text(encoding="utf-8"))["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def queue() -> dict[str, str] | None:
    """SLURM's word for every job that has not ended, by its number; None if it does not answer."""
    try:
        listed = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # its controller may be away for a moment
        return None
    known = (line.split() for line in listed.splitlines())
    return {job: state for job, state in known if state not in _OVER}


def state(folder: Path) -> str:
    """How the job stands that the folder was handed in as; empty: it has ended, or there was none."""
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
    """End it: a job of SLURM's, or a child of this process; a number that is neither any more is left alone."""
    if executor == "slurm":
        subprocess.run(["scancel", job], capture_output=True, check=False)
    elif int(job) in _children(os.getpid()):
        end(int(job))


def end(pid: int) -> None:
    """Kill a process with all that it has started: a signal to it would end at the shell that sets jobs up."""
    tree = [pid]
    for each in tree:  # which grows
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
