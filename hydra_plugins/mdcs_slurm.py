"""A Hydra launcher for jobs that SLURM runs. A sweep is an array of jobs.

    mdcs train -m hydra/launcher=mdcs_slurm hydra.launcher.nodes=2 hydra.launcher.ranks_per_node=8 …

Hydra finds it by itself, for any program. Each job is the program with the job's overrides, started once per rank.
A program that sets `MdcsLauncher.prepares` says instead what runs: its task function writes the command into the job's
folder (`_mdcs_jobs.COMMAND`), and the list of jobs that must end before (`_mdcs_jobs.BEFORE`).
"""

# No `from __future__ import annotations`: Hydra executes a plugin before it is in sys.modules, where dataclasses look.

import hashlib
import math
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from hydra_plugins import _mdcs_jobs as jobs

ROOT = Path(__file__).resolve().parent.parent
CODE = ("analysis", "experiments", "hydra_plugins", "launch", "mdcs", "conf")
REQUEUE = "MDCS_REQUEUE"
"""Environment variable: a job that is told to stop continues later (`launch.preemption`)."""
LOGS = "submitted"
"""Folder in a sweep's folder: per job, its script and the output of each rank."""

TIDY = "tidy"
_TIDY = """#!/bin/sh
rm -rf "${TMPDIR:-/tmp}/mdcs-rank-$SLURM_JOB_ID.$SLURM_STEP_ID.$SLURM_PROCID-"*
"""
"""Script that SLURM runs on a node when a rank has ended, even if it was killed (`launch.spmd`)."""

_GRIDS = ("BasicSweeper", "MdcsSweeper")
"""Classes of sweepers that know all jobs before the first."""


@dataclass
class SbatchOptions:
    """Options of sbatch, with sbatch's meaning and form."""

    job_name: str = "mdcs"
    nodes: int = 1
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus_per_node: str | None = None
    gres: str | None = None
    mem: str | None = None
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    time: str | None = "60"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    comment: str | None = None


@dataclass
class MdcsSlurmConf(SbatchOptions):
    """Settings of the launcher. Hydra checks the types, the launcher checks the ranges."""

    _target_: str = "hydra_plugins.mdcs_slurm.MdcsLauncher"
    ranks_per_node: int = 1
    container: str | None = None
    python: str | None = None
    modules: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    parallel: int = 16
    wait: bool = True
    exclusive: bool = False
    dependency: str | None = None
    sbatch: dict[str, str] = field(default_factory=dict)
    cpu_bind: str | None = None
    gpu_bind: str | None = None
    srun_args: list[str] = field(default_factory=list)
    requeue: bool = True
    grace_s: int = 90


ConfigStore.instance().store(group="hydra/launcher", name="mdcs_slurm", node=MdcsSlurmConf, provider="mdcs")

_QUEUE = (
    "_target_", "mem", "mem_per_cpu", "mem_per_gpu", "time", "account", "qos", "reservation", "exclude", "dependency",
    "job_name", "comment", "parallel", "wait", "requeue", "grace_s",
)  # fmt: skip
_QUEUE_SBATCH = ("begin", "comment", "deadline", "dependency", "job-name", "mail-type", "mail-user", "nice", "priority")
_SBATCH = tuple(leaf.name for leaf in fields(SbatchOptions))
MEASURED = tuple(leaf.name for leaf in fields(MdcsSlurmConf) if leaf.name not in _QUEUE)
"""Settings that change a job's measurements and so its identity."""


def measured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a launcher that its jobs' measurements depend on."""
    sbatch = {key: value for key, value in settings["sbatch"].items() if key.replace("_", "-") not in _QUEUE_SBATCH}
    return {name: settings[name] for name in MEASURED} | {"sbatch": sbatch}


def check(asked: MdcsSlurmConf) -> None:
    """Raise ValueError, one line with the key, for the first value out of its range."""
    for leaf in fields(asked):
        value, key = getattr(asked, leaf.name), f"hydra.launcher.{leaf.name}"
        if type(value) is int and value < 1:
            raise ValueError(f"{key}: must be >= 1, got {value}")
        texts = value.values() if isinstance(value, Mapping) else [value] if isinstance(value, str) else value
        for text in texts if isinstance(texts, Iterable) else ():
            if "\n" in str(text):
                raise ValueError(f"{key}: must be one line, got {text!r}")
    names = ("env", r"[A-Za-z_]\w*", "variable"), ("sbatch", r"[a-z][a-z_-]*", "long option of sbatch")
    for name, form, what in names:
        for each in getattr(asked, name):
            if not re.fullmatch(form, each):
                raise ValueError(f"hydra.launcher.{name}: {each} is no name of a {what}")


