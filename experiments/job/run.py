"""One job: write its resolved config, start its ranks, show and mirror their reports, and report how it ended.

The ranks run `experiments.job.worker`. It is started as a module with the run folder as its argument, and reads the
config from the folder. This process and the ranks share only files in that folder.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

import analysis
from analysis.events import METRICS, Tail
from experiments.config import started
from experiments.config.checks import save
from experiments.config.schema import Config, ConfigError
from experiments.job import checkpoints, profiles, record
from experiments.job.events import job_event
from experiments.job.planning import floor_of, job_of, make_plan, write_plan
from experiments.job.profiles import Profiles
from experiments.job.progress import JobProgress
from experiments.job.tracking import Event, Follower, JsonLines, show_files
from launch import elastic, network, preemption
from launch.claim import Occupied, claim
from launch.elastic import Outcome
from launch.status import Status
from mdcs.plan.strategy import Strategy
from mdcs.planner.recompute import KEEP
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.schema import Profile
from mdcs.sizes import GIB, MIB
from mdcs.telemetry.memory_meter import preload_env

WORKER = "experiments.job.worker"

Start = Callable[..., Outcome]
"""Runs ranks to their end. Arguments and result are those of `launch.elastic.run`."""

_CROWD = 4
"""Ranks per core above which a job is warned."""

_WARM_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(4 * GIB)}
"""Keep freed buffers in the process.

By default glibc returns large blocks to the system at every free, and faults each page in again. Buffers that are
released and allocated every step then cost five times as much. The budget counts requested bytes: it does not change.
"""


def run(
    config: Config,
    folder: Path,
    console: Console,
    *,
    known: Profiles | None = None,
    only: str | None = None,
    kind: str = "train",
    worker: str = WORKER,
    start: Start | None = None,
    identity: str | None = None,
) -> Outcome:
    """Run the job in `folder` to its end. Return its outcome, which is in metrics.jsonl too.

    Ctrl-C ends the ranks and is raised again.

    - known: the profiles that this program knows. Jobs that are given the same object share measured profiles.
    - only: "profile" or "plan": stop after profile.json, or after plan.json too. None: train.
    - kind: the trackers' name for a job that trains.
    - worker: the module that the ranks run.
    - start: starts the ranks and waits for them. None: the ranks that torchrun or srun has started run the job, or
      `launch.elastic.run` starts some.
    - identity: of the job as it was requested, if that is not `config` (`experiments.job.record`).

    Raises ConfigError

    - for an analytic profile, and for joined ranks without `start`;
    - for a shaped link that is impossible on this machine or for this user;
    - for a strategy within nodes without several nodes of several ranks each;
    - for checkpointing or a batch that is not decided;
    - for an engine that cannot run here or, with `only`, makes no plan;
    - for checkpoints that would be mixed with another run's;
    - for a folder that another job is in.

    A folder that cannot be written is a failed outcome.
    """
    if config.profile.name == "analytic":
        raise ConfigError("profile.name", "analytic is for planning (mdcs plan): there are no ranks like these")
    start = start or (elastic.run if started.here is None else started.here.run)
    if config.cluster.name == "joined" and start is elastic.run:
        nodes = "" if config.cluster.nodes is None else f" on {config.cluster.nodes} hosts"
        raise ConfigError("cluster.ranks", f"{config.cluster.ranks}{nodes} are for torchrun or srun to start, and nobody has")
    rate = config.cluster.rate_gbit
    if rate is not None and (why := network.refusal(rate)):
        raise ConfigError("cluster.name", f"shaped is not possible here: {why}")
    if only is not None:
        _require_plan(config)
    _require_decided(config)
    _require_nodes(config)
    checkpoints.require(config, folder)
    config.engine.require()
    try:
        with _claimed(folder):
            identity = identity or record.identity_of(config)
            return _run(
                config, folder.resolve(), console, known or Profiles(), only, kind, worker, start, identity
            )
    except OSError as error:  # the folder cannot be written: no rank has run
        return _failed(error)


def _run(
    config: Config, folder: Path, console: Console, known: Profiles, only: str | None, kind: str, worker: str,
    start: Start, identity: str,
) -> Outcome:  # fmt: skip
    reused = known.find(config) if config.engine.plans else None
    resolved = resolve(config, profile=reused)
    _say(reused, console)
    if (crowd := crowded(config)) is not None:
        console.print(crowd, markup=False, highlight=False, soft_wrap=True)
    if only is None:
        record.write(folder, identity, record.RUNNING)
    begin(resolved, folder, trains=only is None)
    name = str(resolved.run.name)
    mirror = Follower(resolved, folder, only or kind, identity)
    asked, ended_well, preempted, doubt = job_event(resolved), only is not None, dict[str, Any](), ""
    mirror.event(asked)
    tail = Tail(folder / METRICS)
    tail.new()  # skip the events that the folder had before
    outcome = Outcome(False, record.INTERRUPTED)
    try:
        with JobProgress(console, name, resolved.run.steps) as progress:

            def on_tick(statuses: Sequence[Status | None]) -> None:
                nonlocal ended_well, preempted, doubt
                progress.statuses(statuses)
                for event in tail.new():
                    progress.event(event)
                    mirror.event(event)
                    ended_well = ended_well or event.get("event") == "summary"
                    doubt = event.get("doubt", doubt)
                    preempted = event if event.get("event") == "preempted" else preempted

            cluster = elastic.Cluster(
                config.cluster.processes, config.cluster.timeout_s, config.cluster.startup_s, config.cluster.rate_gbit,
                config.cluster.nodes,
            )
            arguments = [str(folder), *([f"--{only}-only"] if only else [])]
            outcome = start(
                folder, cluster, environment(resolved), module=worker, arguments=arguments, on_tick=on_tick
            )
        if outcome.ok and preempted:
            step = preempted["step"]
            outcome = Outcome(False, f"preempted at step {step}, of which it has a checkpoint", step=step)
        elif outcome.ok and not ended_well:
            outcome = Outcome(False, "all ranks ended well, but wrote no summary")
    except OSError as error:
        outcome = _failed(error)
    finally:
        if only is None:
            try:
                stopped = preempted or outcome.lost and preemption.expected()
                state = record.PREEMPTED if stopped else _state(outcome)
                record.write(folder, identity, state, outcome.reason, ranks=config.cluster.processes, doubt=doubt)
            except OSError as error:
                warnings.warn(f"how the job has ended is not in its {record.FILE}: {error}", stacklevel=2)
        if not outcome.ok:
            where = {"reason": outcome.reason, "rank": outcome.rank, "step": outcome.step}
            failure = {"event": "failure", "status": "failed", **where, "time": time.time()}
            try:
                _write(folder, *([] if only is None else [asked]), failure)
            except OSError as error:  # the outcome reports it all the same, and earlier lines are whole
                warnings.warn(f"that the job failed is not in its folder: {error}", stacklevel=2)
            for event in tail.new():
                mirror.event(event)
        if outcome.ok and only is None and resolved.tracker.shows:
            mirror.pictures(_draw(folder))
        mirror.finish(outcome.ok)
    if reused is None and config.engine.plans:
        known.keep(config, folder)
    return outcome


def begin(config: Config, folder: Path, *, trains: bool = True) -> None:
    """Prepare the folder for a job: write its resolved config and, if it trains, its first event.

    Files of an earlier job are removed, so that nobody takes them for files of this one. The profile that the config
    names stays. A job that does not train is a run only if it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("profile.json", "plan.json", "predicted_timeline.json", "timeline.json"):
        if str(folder / name) != config.profile.path:
            (folder / name).unlink(missing_ok=True)
    save(config, folder / "config.yaml")
    if trains:
        _write(folder, job_event(config))


