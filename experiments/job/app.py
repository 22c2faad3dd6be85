"""The command line of the programs: Hydra composes a config, a job function runs it, and the exit code is the result.

0: every job ended well. 1: a job failed. 2: a config is wrong, and nothing was started. 130: interrupted.
Errors are one line on stderr; HYDRA_FULL_ERROR=1 shows Hydra's tracebacks.

Hydra composes each job once, in this process. In a sweep, a job that is wrong or fails is reported, and the other jobs
run. A repeated sweep runs only the jobs that have not ended well.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import PicklingError
from types import FrameType
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from analysis.settings import short
from experiments.config import help
from experiments.config.checks import from_composed
from experiments.config.errors import explain
from experiments.config.files import CONF, added_folders, groups
from experiments.config.schema import OWN, Config, ConfigError, fields_by_key, register
from experiments.config.started import require_as_asked, with_ranks
from experiments.job import checkpoints, frozen, record
from experiments.job.earlier import Earlier, folder_of
from hydra_plugins import _mdcs_jobs, mdcs_slurm, mdcs_sweeper
from launch.claim import Occupied, claim
from launch.place import NoPlace, place
from mdcs.planner.registry import decides_schedule

_SUBMITS = "hydra_plugins.mdcs_slurm."
_FULL = "HYDRA_FULL_ERROR"


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    - status: ok, failed, invalid (its config is wrong; it has no folder), left out (after a job that failed), or
      submitted (it has not ended).
    - overrides: of the job.
    - reason: one line; empty if the job ended well.
    - folder: the job's folder.
    - kept: an earlier sweep ran the job.
    """

    status: str
    overrides: tuple[str, ...]
    reason: str = ""
    folder: Path | None = None
    kept: bool = False


@dataclass
class Session:
    """One call of a program.

    - results: of its jobs so far.
    - sweep: the sweep's folder.
    - accepted: configs of the sweep's valid jobs, including jobs that its folder has already run.
    """

    results: list[JobResult] = field(default_factory=list)
    sweep: Path | None = None
    accepted: list[Config] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    """Overrides of the accepted jobs."""
    claimed: ExitStack = field(default_factory=ExitStack)
    """Holds the lock of the sweep's folder: no other sweep may number jobs there meanwhile."""
    earlier: Earlier | None = None


Job = Callable[[Config, Path], str]
"""(config, folder) → reason of the failure, empty when the job ended well. Raises ConfigError before it starts."""


@dataclass(frozen=True)
class Program:
    """A program that runs jobs.

    - job: runs one job.
    - own: groups of `OWN` that this program has. Keys of the others are refused.
    - on_sweep_end: called after a sweep that has a job with a folder. None: a sweep is refused, unless its jobs are submitted.
    - on_earlier: called for every job that the sweep's folder already has a run of. None: sweeps are not continued.
    - objective: what a sweeper minimizes, of the folder of a job that ended well. A job that did not counts as infinite.
    - freeze: (config, job's folder, settings of the launcher, sweep's folder); writes into the job's folder the files
      from which the job can run later. None: the job is the program with the job's overrides.
    """

    job: Job
    own: tuple[str, ...] = ()
    on_sweep_end: Callable[[Session], None] | None = None
    on_earlier: Callable[[Config, Path], object] | None = None
    objective: Callable[[Path], float] | None = None
    freeze: Callable[[Config, Path, Mapping[str, Any], Path], None] | None = None


def run(program: Program) -> int:
    """Run the program for the command line. Return the exit code.

    Of ranks that torchrun or srun has started, rank 0 runs the program, and all of them its jobs.
    """
    return on_rank_zero(lambda: _run_in(Session(), program))


def on_rank_zero(program: Callable[[], int]) -> int:
    """Run the program, which starts jobs, on one rank; the others serve it until its end. Return its exit code."""
    try:
        joined = place()
    except NoPlace as error:
        print(error, file=sys.stderr)
        return 2
    if joined is None:
        return program()
    from experiments.job import member  # needs torch

    return member.take_part(joined, program)


def _run_in(session: Session, program: Program) -> int:
    with session.claimed:
        return _run(session, program)