class MdcsLauncher(Launcher):
    """Submits jobs, and waits for them if the config says so. Raises ValueError from `setup` on for a wrong setting.

    prepares: the program's task function does not run a job, but writes the command of a job that is to run.
    resumes: its jobs hear SLURM's signal to stop, and go on later (`REQUEUE`).
    objective: what a sweeper minimizes, of the folder of a job that ended well. A job that did not counts as infinite.
    """

    prepares: ClassVar[bool] = False
    resumes: ClassVar[bool] = False
    objective: ClassVar[Callable[[Path], float] | None] = None

    def __init__(self, **settings: Any) -> None:
        self.asked = MdcsSlurmConf(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        check(self.asked)
        if not self.asked.wait and not config.hydra.sweeper._target_.endswith(_GRIDS):
            raise ValueError("hydra.launcher.wait: must be true, as this hydra/sweeper needs the results of jobs")
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        prepared = [self._prepare(list(each), initial_job_idx + i) for i, each in enumerate(job_overrides)]
        folders = [Path(made.hydra_cfg.hydra.runtime.output_dir) for made in prepared]  # type: ignore[union-attr]
        if ready := [folder for folder in folders if (folder / jobs.COMMAND).exists()]:
            submit(self.asked, Path(str(self.config.hydra.sweep.dir)).resolve(), ready, self.prepares, self.resumes)
        for made, folder in zip(prepared, folders, strict=True) if self.asked.wait else ():
            if made.status == JobStatus.FAILED:  # what its task has raised is for the sweeper
                continue
            if self.prepares:
                value = type(self).objective
                made.return_value = value and (value(folder) if jobs.exit_code(folder) == 0 else math.inf)
            elif reason := jobs.failure(folder):
                made.status, made.return_value = JobStatus.FAILED, RuntimeError(reason)
        return prepared

    def _prepare(self, overrides: list[str], number: int) -> JobReturn:
        config: Any = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        task = self.task_function if self.prepares else lambda composed: None
        where = ("hydra.sweep.dir", "hydra.sweep.subdir")
        made = run_job(task, config, *where, self.hydra_context, configure_logging=False)
        if not self.prepares:
            rerun(Path(made.hydra_cfg.hydra.runtime.output_dir), made.hydra_cfg.hydra)  # type: ignore[union-attr]
        return made


def rerun(folder: Path, settings: Any, *more: str) -> None:
    """Write the command of a job that is this program with the job's overrides, and `more`; `settings` are Hydra's."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if (path := Path(str(main.__file__)).resolve()).is_relative_to(ROOT / "experiments"):
        program = f'"$code"/{path.relative_to(ROOT)}'
    elif spec is not None:
        program = f"-m {spec.name.removesuffix('.__main__')}"
    else:
        program = shlex.quote(str(path))
    flags = [] if settings.job.config_name is None else [f"--config-name={settings.job.config_name}"]
    sources = settings.runtime.config_sources
    flags += [f"--config-dir={each.path}" for each in sources if each.provider == "command-line"]
    own = [each for each in settings.overrides.hydra if not each.startswith(("hydra.mode=", "hydra.run.dir="))]
    given = [*flags, *settings.overrides.task, *own, *more, "hydra.mode=RUN", f"hydra.run.dir='{folder}'"]
    (folder / jobs.COMMAND).write_text(f"{program} {shlex.join(given)}", encoding="utf-8")


def submit(asked: MdcsSlurmConf, sweep: Path, folders: Sequence[Path], copies: bool, resumes: bool) -> None:
    """Submit the jobs in these folders, and those that must end before. Wait for them if `asked` says so.

    Ctrl-C cancels all of them; SIGTERM ends this program alone. copies: they run a copy of the code as it is now.
    """
    code, logs, made = snapshot(sweep / "code") if copies else None, sweep / LOGS, dict[Path, jobs.Job]()
    logs.mkdir(parents=True, exist_ok=True)
    (logs / TIDY).write_text(_TIDY, encoding="utf-8")
    (logs / TIDY).chmod(0o755)
    most = jobs.largest_array() if len(folders) > 1 else 1
    first, running = to_end_before(folders)
    for folder in (*first, *folders):
        (folder / jobs.EXIT_CODE).unlink(missing_ok=True)

    def start(group: Sequence[Path], after: Sequence[jobs.Job] = ()) -> str:
        for i in range(0, len(group), most):
            part = group[i : i + most]
            jobs.submit(script(asked, code, logs, part, after, resumes=resumes), logs, part, made)
        return ", ".join(made[folder].number for folder in group)

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        print(f"ended; the jobs go on: mdcs jobs {sweep}", file=sys.stderr, flush=True)
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        if first:
            print(f"submitted first, as the others need its profile: {start(first)}", flush=True)
        needed = [job for folder in (*running, *first) if (job := jobs.read(folder)) is not None]
        print(f"submitted: {start(folders, needed)}; logs are in {logs}", flush=True)
        if asked.wait:
            jobs.wait(made)
    except (Exception, KeyboardInterrupt):
        if made:
            jobs.said("scancel", *(job.number for job in made.values()))
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def to_end_before(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Folders of jobs that must end before these begin: (jobs to submit now, jobs that have not ended yet). What only
    one of `folders` needs is in neither: that job runs it itself."""
    needed = Counter(each for folder in folders for each in jobs.before(folder))
    running = [folder for folder in needed if jobs.state(folder)]
    ended = [folder for folder in needed if folder not in running]
    first = [folder for folder in ended if needed[folder] > 1 and (folder / jobs.COMMAND).exists()]
    for folder in ended:
        if folder not in first:
            (folder / jobs.FILE).unlink(missing_ok=True)  # left by a job that has ended
    return first, running


def script(
    asked: MdcsSlurmConf, code: Path | None, logs: Path, folders: Sequence[Path], after: Sequence[jobs.Job] = (), *,
    resumes: bool,
) -> str:
    """The batch script of the jobs in `folders`: one job, or an array of several.

    code: folder that is on Python's path before all others; `$code` in the commands.
    after: jobs that must end well first; if one does not, SLURM removes these from the queue.
    """
    several, goes_on = len(folders) > 1, asked.requeue and resumes
    options = {name: value for name in _SBATCH if (value := getattr(asked, name)) is not None} | {
        "ntasks_per_node": asked.ranks_per_node, "open_mode": "append",
        **({"signal": f"USR1@{asked.grace_s}"} if goes_on else {}),
        "output": logs / ("%A_%a.log" if several else "%j.log"), "requeue" if asked.requeue else "no_requeue": True,
    }  # fmt: skip
    options = {name.replace("_", "-"): value for name, value in (*options.items(), *asked.sbatch.items())}
    first = f"afterok:{':'.join(job.number for job in after)}" if after else ""
    if dependency := ",".join(filter(None, [asked.dependency, options.get("dependency"), first])):
        options |= {"dependency": dependency, "kill-on-invalid-dep": "yes"}
    options |= {"exclusive": True} if asked.exclusive else {}
    options |= {"array": f"0-{len(folders) - 1}%{asked.parallel}"} if several else {}
    lines = ["#!/bin/bash"]
    for key, value in options.items():
        lines.append(f"#SBATCH --{key}" + ("" if value is True else f"={shlex.quote(str(value))}"))
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if several else "$SLURM_JOB_ID"
    lines += [f"export {REQUEUE}=1"] if goes_on else []
    lines += [f"module load {shlex.quote(module)}" for module in asked.modules]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in asked.env.items()]
    if code is not None:
        lines += [f"code={shlex.quote(str(code))}", 'export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"']
    lines += [*asked.setup, "case ${SLURM_ARRAY_TASK_ID:-0} in"]
    for i, folder in enumerate(folders):
        command = (folder / jobs.COMMAND).read_text(encoding="utf-8")
        lines.append(f"{i}) folder={shlex.quote(str(folder))} command=({command}) ;;")
    launch = [*shlex.split(asked.container or ""), asked.python or sys.executable, "-u"]
    srun = ["srun", f"--task-epilog={logs / TIDY}", "--kill-on-bad-exit=1", "--open-mode=append", *(
        f"--{name.replace('_', '-')}={value}" for name in ("cpus_per_task", "cpu_bind", "gpu_bind")
        if (value := getattr(asked, name)) is not None  # srun does not take over the script's CPUs
    ), *asked.srun_args]  # fmt: skip
    lines += [
        "esac",
        f'logs={shlex.quote(str(logs))}/{number}; mkdir -p "$logs"; rm -f "$folder/{jobs.EXIT_CODE}"',
        "trap : TERM USR1",  # the ranks are told, too, and this script waits for them
        f'{shlex.join(srun)} --output="$logs/rank-%t.log" {shlex.join(launch)} "${{command[@]}}"',
        f'code=$?; echo $code >"$folder/{jobs.EXIT_CODE}"; exit $code',
    ]
    return "\n".join(lines) + "\n"


def snapshot(target: Path) -> Path:
    """Copy the code as it is now into a folder in `target`, named by the hash of its contents. Return that folder."""
    files = (path for name in CODE for path in sorted((ROOT / name).rglob("*")) if path.is_file())
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in files if "__pycache__" not in path.parts}
    made = target / hashlib.sha256(repr(contents).encode()).hexdigest()[:12]
    if not made.exists():
        part = target / f".{os.getpid()}"
        for name, content in contents.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(content)
        part.rename(made)
    return made
