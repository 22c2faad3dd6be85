"""Run submitted jobs: on SLURM, or in processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hydra_plugins import _mdcs_jobs as jobs

_POLL_SECONDS = 0.5
_SHOW_SECONDS = 30.0


class Slurm:
    """Submits jobs with sbatch.

    made: the jobs, by folder.
    """

    def __init__(self) -> None:
        self.made: dict[Path, jobs.Job] = {}

    def start(self, text: str, logs: Path, folders: Sequence[Path], after: Sequence[jobs.Job]) -> None:
        """Submit the script of these jobs. It says itself which jobs must end before. Raises ValueError if sbatch refuses it.
        """
        try:
            said = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            raise ValueError("hydra/launcher: there is no sbatch here: submit from a login node of a SLURM cluster") from None
        except subprocess.CalledProcessError as error:
            raise ValueError(f"hydra.launcher: sbatch refuses the jobs: {' '.join(error.stderr.split())}") from error
        number = said.strip().partition(";")[0]
        for i, folder in enumerate(folders):
            self._add("slurm", f"{number}_{i}" if len(folders) > 1 else number, folder, logs)
        (logs / f"{number}.sh").write_text(text, encoding="utf-8")  # last: a full disk must not hide jobs from `cancel`

    def wait(self) -> None:
        """Wait until every job has ended, and print the jobs' states now and then."""
        shown, said, began = 0.0, "", time.monotonic()
        while True:
            states = jobs.states([*self.made.values()])
            table = jobs.table(self.made, states)
            if table != said and (not any(states) or time.monotonic() - shown > _SHOW_SECONDS):
                print(table, flush=True)
                shown, said = time.monotonic(), table
            if not any(states):
                return
            waited = time.monotonic() - began  # ask SLURM's controller less often the longer the wait
            time.sleep(min(max(_POLL_SECONDS, waited / 100), _SHOW_SECONDS / 2))

    def cancel(self) -> None:
        """End all jobs."""
        if self.made:
            jobs.said("scancel", *(job.number for job in self.made.values()))

    def _add(self, executor: str, number: str, folder: Path, logs: Path) -> None:
        self.made[folder] = jobs.Job(executor, number, str(logs / number))
        jobs.write(folder, self.made[folder])


class Local(Slurm):
    """Starts jobs as processes of this machine, `parallel` at a time."""

    def __init__(self, parallel: int) -> None:
        super().__init__()
        self.parallel, self.processes = parallel, list[subprocess.Popen[bytes]]()

    def start(self, text: str, logs: Path, folders: Sequence[Path], after: Sequence[jobs.Job]) -> None:
        """Start the jobs of this script, each as soon as there is a slot, and after those that must end before."""
        while any(jobs.states([*self.made.values(), *after])):
            time.sleep(_POLL_SECONDS)
        for i, folder in enumerate(folders):
            while sum(map(bool, jobs.states([*self.made.values()]))) >= self.parallel:
                time.sleep(_POLL_SECONDS)
            env = os.environ | {"SLURM_ARRAY_TASK_ID": str(i)}
            process = subprocess.Popen(["bash", "-c", text], stdin=subprocess.DEVNULL, env=env, start_new_session=True)
            self.processes.append(process)
            self._add("local", str(process.pid), folder, logs)

    def cancel(self) -> None:
        """End all jobs."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks end with it
