"""One job: write its resolved config, start its ranks, show and mirror their reports, and report how it ended.

The ranks run `experiments.job.worker`. It is started as a module with the run folder as its argument, and reads the
config from the folder. This process and the ranks share only files in that folder.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import analysis
from analysis.events import METRICS, Tail
from experiments.config import checks
from experiments.config.schema import Config, ConfigError
from experiments.job import checkpoints, profiles, record
from experiments.job.events import failure_event, job_event
from experiments.job.profiles import Profiles, floor_of, job_of, make_plan, write_plan
from experiments.job.resolved import crowded, environment, require_room, resolve
from experiments.job.tracking import Event, Follower, JsonLines, show_files
from launch import elastic, network, preemption, status
from launch.elastic import Occupied, Outcome, claim
from launch.status import Status
from mdcs.plan.period import Strategy
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.strategies import Uniform

_LINES = 6  # about so many lines of progress has a job in a log
_STARTS = 8  # most lines about started ranks; with fewer ranks than this there is one


class Infeasible(Exception):
    """Error: no plan of a job keeps its budget. The message has the smallest budget that one keeps."""


Start = Callable[..., Outcome]  # Runs ranks to their end. Arguments and result are those of `launch.elastic.run`.


def run(
    config: Config, folder: Path, console: Console, *, known: Profiles | None = None, only: str | None = None,
    kind: str = "train", worker: str | None = None, start: Start | None = None, identity: str | None = None,
    began: float | None = None,
) -> Outcome:
    """Run the job in `folder` to its end. Return its outcome, which is in metrics.jsonl too.

    Ctrl-C ends the ranks and is raised again. A folder that cannot be written is a failed outcome.

    - known: the profiles that this program knows. Jobs that are given the same object share measured profiles.
    - only: "profile" or "plan": stop after profile.json, or after plan.json too. None: train.
    - kind: the trackers' name for a job that trains.
    - worker: the module that the ranks run. None: $MDCS_WORKER, by default `experiments.job.worker`.
    - start: starts the ranks and waits for them. None: the ranks that torchrun or srun has started run the job, or
      `launch.elastic.run` starts some.
    - identity: of the job as it was submitted, with its launcher (`experiments.job.record`).
    - began: unix time from which the seconds to the first step count. None: when the job starts.

    Raises ConfigError for a job that cannot run here, for checkpoints that would be mixed with another run's, and for a
    folder that another job is in.
    """
    worker = worker or os.environ.get("MDCS_WORKER", "experiments.job.worker")
    start = start or (elastic.run if checks.here is None else checks.here.run)
    known = known or Profiles()
    _require_possible(config, joined=start is not elastic.run)
    if only is not None:
        _require_plan(config)
    checkpoints.require(config, folder)
    parts = None if identity else record.parts_of(config)
    identity = identity or record.hash_of(parts or {})
    try:
        with claimed(folder):
            if parts is not None and only is None:
                record.write_parts(folder, parts)
            return _run(config, folder.resolve(), console, known, only, kind, worker, start, identity, began)
    except OSError as error:  # the folder cannot be written: no rank has run
        return _failed(error)


def _run(
    config: Config, folder: Path, console: Console, known: Profiles, only: str | None, kind: str, worker: str,
    start: Start, identity: str, began: float | None,
) -> Outcome:  # fmt: skip
    reused = known.find(config)
    resolved = resolve(config, profile=reused)
    _say_reused(reused, console)
    if (crowd := crowded(config)) is not None:
        console.print(crowd, markup=False, highlight=False, soft_wrap=True)
    if only is None:
        record.write(folder, identity, record.RUNNING)
    asked = job_event(resolved, began)
    begin(resolved, folder, *([asked] if only is None else []))
    mirror = Follower(resolved, folder, only or kind, identity)
    mirror.event(asked)
    tail, last = Tail(folder / METRICS), dict[str, Event]()  # the last event of each kind
    tail.new()  # skip the events that the folder had before
    of = config.cluster
    cluster = elastic.Cluster(of.processes, of.timeout_s, rate_gbit=of.rate_gbit, nodes=of.nodes)
    arguments = [str(folder), *([f"--{only}-only"] if only else [])]
    outcome = Outcome(False, record.INTERRUPTED)
    try:
        with JobProgress(console, str(resolved.run.name), resolved.run.steps) as progress:

            def on_tick(statuses: Sequence[Status | None]) -> None:
                progress.statuses(statuses)
                for event in tail.new():
                    last[event["event"]] = event
                    progress.event(event)
                    mirror.event(event)

            outcome = start(
                folder, cluster, environment(resolved.cluster), module=worker, arguments=arguments, on_tick=on_tick
            )
        if outcome.ok and "preempted" in last:
            step = last["preempted"]["step"]
            outcome = Outcome(False, f"preempted at step {step}, of which it has a checkpoint", step=step)
        elif outcome.ok and last.get("failure", {}).get("status") == record.INFEASIBLE:
            outcome = Outcome(False, str(last["failure"]["reason"]), infeasible=True)
        elif outcome.ok and only is None and "summary" not in last:
            outcome = Outcome(False, "all ranks ended well, but wrote no summary")
    except Exception as error:
        outcome = _failed(error)
        if not isinstance(error, OSError):
            raise
    finally:
        if only is None:
            preempted = "preempted" in last or outcome.lost and preemption.expected()
            state, doubt = _state(outcome), last.get("summary", {}).get("doubt", "")
            with _warned(f"the job's end could not be written to {record.FILE}"):
                record.write(folder, identity, record.PREEMPTED if preempted else state, outcome.reason, doubt=doubt)
        if not outcome.ok and not outcome.infeasible:
            failure = failure_event(outcome.reason, outcome.rank, outcome.step)
            # The outcome reports it, and earlier lines are whole.
            with _warned("the failure could not be written to the job's folder"):
                _write(folder, *([] if only is None else [asked]), failure)
        for event in tail.new():
            mirror.event(event)
        if outcome.ok and only is None and resolved.tracker.shows:
            mirror.pictures(_draw(folder))
        mirror.finish(outcome.ok)
    if reused is None:
        known.keep(config, folder)
    return outcome


def begin(config: Config, folder: Path, *events: Event) -> None:
    """Prepare the folder for a job: write its resolved config and its first events. Files of an earlier job are
    removed, so that nobody takes them for files of this one. The profile that the config names stays. A job that does
    not train is a run only if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("profile.json", "plan.json", "predicted_timeline.json", "timeline.json"):
        if str(folder / name) != config.profile.path:
            (folder / name).unlink(missing_ok=True)
    checks.save(config, folder / "config.yaml")
    if events:
        _write(folder, *events)


