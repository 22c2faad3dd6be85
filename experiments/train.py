"""Plan and train: one job, or with -m a sweep of jobs.

    mdcs train strategy=greedy scheduler=fusion budget=0.5GiB
    mdcs train -m strategy=dp,fsdp scheduler=wfbp,fusion
    torchrun --nnodes 2 --nproc-per-node 4 … experiments/train.py strategy=fsdp
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

import analysis
from analysis.events import METRICS, read_events
from experiments.config import checks
from experiments.config.schema import Config
from experiments.job import app
from experiments.job import run as jobs
from experiments.job.events import command_began
from experiments.job.profiles import Profiles
from experiments.job.sweep import report
from launch.elastic import Warm


def main() -> int:
    began, console, profiles = time.time(), Console(), Profiles()

    def train(config: Config, folder: Path) -> str:
        in_sweep = config.run.sweep is not None
        here = checks.here is None and config.cluster.name != "joined"
        fork = here and in_sweep and config.sweep.warm and config.engine.plans and config.cluster.device == "cpu"
        outcome = jobs.run(
            config, folder, console, known=profiles, start=warm.run if fork else None,
            began=None if in_sweep else command_began(),
        )  # fmt: skip
        if outcome.ok and not in_sweep:
            print()
            analysis.print_table(analysis.runs(folder))
            seconds = read_events(folder / METRICS)[-1]["first_step_s"]
            first = "" if seconds is None else f"; its first step ended after {seconds:.1f} s"
            print(f"the run is in {folder}{first}; mdcs report {folder} draws it", flush=True)
        return jobs.reason_of(outcome)

    with Warm() as warm:
        return app.Program(
            train, on_sweep_end=lambda session: report(session, began), on_earlier=profiles.adopt,
            objective=lambda folder: float(analysis.load_run(folder).row()["step_s"]), freezes=True,
        ).run()  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
