"""The command line of the programs: Hydra composes a config, a job function runs it, and the exit code is the result.

0: every job ended well. 1: a job failed. 2: a config is wrong, and nothing was started. 130: interrupted.
Errors are one line on stderr; HYDRA_FULL_ERROR=1 shows Hydra's tracebacks.

Hydra composes each job once, in this process. In a sweep, a job that is wrong or fails is reported, and the other jobs
run (`experiments.job.sweep`). With a launcher that submits jobs, they run later (`experiments.job.submission`).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import PicklingError
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config.errors import explain
from experiments.config.files import CONF, added_folders
from experiments.config.schema import Config, ConfigError, register
from experiments.job import checkpoints, record
from experiments.job.arguments import help_text, prepared, require_one_job, require_own, unused_of
from experiments.job.profiles import PlannerFault
from experiments.job.resolved import on_rank_zero
from experiments.job.run import Infeasible
from experiments.job.submission import config_of, freeze, launcher_of, settled, starts_its_ranks
from experiments.job.sweep import JobResult, Session, decides, sweep_name, varied
from hydra_plugins import _mdcs_jobs, mdcs_slurm, mdcs_sweeper
from launch import preemption

_FULL = "HYDRA_FULL_ERROR"
_IN_NAMES = (
    "model", "strategy", "scheduler", "recompute", "engine", "budget", "budget.limit",
    "budget.schedule_share", "budget.activation_share", "cluster.ranks", "run.name",
)  # fmt: skip
"""Keys that a run's name contains in any case."""

Job = Callable[[Config, Path], str]
"""(config, folder) → reason of the failure, empty when the job ended well.

Raises ConfigError before it starts, and Infeasible where no plan keeps the budget.
"""


