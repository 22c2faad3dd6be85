"""One job: write its resolved config, start its ranks, show and mirror what they report, say how it ended.

The code that the ranks run is `experiments.worker`. It is started as a module with the run folder as its
argument and reads the config from there: everything between this process and a rank is a file in that
folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

import analysis
from experiments.config import Config, save
from experiments.progress import JobProgress
from experiments.tracking import METRICS, JsonLines, Tail, open_mirror
from launch import elastic
from launch.elastic import Outcome
from launch.status import Status
from mdcs.measure.memory import preload_env
from mdcs.profile import Profile

WORKER = "experiments.worker"

_WARM_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc gives large blocks back to the system at every free, and faults each page in again: buffers that
are released and allocated every step cost five times as much that way. Bytes are counted as they are
requested, so the budget does not see this.
"""


@dataclass
class Profiles:
    """Profiles already measured in this sweep, by what a profile depends on: jobs that share one are
    compared fairly, and start faster.
    """

    _paths: dict[str, Path] = field(default_factory=dict)

    def find(self, config: Config) -> str | None:
        path = self._paths.get(_profile_key(config))
        return None if path is None else str(path)

    def keep(self, config: Config, folder: Path) -> None:
        """Remember the profile that a job left in its folder, if it is whole."""
        path = folder / "profile.json"
        try:
            Profile.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self._paths.setdefault(_profile_key(config), path)


def run(
    config: Config,
    folder: Path,
    console: Console,
    *,
    profiles: Profiles | None = None,
    plan_only: bool = False,
    worker: str = WORKER,
) -> Outcome:
    """Run the job in `folder` to its end; how it ended is in metrics.jsonl too. Ctrl-C ends the ranks and
    is raised again.

    plan_only: stop when plan.json and profile.json are written.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    measured_before = profiles.find(config) if profiles is not None and config.profile is None else None
    resolved = resolve(config, profile=measured_before)
    save(resolved, folder / "config.yaml")
    name = str(resolved.run.name)
    mirror = open_mirror(
        resolved.tracker, folder, name=name, group=resolved.run.sweep, config=dataclasses.asdict(resolved)
    )
    tail, ended_well = Tail(folder / METRICS), plan_only
    tail.new()  # what an earlier job in this folder wrote
    outcome = Outcome(False, "interrupted")
    try:
        with JobProgress(console, name, resolved.run.steps) as progress:

            def on_tick(statuses: Sequence[Status | None]) -> None:
                nonlocal ended_well
                progress.statuses(statuses)
                for event in tail.new():
                    progress.event(event)
                    mirror.event(event)
                    ended_well = ended_well or event.get("event") == "summary"

            cluster = elastic.Cluster(
                config.cluster.ranks, config.cluster.timeout_s, config.cluster.startup_s
            )
            arguments = [str(folder), *(["--plan-only"] if plan_only else [])]
            outcome = elastic.run(
                folder, cluster, environment(resolved), module=worker, arguments=arguments, on_tick=on_tick
            )
        if outcome.ok and not ended_well:
            outcome = Outcome(False, "all ranks ended well, but wrote no summary")
    finally:
        if not outcome.ok:
            _record_failure(folder, outcome)
            for event in tail.new():
                mirror.event(event)
        if outcome.ok and not plan_only and resolved.tracker.name != "none":
            mirror.pictures(_draw(folder))
        mirror.finish(outcome.ok)
    if profiles is not None:
        profiles.keep(config, folder)
    return outcome


def resolve(config: Config, *, profile: str | None = None) -> Config:
    """The config with everything decided that this machine decides, so that a rank has nothing left to
    choose.
    """
    name = config.run.name or _name(config)
    return dataclasses.replace(
        config,
        cluster=dataclasses.replace(
            config.cluster,
            threads=config.cluster.resolved_threads(),
            backend=config.cluster.resolved_backend(),
        ),
        run=dataclasses.replace(config.run, name=name),
        profile=str(Path(config.profile).resolve()) if config.profile else profile,
    )


def environment(config: Config) -> dict[str, str]:
    """What the ranks' environment has in addition to this process's own."""
    threads = str(config.cluster.threads)
    env = {key: value for key, value in _WARM_HEAP.items() if key not in os.environ}
    env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if config.cluster.measure_memory and config.cluster.device == "cpu":
        try:
            env |= preload_env({"LD_PRELOAD": os.environ.get("LD_PRELOAD", "")})
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"memory is not measured: {reason} (cluster.measure_memory=false for none)", stacklevel=2
            )
    return env


def _name(config: Config) -> str:
    strategy = config.strategy.kind or config.strategy.name
    share = config.budget.schedule_share
    return f"{strategy} {config.scheduler.name}" + ("" if share is None else f" s={share:g}")


def _profile_key(config: Config) -> str:
    whole = dataclasses.asdict(config)
    parts = {group: whole[group] for group in ("model", "data", "optimizer", "link", "collectives", "cluster", "run")}
    for irrelevant in ("name", "sweep", "steps", "warmup_steps", "eval_every"):
        parts["run"].pop(irrelevant)
    return json.dumps(parts, sort_keys=True)


def _draw(folder: Path) -> list[Path]:
    """The run's pictures; none, and a warning, when they cannot be drawn."""
    try:
        written = analysis.write_report(analysis.load_sweep(folder), folder)
    except Exception as error:  # the run itself has ended well
        warnings.warn(f"the run could not be drawn: {type(error).__name__}: {error}", stacklevel=2)
        return []
    return [path for path in written if path.suffix == ".png"]


def _record_failure(folder: Path, outcome: Outcome) -> None:
    with JsonLines(folder / METRICS) as metrics:
        metrics.write(
            {
                "event": "failure",
                "status": "failed",
                "reason": outcome.reason,
                "rank": outcome.rank,
                "step": outcome.step,
                "time": time.time(),
            }
        )