def prepare(only: str, config: Config, folder: Path, console: Console, *, known: Profiles | None = None) -> str:
    """Write profile.json into the folder and, for `only="plan"`, plan.json. Return the reason of a failure, else "". No
    ranks are started if the profile is known. Raises Infeasible if no plan keeps the budget, and ConfigError as `run`
    does, and for an engine that makes no plan."""
    _require_plan(config)
    _require_batch(config)
    known = known or Profiles()
    with claimed(folder):
        place, reused = folder.resolve(), known.find(config)
        resolved = resolve(config, profile=reused)
        if (measured := profiles.known(resolved)) is not None:
            _say_reused(reused, console)
            begin(resolved, place)
            (place / "profile.json").write_text(measured.to_json(), encoding="utf-8")
            if only == "plan":
                job = job_of(resolved, measured)
                try:
                    made = make_plan(resolved, job, floor_of(resolved, job))
                except InfeasibleBudget as error:
                    raise Infeasible(str(error)) from error
                except ValueError as error:
                    return str(error)
                write_plan(folder, made)
            show_files(resolved, folder, only, record.identity_of(config))
            return ""
    return reason_of(run(config, folder, console, known=known, only=only))


def reason_of(outcome: Outcome) -> str:
    """The reason of a failure, empty for a job that ended well. Raises Infeasible for one that could not begin."""
    if outcome.infeasible:
        raise Infeasible(outcome.reason)
    return outcome.reason


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the lock of a job's folder. Raises ConfigError if another job is in it, or if it cannot be written."""
    with ExitStack() as stack:
        try:
            stack.enter_context(claim(folder.resolve()))
        except Occupied as error:
            raise ConfigError("hydra.run.dir", str(error)) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:  # which may pass: the job has failed
                raise
            raise ConfigError("hydra.run.dir", f"{folder} cannot be written: {error.strerror}") from error
        yield


