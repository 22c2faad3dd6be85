"""Run jobs one after another with ranks that are forks of a process that stays (`launch.forks`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch import elastic, orphans
from launch.agent import report_of
from launch.elastic import Cluster, Outcome
from launch.status import Status


class Warm:
    """Runs jobs like `launch.elastic.run`, and faster from the second job on.

    A context manager: the process ends with it. The process is started anew after a failed job, and for a job with
    another environment.
    """

    def __init__(self) -> None:
        self._forks: _Forks | None = None

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        if self._forks is not None:
            self._forks.end()
            self._forks = None

    def run(
        self,
        run_dir: Path,
        cluster: Cluster,
        env: Mapping[str, str],
        *,
        module: str,
        arguments: Sequence[str] = (),
        on_tick: Callable[[Sequence[Status | None]], None] = lambda statuses: None,
    ) -> Outcome:
        """Run a job as `launch.elastic.run` does, with ranks that share this machine's loopback.

        Raises ValueError for a shaped cluster.
        """
        if cluster.rate_gbit is not None:
            raise ValueError("a rank that is a fork has no network of its own")
        run_dir = run_dir.resolve()
        elastic.begin(run_dir, cluster)
        if self._forks is None or not self._forks.runs_with(env):
            self.__exit__()
            self._forks = _Forks(env)
        forks = self._forks
        forks.hand(run_dir, {"ranks": cluster.ranks, "module": module, "arguments": list(arguments)})
        outcome = Outcome(False, "interrupted")
        try:
            stuck = elastic.watch(run_dir, cluster, forks, on_tick)
            code = forks.poll()
            outcome = elastic.outcome_of(run_dir, cluster, 1 if code is None else code, stuck)
        finally:
            if not outcome.ok:
                self.__exit__()
            elastic.end(run_dir, cluster)
        return outcome


class _Forks:
    """The process that forks ranks, and its current job."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env, self._folder = dict(env), Path()
        interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        paths = os.pathsep.join(filter(None, [str(elastic.ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "launch.forks", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **interface, **env, "PYTHONPATH": paths},
            text=True,
        )

    def runs_with(self, env: Mapping[str, str]) -> bool:
        return self._env == dict(env) and self._process.poll() is None

    def hand(self, folder: Path, job: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._folder = folder
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `poll` reports it
            self._process.stdin.write(json.dumps({"folder": str(folder), **job}) + "\n")
            self._process.stdin.flush()

    def poll(self) -> int | None:
        """State of the job as in `launch.elastic.Agent.poll`; the process's exit code if the process has ended."""
        try:
            said = json.loads(report_of(self._folder, None).path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return self._process.poll()
        return 1 if said["exit_codes"] else 0

    def end(self) -> None:
        orphans.kill_groups([self._process.pid])
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
