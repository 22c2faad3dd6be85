"""Jobs of SLURM: submitted, waited for, and known by the folder of each: its state, and where its ranks' output is."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_POLL_SECONDS, _SHOW_SECONDS = 0.5, 30.0
_KILLED = 128
"""Exit codes above this are of a signal."""

FILE = "submitted.json"
COMMAND = "command.txt"
"""File in the folder of each job to submit: the arguments of Python, quoted for a shell."""
BEFORE = "before.txt"
"""File in a job's folder that lists the folders of jobs that must end first: one relative path a line."""
EXIT_CODE = "exit_code"
"""File in a job's folder with the exit code of its ranks, once they have ended."""


@dataclass(frozen=True)
class Job:
    """A submitted job: SLURM's number, and the folder with the output of each rank, rank-N.log."""

    number: str
    logs: str


def submit(script: str, logs: Path, folders: Sequence[Path], made: dict[Path, Job]) -> None:
    """Submit the script of the jobs in these folders, and add them to `made`. Raises ValueError if sbatch refuses."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        why = "there is no sbatch here: submit from a login node of a SLURM cluster"
        raise ValueError(f"hydra/launcher: {why}") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"hydra.launcher: sbatch refuses the jobs: {' '.join(error.stderr.split())}") from error
    number = done.stdout.strip().partition(";")[0]
    numbers = [f"{number}_{i}" for i in range(len(folders))] if len(folders) > 1 else [number]
    made |= {folder: Job(each, str(logs / each)) for folder, each in zip(folders, numbers, strict=True)}
    for folder in folders:  # may fail on a full disk: by now `made` has the jobs, which can be cancelled
        write(folder, made[folder])
    (logs / f"{number}.sh").write_text(script, encoding="utf-8")


def wait(made: Mapping[Path, Job]) -> None:
    """Wait until every job has ended, and print the jobs' states now and then."""
    shown, printed, began = 0.0, "", time.monotonic()
    while True:
        now = states([*made.values()])
        text = table(made, now)
        if text != printed and (not any(now) or time.monotonic() - shown > _SHOW_SECONDS):
            print(text, flush=True)
            shown, printed = time.monotonic(), text
        if not any(now):
            return
        waited = time.monotonic() - began  # ask SLURM's controller less often the longer the wait
        time.sleep(min(max(_POLL_SECONDS, waited / 100), _SHOW_SECONDS / 2))


def write(folder: Path, job: Job) -> None:
    """Record the job of a folder, which has just been submitted."""
    _queue.cache_clear()  # SLURM's last answer does not have it
    (folder / FILE).write_text(json.dumps(asdict(job)), encoding="utf-8")


def read(folder: Path) -> Job | None:
    """The job of a folder; None if none was submitted."""
    try:
        return Job(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def before(folder: Path) -> list[Path]:
    """The folders of the jobs that must end before this one begins."""
    try:
        lines = (folder / BEFORE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [(folder / line).resolve() for line in lines]


def exit_code(folder: Path) -> int | None:
    """Exit code of the folder's job; None if the job has not ended, or was ended from outside."""
    try:
        return int((folder / EXIT_CODE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def states(jobs: Sequence[Job]) -> list[str]:
    """State of each job, in one call of squeue: "pending (REASON)", "running" and so on; empty if it has ended, and
    "unknown" where SLURM does not answer."""
    queue = _queue(int(time.monotonic()))
    return ["unknown" if queue is None else queue.get(job.number, "") for job in jobs]


def state(folder: Path) -> str:
    """State of the folder's job, as in `states`. Empty if there is no job."""
    job = read(folder)
    return "" if job is None else states([job])[0]


def failure(folder: Path) -> str:
    """Why the folder's job has failed, in one line with the place of its logs; empty if its ranks have ended well."""
    job, code = read(folder), exit_code(folder)
    if job is None or code == 0:
        return ""
    how = f"has ended with exit code {code}" if code is not None else "has ended without an exit code"
    if code is None or code > _KILLED:  # the controller forgets a job after minutes; there may be no accounting
        asked = ("squeue", "-h", "-t", "all", "-o", "%T"), ("sacct", "-n", "-X", "-P", "-o", "State")
        if why := next(filter(None, (said(*each, "-j", job.number) for each in asked)), ""):
            how = f"{'has ended' if code is None else how}: SLURM says {why.strip()}"
    return f"job {job.number} {how}; the output of its ranks is in {job.logs}"


def table(made: Mapping[Path, Job], states: Sequence[str]) -> str:
    """A line per job: number, state, folder. A job that has ended has its exit code."""
    words = {None: "ended", 0: "ok"}
    rows = zip(made, states, strict=True)
    shown = [state or words.get(code := exit_code(folder), f"failed ({code})") for folder, state in rows]
    width = max(map(len, shown), default=0)
    lines = zip(made.items(), shown, strict=True)
    return "\n".join(f"  {job.number:12} {how:{width}} {folder}" for (folder, job), how in lines)


def largest_array() -> int:
    """Most jobs that the cluster takes as one array; SLURM's default if it does not say."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", said("scontrol", "show", "config") or "", re.M)
    return max(1, int(found.group(1))) if found else 1001


@functools.lru_cache(maxsize=1)
def _queue(second: int) -> dict[str, str] | None:
    """The user's jobs that have not ended, by number, asked once in a second of the clock; None if SLURM's controller
    does not answer for the moment."""
    listed, found = said("squeue", "--me", "-h", "-r", "-o", "%i|%T|%r"), dict[str, str]()
    for line in (listed or "").splitlines():
        job, state, why = line.split("|")
        found[job] = state.lower() + (f" ({why})" if state == "PENDING" and why != "None" else "")
    return None if listed is None else found


def said(*command: str) -> str | None:
    """Output of one of SLURM's commands; None if there is none or it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}  # these select jobs
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