@contextmanager
def _warned(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(f"{what}: {error}", stacklevel=3)


def _failed(error: Exception) -> Outcome:
    return Outcome(False, " ".join(f"{type(error).__name__}: {error}".split()))


def _state(outcome: Outcome) -> str:
    if outcome.ok:
        return record.OK
    if outcome.infeasible:
        return record.INFEASIBLE
    return record.INTERRUPTED if outcome.reason == record.INTERRUPTED else record.FAILED


def _require_possible(config: Config, *, joined: bool) -> None:
    """Raise ConfigError for a job that cannot train here. joined: its ranks have been started."""
    cluster, strategy = config.cluster, config.strategy
    if cluster.name == "joined" and not joined:
        nodes = "" if cluster.nodes is None else f" on {cluster.nodes} hosts"
        raise ConfigError("cluster.ranks", f"{cluster.ranks}{nodes} must be started by torchrun or srun, and were not")
    if cluster.rate_gbit is not None and (why := network.refusal(cluster.rate_gbit)):
        raise ConfigError("cluster.name", f"shaped is not possible here: {why}")
    if isinstance(strategy, Uniform) and Strategy(strategy.each).in_node and not 1 < cluster.hosts < cluster.ranks:
        problem = f"{strategy.each} shards within a node, of which there must be several with several ranks each"
        raise ConfigError("strategy.each", f"{problem}; got cluster.ranks={cluster.ranks} on {cluster.hosts}")
    _require_batch(config)
    if cluster.name != "joined":
        require_room(config)
    config.engine.require()


def _require_plan(config: Config) -> None:
    if not config.engine.plans:
        raise ConfigError("engine", f"{config.engine.name} trains without a plan")


def _require_batch(config: Config) -> None:
    if config.batch.find is not None:
        raise ConfigError("batch.find", "is for mdcs plan; other commands take data.batch_size")


def _say_reused(profile: Path | None, console: Console) -> None:
    if profile is not None:
        console.print(f"profile reused from {profile}", markup=False, highlight=False, soft_wrap=True)


def _draw(folder: Path) -> list[Path]:
    """Draw the run's pictures and return their files. Warns and returns none when they cannot be drawn."""
    try:
        written = analysis.write_report(analysis.runs(folder), folder)
    except Exception as error:  # the run itself has ended well
        warnings.warn(f"the run could not be drawn: {type(error).__name__}: {error}", stacklevel=2)
        return []
    return [path for path in written if path.suffix == ".png"]


def _write(folder: Path, *events: Event) -> None:
    with JsonLines(folder / METRICS) as metrics:
        for event in events:
            metrics.write(event)


# ---- what is shown of a running job


class JobProgress:
    """Shows the phases before the first step of a job, then its steps, `steps` in all: on a terminal by a bar, in a log
    by a line now and then. A context manager."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self._console, self._name, self._steps = console, name, steps
        self._phase, self._step = "", 0
        self._bar: Progress | None = None
        if console.is_terminal:
            words, shown = (TextColumn(f"{{task.{each}}}", markup=False) for each in ("description", "fields[shown]"))
            columns = (SpinnerColumn(), words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), shown)
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(name, total=steps, shown="starting")

    def __enter__(self) -> JobProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def statuses(self, statuses: Sequence[Status | None]) -> None:
        """Show the phase of rank 0 until the first step. Of many ranks that start, show how many have."""
        told = [said for said in statuses if said is not None]
        if self._step or not told or any(said.step for said in told):
            return
        first, ranks = statuses[0], len(statuses)
        phase = first.phase if first is not None else status.STARTING
        if phase in (status.STARTING, status.JOINING):
            started, phase = sum(said.phase != status.STARTING for said in told), status.STARTING
            if self._bar is None:  # a line for each further eighth
                started = started * _STARTS // ranks * ranks // _STARTS
            if ranks >= _STARTS and started:
                phase = f"starting: {started} of {ranks} ranks have started"
        if phase != self._phase:
            self._phase = phase
            if self._bar is not None:
                self._bar.update(self._task, shown=phase)
            else:
                self._line(phase)

    def event(self, event: Event) -> None:
        """Show a step; of the plan the solver's outcome, and what recomputation frees and costs."""
        for said in ("outcome", "recomputation") if event.get("event") == "start" else ():
            if event.get(said):
                self._line(f"plan: {event[said]}")
        if event.get("event") != "step":
            return
        self._step = int(event["step"])
        shown = describe(event)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._step, shown=shown)
        elif self._step in (1, self._steps) or self._step % max(1, self._steps // _LINES) == 0:
            self._line(f"step {self._step}/{self._steps} {shown}")

    def _line(self, text: str) -> None:
        self._console.print(f"{self._name}: {text}", markup=False, highlight=False, soft_wrap=True)


_VALUES: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format, "step_s": lambda seconds: f"{seconds * 1e3:.0f} ms",
    "stalled_s": lambda seconds: f"stalled {seconds * 1e3:.0f} ms",
    "exposed_s": lambda seconds: f"exposed {seconds * 1e3:.0f} ms", "overlap_ratio": "overlap {:.0%}".format,
}  # fmt: skip


def describe(step: Event) -> str:
    parts = [step["plan"]] if "plan" in step else []
    parts += [words(value) for name, words in _VALUES.items() if (value := step.get(name)) is not None]
    return ", ".join([*parts, *step.get("departures", ())])