def _run(session: Session, program: Program) -> int:
    register()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    signal.signal(signal.SIGTERM, _stop)  # as for Ctrl-C: the ranks end before this process
    Plugins.instance()  # executes the modules of the plugins, maybe again: their classes are those from here on
    mdcs_slurm.MdcsLauncher.prepares, mdcs_slurm.MdcsLauncher.resumes = True, program.freeze is not None
    mdcs_slurm.MdcsLauncher.objective = program.objective and staticmethod(program.objective)
    mdcs_sweeper.MdcsSweeper.begin = staticmethod(lambda config: _begin(session, program, config))
    mdcs_sweeper.MdcsSweeper.judge = staticmethod(lambda compose, overrides: _judge(session, program, compose, overrides))

    def task(composed: DictConfig) -> float | None:
        if not wants_tracebacks:
            os.environ.pop(_FULL, None)  # what jobs start has the environment of this program
        _run_job(session, program, composed)
        os.environ[_FULL] = "1"
        if program.objective is None:
            return None
        ended = session.results[-1]
        return program.objective(ended.folder) if ended.status == record.OK and ended.folder is not None else math.inf

    # Hydra takes flags before or after all overrides, but not between them.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    if _submits(sys.argv[1:]):
        sys.argv[1:] = ["-m", *sys.argv[1:]]  # one job is a sweep, too
    asks_for_help = bool({"-h", "--help"} & set(sys.argv))
    wants_tracebacks = os.environ.get(_FULL) == "1"
    os.environ[_FULL] = "1"  # Hydra then raises errors instead of printing many lines
    try:
        if asks_for_help:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends as other programs do
            print(help.text(sys.modules["__main__"].__doc__ or "", sys.argv[1:], program.own))
            return 0
        for argument in sys.argv[1:]:
            _require_own(argument, program.own)
        for folder in added_folders(sys.argv[1:]):
            if not folder.is_dir():
                raise ConfigError("--config-dir", f"no such folder: {folder}")
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except KeyboardInterrupt:
        print("interrupted: all ranks were ended", file=sys.stderr)
        return 130
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if wants_tracebacks:
            raise
        print(explain(error, sys.argv[1:]), file=sys.stderr)
        return 2
    except (PicklingError, TypeError) as error:
        if wants_tracebacks or "pickle" not in str(error):
            raise
        known = "mdcs_local and mdcs_slurm do that, and joblib runs jobs here with hydra.launcher.n_jobs=1"
        print(f"hydra/launcher: cannot run jobs in processes of its own; {known}", file=sys.stderr)
        return 2
    except OSError as error:  # outside of any job, e.g. Hydra cannot make a folder
        if wants_tracebacks:
            raise
        session.results.append(JobResult("failed", (), f"{type(error).__name__}: {error}"))
        print(f"failed: {session.results[-1].reason}", file=sys.stderr)
    finally:
        if not wants_tracebacks:
            os.environ.pop(_FULL, None)
    session.results = [_ended(result) if result.status == record.SUBMITTED else result for result in session.results]
    if session.sweep is not None and program.on_sweep_end is not None and any(r.folder for r in session.results):
        program.on_sweep_end(session)
    return _exit_code(session)


