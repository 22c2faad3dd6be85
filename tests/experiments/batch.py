"""Configs of jobs, jobs that say nothing, and several with one start of ranks, which takes longer than a small job."""

import io
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from experiments.config import checks
from experiments.config.schema import Config
from experiments.job import run as jobs
from experiments.job.events import job_event
from experiments.job.resolved import environment, resolve
from launch import elastic
from launch.elastic import Outcome, Warm

QUIET = Console(file=io.StringIO())


def composed(*overrides: str) -> Config:
    with checks.composing():
        return checks.compose_config(overrides)


def run_job(config: Config, folder: Path, *, worker: str | None = "tests.experiments.hasty_worker", **options) -> Outcome:
    """Run a job, whose profile is measured in a hurry unless it has another worker."""
    return jobs.run(config, folder, QUIET, worker=worker, **options)


def run_all(folder: Path, configs: Mapping[str, Config], warm: Warm) -> None:
    """Run jobs, which need ranks like the first, in folders of these names; what one refuses is left in its folder."""
    resolved = {name: resolve(config) for name, config in configs.items()}
    for name, config in resolved.items():
        jobs.begin(config, folder / name, job_event(config))
    first = next(iter(resolved.values()))
    outcome = warm.run(
        folder / "launch", elastic.Cluster(first.cluster.processes, 200, 60), environment(first.cluster),
        module="tests.experiments.batch_worker", arguments=[str(folder / name) for name in resolved],
    )  # fmt: skip
    assert outcome.ok, outcome.reason
