"""The command line of the programs here: Hydra composes, a job function runs, the exit code tells.

0: every job ended well. 1: a job failed. 2: a config is wrong, and nothing was started. 130: interrupted.
What is wrong is one line on stderr; HYDRA_FULL_ERROR=1 shows Hydra's tracebacks.

Hydra composes each job once, in this process. In a sweep a job that is wrong or fails is reported, and the
others go on.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from analysis.events import METRICS, read_events
from experiments.config import help
from experiments.config.checks import from_composed
from experiments.config.errors import explain
from experiments.config.files import CONF, added_folders
from experiments.config.schema import Config, ConfigError, register
from hydra_plugins._mdcs_slurm import MdcsLauncher
from hydra_plugins._mdcs_sweeper import MdcsSweeper
from launch.claim import Occupied, claim
from mdcs.planner.interfaces import decides_schedule

HANDED_IN = "handed in"
_HANDS_IN = "hydra_plugins._mdcs_slurm."


@dataclass(frozen=True)
class JobResult:
    """How a job ended. status: ok, failed, invalid (its config is wrong; it has no folder), or handed in: it has not ended."""

    status: str
    overrides: tuple[str, ...]
    reason: str = ""
    folder: Path | None = None


@dataclass
class Session:
    """One call of a program: its jobs' results so far; of a sweep its folder too, and the configs of the jobs it is to run."""

    results: list[JobResult] = field(default_factory=list)
    sweep: Path | None = None
    accepted: list[Config] = field(default_factory=list)
    claimed: ExitStack = field(default_factory=ExitStack)
    """The sweep's folder, in which no other sweep may number its jobs meanwhile."""


Job = Callable[[Config, Path], str]
"""(config, its folder) → the reason why it failed, empty when it ended well. Raises ConfigError before it starts."""


def run(
    job: Job,
    *,
    on_sweep_end: Callable[[Session], None] | None = None,
    freeze: Callable[[Config, Path], None] | None = None,
) -> int:
    """Run `job` for what the command line asks for; returns the exit code.

    Without `on_sweep_end` a sweep is refused. It is called after the last job of a sweep in which any job
    ran. `freeze` leaves in a job's folder what a launcher that hands jobs in takes to run it; without it there is none.
    """
    session = Session()
    with session.claimed:
        return _run(session, job, on_sweep_end, freeze)


def _run(
    session: Session,
    job: Job,
    on_sweep_end: Callable[[Session], None] | None,
    freeze: Callable[[Config, Path], None] | None,
) -> int:
    register()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    signal.signal(signal.SIGTERM, _stop)  # as for Ctrl-C: ranks are ended before this process is
    for plugin in (MdcsSweeper, MdcsLauncher):
        Plugins.instance().register(plugin)
    MdcsSweeper.judge = staticmethod(lambda compose, overrides: _judge(session, compose, overrides))

    def task(composed: DictConfig) -> None:
        _run_job(session, job, composed, sweeps=on_sweep_end is not None, freeze=freeze)

    # Hydra takes flags before or after all overrides, but not between them.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    asks_for_help = bool({"-h", "--help"} & set(sys.argv))
    wants_tracebacks = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises what it would print over many lines
    try:
        if asks_for_help:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends as other programs do
            print(help.text(sys.modules["__main__"].__doc__ or "", sys.argv[1:]))
            return 0
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
    except OSError as error:  # outside of any job: Hydra cannot make a folder
        if wants_tracebacks:
            raise
        session.results.append(JobResult("failed", (), f"{type(error).__name__}: {error}"))
        print(f"failed: {session.results[-1].reason}", file=sys.stderr)
    finally:
        if not wants_tracebacks:
            del os.environ["HYDRA_FULL_ERROR"]
    session.results = [_ended(result) if result.status == HANDED_IN else result for result in session.results]
    if session.sweep is not None and on_sweep_end is not None and any(r.folder for r in session.results):
        on_sweep_end(session)
    return _exit_code(session)