def known_profile(
    config: Config, folder: Path, console: Console, *, known: Profiles | None = None
) -> tuple[Config, Profile] | None:
    """Write the resolved config and its profile into the folder and return them, if no ranks are needed; else None.

    Raises ConfigError for an engine that makes no plan, for checkpointing or a batch that is not decided, and for a folder that
    another job is in.
    """
    _require_plan(config)
    _require_decided(config)
    with _claimed(folder):
        return _known_profile(config, folder.resolve(), console, known or Profiles())


def _known_profile(config: Config, folder: Path, console: Console, known: Profiles) -> tuple[Config, Profile] | None:
    reused = known.find(config)
    resolved = resolve(config, profile=reused)
    profile = profiles.known(resolved)
    if profile is None:
        return None
    _say(reused, console)
    begin(resolved, folder, trains=False)
    (folder / "profile.json").write_text(profile.to_json(), encoding="utf-8")
    return resolved, profile


def plan(
    config: Config, folder: Path, console: Console, *, known: Profiles | None = None, worker: str = WORKER,
    start: Start | None = None,
) -> str:  # fmt: skip
    """Write plan.json into the folder, without ranks if the profile is known. Return the reason of a failure, else "".

    Raises ConfigError as `run` and `known_profile` do.
    """
    _require_plan(config)
    _require_decided(config)
    known = known or Profiles()
    with _claimed(folder):
        found = _known_profile(config, folder.resolve(), console, known)
        if found is not None:
            resolved, profile = found
            job = job_of(resolved, profile)
            try:
                made = make_plan(resolved, job, floor_of(resolved, job))
            except ValueError as error:
                return str(error)
            write_plan(folder, made)
            show_files(resolved, folder, "plan", record.identity_of(config))
            return ""
    return run(config, folder, console, known=known, only="plan", worker=worker, start=start).reason


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    try:
        with claim(folder.resolve()):
            yield
    except Occupied as error:
        raise ConfigError("hydra.run.dir", str(error)) from error


