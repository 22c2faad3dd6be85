"""Show the jobs of a sweep that was submitted, and the output of their ranks.

    mdcs jobs FOLDER                # each job's number, state and folder, with its step or why it has failed
    mdcs jobs FOLDER --log 3:1      # the last lines of rank 1 of the run in FOLDER/3 (without :1 those of rank 0)
    mdcs jobs FOLDER --log 3 -f     # and what it writes from now on
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from experiments.job.submission import settled
from hydra_plugins import _mdcs_jobs as jobs
from launch import status
from launch.place import require_alone


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or replace this process by `tail`. Return the exit code: 2 where there is nothing to show."""
    require_alone("mdcs jobs")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="mdcs jobs", description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--log", metavar="RUN[:RANK]")
    parser.add_argument("-f", "--follow", action="store_true")
    asked = parser.parse_args(arguments)
    folders = (file.parent for file in sorted(asked.folder.rglob(jobs.FILE)))
    found = {folder: job for folder in folders if (job := jobs.read(folder)) is not None}
    if not found:
        return _refuse(f"{asked.folder}: no job was submitted from here")
    if asked.log is None:
        states = jobs.states([*found.values()])
        for folder, state, line in zip(found, states, jobs.table(found, states).splitlines(), strict=True):
            note = settled(folder, waited=True) if not state else _step(folder) if state == "running" else ""
            print(f"{line}: {note}" if note else line)
        return 0
    run, _, rank = asked.log.partition(":")
    if (job := found.get(asked.folder / run)) is None:
        return _refuse(f"--log: no job {run}; jobs: {', '.join(str(each.relative_to(asked.folder)) for each in found)}")
    rank, own = rank or "0", asked.folder / run
    logs = [file for file in (own / f"rank{rank}.log", Path(job.logs) / f"rank-{rank}.log") if file.exists()]
    if not logs:
        return _refuse(f"--log: rank {rank} of job {run} has written nothing so far, in {own} and {job.logs}")
    sys.stdout.flush()
    os.execvp("tail", ["tail", "-n", "40", *(["-F"] if asked.follow else []), *map(str, logs)])


def _step(folder: Path) -> str:
    said = status.read(folder, 0)
    return f"step {said.step} ({said.phase})" if said is not None else ""


def _refuse(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