def _submits(arguments: Sequence[str]) -> bool:
    """Whether a command line without `-m` submits a job, and does not only show something."""
    no = {"-m", "--multirun", "hydra.mode=RUN", "-h", "--help", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion"}
    launches = any(each.startswith("hydra/launcher=mdcs_") for each in arguments)
    return launches and not any({each, each.partition("=")[0]} & no for each in arguments)


def _begin(session: Session, program: Program, config: DictConfig) -> str | None:
    if program.on_sweep_end is None and _launcher(config.hydra) is None:
        raise ConfigError("--multirun", "this program takes one job")
    found = folder_of(config) if program.on_earlier else None
    session.sweep = (found or Path(str(config.hydra.sweep.dir))).resolve()
    try:
        session.claimed.enter_context(claim(session.sweep))
    except Occupied as error:
        raise ConfigError("hydra.sweep.dir", str(error)) from error
    if program.on_earlier:
        named: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
        session.earlier = Earlier(session.sweep, str(named["subdir"]))
    if found is not None:
        print(f"going on in {found} (sweep.force=true begins anew)", flush=True)
    return None if found is None else str(found)


def _run_job(session: Session, program: Program, composed: DictConfig) -> None:
    # Nothing may be raised to Hydra: it would print its own message, and end a sweep at the first failure.
    settings = HydraConfig.get()
    overrides, folder = tuple(settings.overrides.task), Path(settings.runtime.output_dir)
    if session.sweep is None and settings.mode == RunMode.MULTIRUN:  # a sweeper of Hydra's or of others, which judges no jobs
        session.sweep = Path(str(settings.sweep.dir)).resolve()
    launcher = _launcher(settings)
    if composed.sweep.fail_fast and any(result.status == "failed" for result in session.results):
        session.results.append(JobResult("left out", overrides))
        return
    try:
        config = _config(composed, settings.runtime.choices, launcher, overrides)
        if session.sweep is not None:
            config.run.sweep = config.run.sweep or sweep_name(session.sweep)
            config.run.varied = config.run.varied or " ".join(varied(overrides, session.asked, but=_NAMED)) or None
            if config.run.resume is None and not config.sweep.force and checkpoints.any_in(folder):
                config.run.resume = "auto"
        else:
            _complain_of_sweep(overrides)
            choice = settings.runtime.choices.get("hydra/launcher", "basic")
            if choice != "basic" and "hydra.mode=RUN" not in settings.overrides.hydra:
                raise ConfigError("hydra/launcher", f"{choice} runs the jobs of a sweep: add -m, for a single job too")
            if unused := _unused(config, overrides):
                print(f"{_decides(config)}: not used: {' '.join(unused)}", file=sys.stderr)
        if launcher is not None:
            assert session.sweep is not None
            if program.freeze is None:
                if state := _mdcs_jobs.state(folder):
                    raise ConfigError("hydra.sweep.dir", f"{folder} has a job that is {state.lower()}")
                more = [f"cluster.ranks={config.cluster.ranks}"] if _starts_its_ranks(launcher) else []
                mdcs_slurm.rerun(folder, settings, *more)
            else:
                program.freeze(config, folder, launcher, session.sweep)
            reason = "" if settings.launcher.wait else record.SUBMITTED
            session.results.append(JobResult(record.SUBMITTED, overrides, reason, folder))
            return
        reason = program.job(config, folder)
        with suppress(OSError):  # a full disk, which is no reason for anything by now
            _write_hydra(folder, composed, settings)
    except ConfigError as error:
        session.results.append(JobResult("invalid", overrides, str(error)))
        print(error, file=sys.stderr)
        return
    except OSError as error:  # e.g. a full disk
        reason = f"{type(error).__name__}: {error}"
    session.results.append(JobResult("failed" if reason else "ok", overrides, reason, folder))
    if reason:
        print(f"failed: {reason} (its logs are in {folder})", file=sys.stderr)


def _write_hydra(folder: Path, composed: DictConfig, settings: Any) -> None:
    """Write `.hydra/` into the folder of a job that has run. Hydra itself would write before the folder is the job's."""
    own = folder / ".hydra"
    own.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(composed, own / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": settings}), own / "hydra.yaml")
    OmegaConf.save(settings.overrides.task, own / "overrides.yaml")


def _launcher(settings: Any) -> dict[str, Any] | None:
    """Settings of the launcher on which its jobs' measurements depend. None if this program runs the jobs itself.

    settings: Hydra's own part of a composed config.
    """
    if settings.mode != RunMode.MULTIRUN or not str(settings.launcher._target_).startswith(_SUBMITS):
        return None
    asked: Any = OmegaConf.to_container(settings.launcher, resolve=True)
    return mdcs_slurm.measured(asked)


def _config(composed: DictConfig, choices: Any, launcher: Mapping[str, Any] | None, overrides: Sequence[str]) -> Config:
    """The config with the ranks that the job will have. Raises ConfigError."""
    if launcher is None:
        return from_composed(composed, choices, said=overrides)
    ranks, nodes = launcher["nodes"] * launcher["ranks_per_node"], launcher["nodes"]

    def adapt(config: Config, overrides: Sequence[str]) -> Config:
        name = "local" if _starts_its_ranks(launcher) else "joined"
        made = with_ranks(config, "hydra/launcher", ranks, nodes, None, name=name)
        require_as_asked(config, made, overrides)
        return made

    return from_composed(composed, choices, said=overrides, adapt=adapt)


def _starts_its_ranks(launcher: Mapping[str, Any]) -> bool:
    """Whether a submitted job is one process that starts its ranks, not a process per rank."""
    return launcher["executor"] == "local" or launcher["nodes"] * launcher["ranks_per_node"] == 1


def _ended(result: JobResult) -> JobResult:
    """The result of a submitted job, from what is in its folder."""
    assert result.folder is not None
    said, code = record.read(result.folder), _mdcs_jobs.exit_code(result.folder)
    state = record.RUNNING if said is None else said.state
    if result.reason == record.SUBMITTED and state not in (record.OK, record.FAILED) and code is None:  # nobody waited for it
        return result
    if said is None or state in (record.SUBMITTED, record.RUNNING):
        reason = frozen.why_no_profile(result.folder) or _mdcs_jobs.failure(result.folder)
    else:
        reason = said.reason
    if reason:
        where = "" if state == record.SUBMITTED else f" (its logs are in {result.folder})"
        print(f"failed: {reason}{where}", file=sys.stderr)
    return replace(result, status="failed" if reason else "ok", reason=reason)


def _judge(session: Session, program: Program, compose: Callable[[], DictConfig], overrides: Sequence[str]) -> str | None:
    try:
        composed = compose()
        launcher = _launcher(composed.hydra)
        config = _config(composed, None, launcher, overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        reason = str(explain(error, overrides))
        if all(reason != result.reason for result in session.results):  # not for every job of an axis
            print(f"{reason} (job {' '.join(overrides)})", file=sys.stderr)
        session.results.append(JobResult("invalid", tuple(overrides), reason))
        return None
    if config in session.accepted:
        why = f": {_decides(config)}" if decides_schedule(config.strategy) else ""
        print(f"same as job {session.accepted.index(config)}{why} (job {' '.join(overrides)})", file=sys.stderr)
        return None
    session.accepted.append(config)
    session.asked.append(tuple(overrides))
    return _place(session, program, config, record.identity_of(config, launcher), overrides)


def _place(session: Session, program: Program, config: Config, identity: str, overrides: Sequence[str]) -> str | None:
    """The job's folder in the sweep's folder, as `PlanningProblem` returns it.

    None if an earlier sweep has run the job to its end, or has submitted it and it has not ended.
    """
    if session.earlier is None or session.sweep is None or program.on_earlier is None:
        return ""
    found = session.earlier.find(identity)
    if found is None:
        return session.earlier.place(len(session.accepted) - 1)
    name, before = found
    folder, job = session.sweep / name, " ".join(overrides)
    if before.state not in (record.OK, record.FAILED) and (state := _mdcs_jobs.state(folder)):
        session.results.append(JobResult(record.SUBMITTED, tuple(overrides), record.SUBMITTED, folder, kept=True))
        print(f"{name}: submitted before and {state.lower()}, not run again (job {job})", flush=True)
        return None
    if config.sweep.force:
        return name
    program.on_earlier(config, folder)
    if before.state == record.OK or before.state == record.FAILED and not config.sweep.retry_failed:
        session.results.append(JobResult(before.state, tuple(overrides), before.reason, folder, kept=True))
        print(f"{name}: {before.state}, not run again (job {job})", flush=True)
        return None
    print(f"{name}: {'not finished' if before.state == record.RUNNING else before.state}, runs again (job {job})", flush=True)
    return name


def _require_own(argument: str, own: Sequence[str]) -> None:
    """Raise ConfigError for an override with dashes, and for a key of another program."""
    plain = argument.lstrip("-")
    key = plain.partition("=")[0]
    if plain != argument and key in (*groups(), *fields_by_key()):
        raise ConfigError(argument, "overrides have no dashes: KEY=VALUE")
    if plain != argument and (known := [f"{group}.{key}" for group in own if f"{group}.{key}" in fields_by_key()]):
        raise ConfigError(argument, f"is {known[0]}=VALUE")
    group, dot, _ = key.lstrip("+~").partition(".")
    if dot and "=" in argument and group in OWN and group not in own:
        raise ConfigError(key, f"is for mdcs {OWN[group]}")


def _complain_of_sweep(overrides: Sequence[str]) -> None:
    for key in (override.partition("=")[0] for override in overrides):
        if key.startswith("sweep."):
            raise ConfigError(key, "is for a sweep (-m)")


def _decides(config: Config) -> str:
    return f"strategy={config.strategy.name} decides the schedule"


def _unused(config: Config, overrides: Sequence[str]) -> list[str]:
    """The overrides that have no effect because the strategy decides the schedule itself."""
    if not decides_schedule(config.strategy):
        return []
    return [each for each in overrides if each.partition("=")[0].partition(".")[0] == "scheduler"
            or each.startswith(("budget.schedule_share=", "budget.activation_share="))
            and not each.endswith("=null")]  # fmt: skip


def _exit_code(session: Session) -> int:
    bad = [result for result in session.results if result.status not in (record.OK, record.SUBMITTED)]
    if session.accepted and bad:
        names = "; ".join(" ".join(result.overrides) or "(no overrides)" for result in bad)
        print(f"{len(bad)} of {len(session.results)} jobs failed: {names}", file=sys.stderr)
    if bad and all(result.status == "invalid" for result in session.results):
        return 2
    return 1 if bad else 0


_NAMED = (
    "model", "strategy", "scheduler", "recompute", "engine", "budget", "budget.gib", "budget.over_floor", "budget.schedule_share",
    "budget.activation_share", "cluster.ranks", "run.name",
)  # fmt: skip
"""Keys that a run's name contains in any case."""


def varied(overrides: Sequence[str], sweep: Sequence[Sequence[str]], *, but: Sequence[str] = ()) -> list[str]:
    """The overrides of a job in which the jobs of its sweep differ, as `key=value` with shortened keys.

    A key is shortened to its last part unless two keys end alike. but: keys that are left out.
    """
    values: dict[str, set[str]] = {}
    for job in sweep:
        for key, _, value in (override.lstrip("+").partition("=") for override in job):
            values.setdefault(key, set()).add(value)
    keys = [key for key, several in values.items() if len(several) > 1 and key not in but]
    own = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    return [f"{short(key, keys)}={own[key]}" for key in keys if key in own]


def sweep_name(folder: Path) -> str:
    """The name of a sweep in its runs: its folder, relative to the working directory if it is inside."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else folder.name


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