def _failed(error: OSError) -> Outcome:
    return Outcome(False, f"{type(error).__name__}: {error}")


def _state(outcome: Outcome) -> str:
    if outcome.ok:
        return record.OK
    return record.INTERRUPTED if outcome.reason == record.INTERRUPTED else record.FAILED


def _require_plan(config: Config) -> None:
    if not config.engine.plans:
        raise ConfigError("engine", f"{config.engine.name} trains without a plan: there is none to make")


def _require_decided(config: Config) -> None:
    if config.model.checkpointing == "auto":
        raise ConfigError("model.checkpointing", "only train.py and plan.py decide auto; here it must be true or false")
    if config.batch.find is not None:
        raise ConfigError("batch.find", "only mdcs plan finds a batch; here data.batch_size says it")


def _require_nodes(config: Config) -> None:
    cluster, strategy = config.cluster, config.strategy
    if isinstance(strategy, Uniform) and Strategy(strategy.each).in_node and not 1 < cluster.hosts < cluster.ranks:
        problem = f"{strategy.each} shards within a node, of which there must be several with several ranks each"
        raise ConfigError("strategy.each", f"{problem}; got cluster.ranks={cluster.ranks} on {cluster.hosts}")


def _say(reused: Path | None, console: Console) -> None:
    if reused is not None:
        console.print(f"profile reused from {reused}", markup=False, highlight=False, soft_wrap=True)


def crowded(config: Config) -> str | None:
    """A warning if many more ranks run on this machine than it has cores; else None."""
    ranks, cores = config.cluster.processes, len(os.sched_getaffinity(0))
    if config.cluster.name == "joined" or ranks <= _CROWD * cores:
        return None
    shared = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"warning: {ranks} ranks share {shared}: starting may take minutes, and step times are"
        " of cores that are shared (cluster=emulated runs one rank of many)"
    )


def resolve(config: Config, *, profile: Path | None = None) -> Config:
    """The config with all values that this machine decides, so that a rank has no decision left."""
    name = config.run.name or _name(config)
    path = profile or (Path(config.profile.path) if config.profile.path else None)
    return dataclasses.replace(
        config,
        cluster=dataclasses.replace(
            config.cluster,
            threads=config.cluster.resolved_threads(),
            backend=config.cluster.resolved_backend(),
        ),
        run=dataclasses.replace(config.run, name=name, resume=_absolute(config.run.resume)),
        profile=config.profile
        if path is None
        else dataclasses.replace(config.profile, path=str(path.resolve()), refresh=False),
    )


def _absolute(resume: str | None) -> str | None:
    return resume if resume in (None, "auto") else str(Path(resume).resolve())


def environment(config: Config) -> dict[str, str]:
    """Variables that the ranks' environment has in addition to this process's own."""
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
    """Name of a run: plan and swept settings, then budget, model and ranks: `dp fusion bucket_mib=25, mlp, 2 ranks`."""
    budget, cluster = config.budget, config.cluster
    plan = config.engine.label
    if config.engine.plans:
        plan = " ".join(planner.name for planner in (config.strategy, config.scheduler) if planner is not None)
        plan += "" if config.recompute == KEEP else f" recompute={config.recompute.name}"
        plan += "" if budget.schedule_share is None else f" s={budget.schedule_share:g}"
        plan += "" if budget.activation_share is None else f" a={budget.activation_share:g}"
    parts = [f"{plan} {config.run.varied}" if config.run.varied else plan]
    if budget.gib is not None:
        parts.append(f"{budget.gib:g} GiB")
    elif budget.over_floor is not None:
        parts.append(f"floor + {budget.over_floor * 100:g} %")
    ranks = "1 rank" if cluster.ranks == 1 else f"{cluster.ranks} ranks"
    if cluster.emulated:
        return f"{', '.join([*parts, config.model.label])} (rank {cluster.rank} of {cluster.ranks}, emulated)"
    return ", ".join([*parts, config.model.label, ranks])


def _draw(folder: Path) -> list[Path]:
    """Draw the run's pictures and return their files. Warns and returns none when they cannot be drawn."""
    try:
        written = analysis.write_report(analysis.load_sweep(folder), folder)
    except Exception as error:  # the run itself has ended well
        warnings.warn(f"the run could not be drawn: {type(error).__name__}: {error}", stacklevel=2)
        return []
    return [path for path in written if path.suffix == ".png"]


def _write(folder: Path, *events: Event) -> None:
    with JsonLines(folder / METRICS) as metrics:
        for event in events:
            metrics.write(event)