@dataclass
class Program:
    """A program that runs jobs. Hydra calls `_begin` and `_judge` before a sweep, and `_task` for each job.

    - on_sweep_end: called after a sweep that has a job with a folder. None: a sweep is refused, unless its jobs are
      submitted.
    - on_earlier: called for every job that the sweep's folder already has a run of. None: sweeps are not continued.
    - objective: what a sweeper minimizes, of the folder of a job that ended well. Other jobs count as infinite.
    - freezes: the config of a submitted job is resolved now, its profile is shared, and it goes on when it is
      preempted. Otherwise a submitted job is this program with the job's overrides.
    """

    job: Job
    own: tuple[str, ...] = ()  # groups of `OWN` that this program has; keys of the others are refused
    on_sweep_end: Callable[[Session], None] | None = None
    on_earlier: Callable[[Config, Path], object] | None = None
    objective: Callable[[Path], float] | None = None
    freezes: bool = False
    lists: Callable[[Sequence[str]], list[str]] | None = None  # puts lists of values (KEY=A,B) into one job

    def run(self) -> int:
        """Run the program for the command line. Return the exit code."""
        return on_rank_zero(self._run)

    def _run(self) -> int:
        self.session, self.wants_tracebacks = Session(), os.environ.get(_FULL) == "1"
        register()
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
        if threading.current_thread() is threading.main_thread():  # else `launch.spmd` hears it
            signal.signal(signal.SIGTERM, preemption.terminate)
        Plugins.instance()  # executes the modules of the plugins, maybe again: their classes are those from here on
        mdcs_slurm.MdcsLauncher.prepares, mdcs_slurm.MdcsLauncher.resumes = True, self.freezes
        mdcs_slurm.MdcsLauncher.objective = self.objective and staticmethod(self.objective)
        mdcs_sweeper.MdcsSweeper.begin = staticmethod(self._begin)
        mdcs_sweeper.MdcsSweeper.judge = staticmethod(self._judge)
        try:
            arguments = prepared(sys.argv[1:], self.lists)
        except ConfigError as error:
            return _refuse(error)
        # Hydra reads the command line here, and nowhere else; its completion is for the command mdcs
        sys.argv = ["mdcs" if "-sc" in arguments else sys.argv[0], *arguments]
        try:
            with self.session.claimed:
                return self._compose() or self._end()
        except KeyboardInterrupt:
            sweep = self.session.sweep
            how = "" if sweep is None else f"; hydra.sweep.dir={sweep} continues the sweep"
            print(f"interrupted: all ranks were ended{how}", file=sys.stderr)
            return 130

    def _compose(self) -> int:
        """Have Hydra compose and run the jobs. Return 2 if nothing was started because of an error, else 0."""
        os.environ[_FULL] = "1"  # Hydra then raises errors instead of printing many lines
        try:
            if {"-h", "--help", "help"} & set(sys.argv[1:]):
                before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends as other programs do
                print(help_text(sys.modules["__main__"].__doc__ or "", sys.argv[1:], self.own), flush=True)
                signal.signal(signal.SIGPIPE, before)
                return 0
            for argument in sys.argv[1:]:
                require_own(argument, self.own)
            for folder in added_folders(sys.argv[1:]):
                if not folder.is_dir():
                    raise ConfigError("--config-dir", f"no such folder: {folder}")
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(self._task)()
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            if self.wants_tracebacks:
                raise
            return _refuse(explain(error, sys.argv[1:]))
        except (PicklingError, TypeError) as error:
            if self.wants_tracebacks or "pickle" not in str(error):
                raise
            why = "jobs of one machine run one after the other, or they would disturb what they measure"
            known = "joblib does with hydra.launcher.n_jobs=1; mdcs_slurm submits jobs to SLURM"
            return _refuse(f"hydra/launcher: {why}; {known}")
        except OSError as error:  # outside of any job, e.g. Hydra cannot make a folder
            if self.wants_tracebacks:
                raise
            if error.errno != errno.ENOSPC and not self.session.results:
                keys = {each.partition("=")[0] for each in sys.argv[1:]}
                own = "hydra.sweep.dir" if {"-m", "--multirun"} & keys else "hydra.run.dir"
                key = own if own in keys or "paths.root" not in keys else "paths.root"
                return _refuse(ConfigError(key, f"{error.filename} cannot be written: {error.strerror}"))
            self.session.results.append(_failed((), f"{type(error).__name__}: {error}"))
        finally:
            if not self.wants_tracebacks:
                os.environ.pop(_FULL, None)
        return 0

    def _begin(self, config: DictConfig) -> None:
        if self.on_sweep_end is None and launcher_of(config.hydra) is None:
            raise ConfigError("--multirun", "this program takes one job")
        if config.plan.format == "json":
            logging.getLogger("hydra").setLevel(logging.WARNING)  # its lines on stdout would stand in the document
        self.session.begin(config, continues=self.on_earlier is not None)

    def _judge(self, compose: Callable[[], DictConfig], overrides: Sequence[str]) -> str | None:
        try:
            composed = compose()
            launcher = launcher_of(composed.hydra)
            config = config_of(composed, None, launcher, overrides)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            self.session.refuse(str(explain(error, overrides)), overrides)
            return None
        return self.session.place(config, record.parts_of(config, launcher), overrides, self.on_earlier)

    def _task(self, composed: DictConfig) -> float | None:
        """Run one job. Return its objective. Nothing may be raised to Hydra: it would print its own message, and end a
        sweep at the first failure."""
        settings, session = HydraConfig.get(), self.session
        overrides, folder = tuple(settings.overrides.task), Path(settings.runtime.output_dir)
        if not self.wants_tracebacks:
            os.environ.pop(_FULL, None)  # what jobs start has the environment of this program
        ended = JobResult("left out", overrides)
        if not (composed.sweep.fail_fast and any(result.status == "failed" for result in session.results)):
            try:
                ended = self._run_job(composed, settings, overrides, folder)
            except (ConfigError, HydraException, OmegaConfBaseException) as error:  # of a sweeper that judges no jobs
                ended = JobResult("invalid", overrides, str(explain(error, overrides)))
                print(ended.reason, file=sys.stderr)
            except Infeasible as error:
                ended = JobResult(record.INFEASIBLE, overrides, str(error), folder)
                if session.sweep is None:
                    ended = _failed(overrides, str(error), folder)
                else:
                    print(f"does not fit: {error} (job {' '.join(overrides)})", file=sys.stderr)
            except Exception as error:
                is_told = isinstance(error, PlannerFault) and not self.wants_tracebacks
                if not is_told and not isinstance(error, OSError):  # not e.g. a full disk, but a fault of the code
                    if session.sweep is None:
                        raise
                    traceback.print_exc()
                reason = str(error) if is_told else f"{type(error).__name__}: {error}"
                ended = _failed(overrides, " ".join(reason.split()), folder)
        session.results.append(ended)
        os.environ[_FULL] = "1"
        if self.objective is None:
            return None
        return self.objective(folder) if ended.status == record.OK else math.inf

    def _run_job(self, composed: DictConfig, settings: Any, overrides: tuple[str, ...], folder: Path) -> JobResult:
        session, launcher = self.session, launcher_of(settings)
        if session.sweep is None and settings.mode == RunMode.MULTIRUN:  # a sweeper that judges no jobs, e.g. Hydra's
            session.sweep = Path(str(settings.sweep.dir)).resolve()
        config = config_of(composed, settings.runtime.choices, launcher, overrides)
        if session.sweep is None:
            require_one_job(settings, overrides)
            if unused := unused_of(config, overrides):
                print(f"{decides(config)}: not used: {' '.join(unused)}", file=sys.stderr)
        else:
            config.run.sweep = config.run.sweep or sweep_name(session.sweep)
            config.run.varied = config.run.varied or " ".join(varied(overrides, session.asked, but=_IN_NAMES)) or None
            if config.run.resume is None and not config.sweep.force and checkpoints.any_in(folder):
                config.run.resume = "auto"
        if launcher is None:
            reason, own = self.job(config, folder), folder / ".hydra"
            with suppress(OSError):  # a full disk, which is no reason for anything by now
                own.mkdir(parents=True, exist_ok=True)  # Hydra would write before the folder is the job's
                OmegaConf.save(composed, own / "config.yaml")
                OmegaConf.save(OmegaConf.create({"hydra": settings}), own / "hydra.yaml")
                OmegaConf.save(settings.overrides.task, own / "overrides.yaml")
            return _failed(overrides, reason, folder) if reason else JobResult("ok", overrides, "", folder)
        assert session.sweep is not None
        if self.freezes:
            freeze(config, folder, launcher, session.sweep)
        else:
            if state := _mdcs_jobs.state(folder):
                raise ConfigError("hydra.sweep.dir", f"{folder} has a job that is {state}")
            more = [f"cluster.ranks={config.cluster.ranks}"] if starts_its_ranks(launcher) else []
            mdcs_slurm.rerun(folder, settings, *more)
        return JobResult(record.SUBMITTED, overrides, "" if settings.launcher.wait else record.SUBMITTED, folder)

    def _end(self) -> int:
        session, report = self.session, self.on_sweep_end
        session.results = [_ended(each) if each.status == record.SUBMITTED else each for each in session.results]
        if session.sweep is not None and report is not None and any(each.folder for each in session.results):
            report(session)
        fine = record.OK, record.SUBMITTED
        rows = (*fine, record.INFEASIBLE) if any(result.status in fine for result in session.results) else fine
        bad = [result for result in session.results if result.status not in rows]
        if session.accepted and bad:
            names = "; ".join(" ".join(result.overrides) or "(no overrides)" for result in bad)
            print(f"{len(bad)} of {len(session.results)} jobs failed: {names}", file=sys.stderr)
        if bad and all(result.status == "invalid" for result in session.results):
            return 2
        return 1 if bad else 0


def _refuse(reason: object) -> int:
    print(reason, file=sys.stderr)
    return 2


def _failed(overrides: tuple[str, ...], reason: str, folder: Path | None = None) -> JobResult:
    where = "" if folder is None else f" (its logs are in {folder})"
    print(f"failed: {reason}{where}", file=sys.stderr)
    return JobResult("failed", overrides, reason, folder)


def _ended(result: JobResult) -> JobResult:
    """The result of a submitted job, from what is in its folder."""
    assert result.folder is not None
    reason = settled(result.folder, waited=result.reason != record.SUBMITTED)
    if reason is None:
        return result
    said = record.read(result.folder)
    if said is not None and said.state == record.INFEASIBLE:
        return replace(result, status=record.INFEASIBLE, reason=reason)
    if reason:
        where = "" if said is not None and said.state == record.SUBMITTED else f" (its logs are in {result.folder})"
        print(f"failed: {reason}{where}", file=sys.stderr)
    return replace(result, status="failed" if reason else "ok", reason=reason)
