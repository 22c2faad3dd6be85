"""Run jobs one after another with ranks that are forks of a process that stays (`launch.forks`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch import elastic
from launch.elastic import Cluster, Forks, Outcome


class Warm:
    """Runs jobs like `launch.elastic.run`, and faster from the second job on.

    A context manager: the process ends with it. The process is started anew after a failed job, and for a job with
    another environment.
    """

    def __init__(self) -> None:
        self._forks: Forks | None = None

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        if self._forks is not None:
            self._forks.end()
            self._forks = None

    def run(self, run_dir: Path, cluster: Cluster, env: Mapping[str, str], **job: Any) -> Outcome:
        """Run a job as `launch.elastic.run` does, with ranks that share this machine's loopback.

        Raises ValueError for a shaped cluster.
        """
        if cluster.rate_gbit is not None:
            raise ValueError("the ranks of a process that stays have no networks of their own")
        if self._forks is None or self._forks.env != dict(env) or not self._forks.runs():
            self.__exit__()
            self._forks = Forks(env)
        outcome = Outcome(False)
        try:
            outcome = elastic.run(run_dir, cluster, env, **job, forks=self._forks)
        finally:
            if not outcome.ok:
                self.__exit__()
        return outcome