def _run_job(
    session: Session, job: Job, composed: DictConfig, *, sweeps: bool, freeze: Callable[[Config, Path], None] | None
) -> None:
    # Nothing may be raised to Hydra: it would print its own words, and end a sweep at the first failure.
    settings = HydraConfig.get()
    overrides, folder = tuple(settings.overrides.task), Path(settings.runtime.output_dir)
    try:
        config = from_composed(composed, settings.runtime.choices)
        if settings.mode == RunMode.MULTIRUN:
            if not sweeps:
                raise ConfigError("--multirun", "this program takes one job")
            sweep = Path(settings.sweep.dir).resolve()
            _claim_sweep(session, sweep)
            config.run.sweep = config.run.sweep or sweep_name(sweep)
        elif unused := _unused(config, overrides):
            print(f"{_decides(config)}: not used: {' '.join(unused)}", file=sys.stderr)
        if settings.mode == RunMode.MULTIRUN and str(settings.launcher._target_).startswith(_HANDS_IN):
            if freeze is None:
                raise ConfigError("hydra/launcher", "this program's jobs cannot be handed in")
            freeze(config, folder)
            session.results.append(JobResult(HANDED_IN, overrides, "" if settings.launcher.wait else HANDED_IN, folder))
            return
        reason = job(config, folder)
    except ConfigError as error:
        session.results.append(JobResult("invalid", overrides, str(error)))
        print(error, file=sys.stderr)
        return
    except OSError as error:  # of a full disk, say
        reason = f"{type(error).__name__}: {error}"
    session.results.append(JobResult("failed" if reason else "ok", overrides, reason, folder))
    if reason:
        print(f"failed: {reason} (its logs are in {folder})", file=sys.stderr)


def _ended(result: JobResult) -> JobResult:
    """What a job that was handed in has left in its folder says of it."""
    assert result.folder is not None
    metrics = result.folder / METRICS
    last = next(reversed(read_events(metrics)), None) if metrics.exists() else None
    if last is None or last["event"] not in ("summary", "failure"):
        if result.reason == HANDED_IN:  # and nobody has waited
            return result
        reason = "it has ended and says nothing of how"
    else:
        reason = last.get("reason", "")
    if reason:
        print(f"failed: {reason} (its logs are in {result.folder})", file=sys.stderr)
    return replace(result, status="failed" if reason else "ok", reason=reason)


def _claim_sweep(session: Session, folder: Path) -> None:
    if session.sweep is None:
        try:
            session.claimed.enter_context(claim(folder))
        except Occupied as error:
            raise ConfigError("hydra.sweep.dir", str(error)) from error
        session.sweep = folder


def _judge(session: Session, compose: Callable[[], DictConfig], overrides: Sequence[str]) -> bool:
    try:
        config = from_composed(compose())
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        reason = str(explain(error, overrides))
        if all(reason != result.reason for result in session.results):  # once, not for every job of an axis
            print(f"{reason} (job {' '.join(overrides)})", file=sys.stderr)
        session.results.append(JobResult("invalid", tuple(overrides), reason))
        return False
    if config in session.accepted:
        why = f": {_decides(config)}" if decides_schedule(config.strategy) else ""
        print(f"same as job {session.accepted.index(config)}{why} (job {' '.join(overrides)})", file=sys.stderr)
        return False
    session.accepted.append(config)
    return True


def _decides(config: Config) -> str:
    return f"strategy={config.strategy.name} decides the schedule"


def _unused(config: Config, overrides: Sequence[str]) -> list[str]:
    """What was asked for of a schedule that the strategy decides itself."""
    if not decides_schedule(config.strategy):
        return []
    return [each for each in overrides if each.partition("=")[0].partition(".")[0] == "scheduler"
            or each.startswith("budget.schedule_share=") and not each.endswith("=null")]  # fmt: skip


def _exit_code(session: Session) -> int:
    bad = [result for result in session.results if result.status not in ("ok", HANDED_IN)]
    if session.sweep is not None and bad:
        names = "; ".join(" ".join(result.overrides) or "(no overrides)" for result in bad)
        print(f"{len(bad)} of {len(session.results)} jobs failed: {names}", file=sys.stderr)
    if bad and all(result.status == "invalid" for result in session.results):
        return 2
    return 1 if bad else 0


def sweep_name(folder: Path) -> str:
    """What runs of a sweep call it."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else folder.name


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
