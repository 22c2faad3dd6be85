"""Hydra launchers for jobs that SLURM runs, or that this machine runs in the background. A sweep is an array of jobs.

    mdcs train -m hydra/launcher=mdcs_slurm hydra.launcher.nodes=2 hydra.launcher.ranks_per_node=8 …

Hydra finds them by itself, for any program. Each job is the program with the job's overrides, started once per rank.
A program that sets `MdcsLauncher.prepares` says instead what runs: its task function writes the command into the job's
folder (`_mdcs_jobs.COMMAND`), and the list of jobs that must end before (`_mdcs_jobs.BEFORE`).
"""

# No `from __future__ import annotations`: Hydra executes a plugin before it is in sys.modules, where dataclasses look.

import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NEEDED
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

from hydra._internal.utils import get_args_parser
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

_POLL_SECONDS = 0.5
_SHOW_SECONDS = 30.0


@dataclass
class MdcsSlurmConf:
    """Resources of a job, and how long this program waits. Hydra checks the types, the launcher checks the ranges.

    An option that sbatch has, too, has sbatch's meaning and form.
    """

    _target_: str = "hydra_plugins.mdcs_slurm.MdcsLauncher"
    executor: str = "slurm"
    nodes: int = 1
    ranks_per_node: int = 1
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
    exclusive: bool = False
    dependency: str | None = None
    job_name: str = "mdcs"
    comment: str | None = None
    sbatch: dict[str, str] = field(default_factory=dict)
    cpu_bind: str | None = None
    gpu_bind: str | None = None
    srun_args: list[str] = field(default_factory=list)
    container: str | None = None
    python: str | None = None
    modules: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    parallel: int = 16
    snapshot: bool = True
    wait: bool = True
    requeue: bool = True
    grace_s: int = 90
    print_script: bool = False


@dataclass
class MdcsLocalConf(MdcsSlurmConf):
    """The same for this machine, without SLURM. `check` refuses settings that only SLURM understands."""

    executor: str = "local"


for _name, _conf in (("mdcs_slurm", MdcsSlurmConf), ("mdcs_local", MdcsLocalConf)):
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_conf, provider="mdcs")

_SBATCH = (
    "job_name", "nodes", "cpus_per_task", "cpus_per_gpu", "gpus_per_node", "gres", "mem", "mem_per_cpu", "mem_per_gpu", "time",
    "partition", "account", "qos", "constraint", "reservation", "exclude", "comment",
)  # fmt: skip
RENAMED = {"cpus_per_node": "cpus_per_task", "mem_gb": "mem", "time_min": "time"}
"""Options of the former launcher, and what they are called now."""
_LOCAL = (
    "_target_", "executor", "ranks_per_node", "container", "python", "env", "modules", "setup", "parallel", "snapshot", "wait",
    "print_script",
)  # fmt: skip
_QUEUE = (
    "_target_", "mem", "mem_per_cpu", "mem_per_gpu", "time", "account", "qos", "reservation", "exclude", "dependency", "job_name",
    "comment", "parallel", "snapshot", "wait", "requeue", "grace_s", "print_script",
)  # fmt: skip
_QUEUE_SBATCH = ("begin", "comment", "deadline", "dependency", "job-name", "mail-type", "mail-user", "nice", "priority")
MEASURED = tuple(leaf.name for leaf in fields(MdcsSlurmConf) if leaf.name not in _QUEUE)
"""Settings that change a job's measurements and so its identity. On this machine `parallel` does too."""


def measured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a launcher that its jobs' measurements depend on."""
    names = (*MEASURED, "parallel") if settings["executor"] == "local" else MEASURED
    made = {name: settings[name] for name in names}
    return made | {"sbatch": {key: value for key, value in made["sbatch"].items() if key.replace("_", "-") not in _QUEUE_SBATCH}}


def check(asked: MdcsSlurmConf) -> None:
    """Raise ValueError, one line with the key, for the first value out of its range."""
    for leaf in fields(asked):
        value, key = getattr(asked, leaf.name), f"hydra.launcher.{leaf.name}"
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{key}: must be >= 1, got {value}")
        texts = value.values() if isinstance(value, Mapping) else [value] if isinstance(value, str) else value
        for text in texts if isinstance(texts, Iterable) else ():
            if "\n" in str(text):
                raise ValueError(f"{key}: must be one line, got {text!r}")
        usual = leaf.default_factory() if leaf.default_factory is not NEEDED else leaf.default
        if asked.executor == "local" and leaf.name not in _LOCAL and value != usual:
            raise ValueError(f"{key}: has no effect without SLURM, got {value}")
    if asked.executor not in ("slurm", "local"):
        raise ValueError(f"hydra.launcher.executor: must be slurm or local, got {asked.executor}")
    for name, form, what in (("env", r"[A-Za-z_]\w*", "variable"), ("sbatch", r"[a-z][a-z_-]*", "long option of sbatch")):
        for each in getattr(asked, name):
            if not re.fullmatch(form, each):
                raise ValueError(f"hydra.launcher.{name}: {each} is no name of a {what}")


class MdcsLauncher(Launcher):
    """Submits jobs, and waits for them if the config says so.

    prepares: the program's task function does not run a job, but writes the command of a job that is to run.
    resumes: its jobs hear SLURM's signal to stop, and go on later (`REQUEUE`).

    Raises ValueError from `setup` on, when a setting is wrong.
    """

    prepares: ClassVar[bool] = False
    resumes: ClassVar[bool] = False

    def __init__(self, **settings: Any) -> None:
        self.asked = MdcsSlurmConf(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        check(self.asked)
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        prepared = [self._prepare(list(each), initial_job_idx + i) for i, each in enumerate(job_overrides)]
        folders = [Path(made.hydra_cfg.hydra.runtime.output_dir) for made in prepared]  # type: ignore[union-attr]
        if ready := [folder for folder in folders if (folder / jobs.COMMAND).exists()]:
            submit(self.asked, Path(str(self.config.hydra.sweep.dir)).resolve(), ready, self.prepares, self.resumes)
        if not self.prepares and self.asked.wait:
            for made, folder in zip(prepared, folders, strict=True):
                if reason := jobs.failure(folder):
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
    """Write the command of a job that is this program with the job's overrides, and `more` of them.

    settings: Hydra's part of the job's config.
    """
    main, parsed = sys.modules["__main__"], get_args_parser().parse_args()
    spec = getattr(main, "__spec__", None)
    if (path := Path(str(main.__file__)).resolve()).is_relative_to(ROOT / "experiments"):
        program = f'"$code"/{path.relative_to(ROOT)}'
    elif spec is not None:
        program = f"-m {spec.name.removesuffix('.__main__')}"
    else:
        program = shlex.quote(str(path))
    flags = [f"--{name.replace('_', '-')}={getattr(parsed, name)}" for name in ("config_path", "config_name", "config_dir")
             if getattr(parsed, name) is not None]  # fmt: skip
    own = [each for each in settings.overrides.hydra if not each.startswith(("hydra.mode=", "hydra.run.dir="))]
    given = [*flags, *settings.overrides.task, *own, *more, "hydra.mode=RUN", f"hydra.run.dir='{folder}'"]
    (folder / jobs.COMMAND).write_text(f"{program} {shlex.join(given)}", encoding="utf-8")


def submit(asked: MdcsSlurmConf, sweep: Path, folders: Sequence[Path], copies: bool, resumes: bool) -> None:
    """Submit the jobs in these folders, and those that must end before. Wait for them if `asked` says so.

    Ctrl-C cancels all of them. SIGTERM ends this program alone, where SLURM has the jobs.

    copies: the jobs run a copy of the code as it is now. resumes: see `MdcsLauncher`.
    """
    code = None if not copies else snapshot(sweep / "code") if asked.snapshot else ROOT
    logs = sweep / LOGS
    write = functools.partial(script, asked, code, logs, resumes=resumes)
    logs.mkdir(parents=True, exist_ok=True)
    first, running = to_end_before(folders)
    for folder in (*first, *folders):
        (folder / jobs.EXIT_CODE).unlink(missing_ok=True)
    if asked.print_script:
        print(write(folders), flush=True)
    starter = _Slurm() if asked.executor == "slurm" else _Local(asked.parallel)
    try:
        with _left_alone(asked.executor == "slurm", sweep):
            if first:
                starter.start(write(first), logs, first)
                print(f"submitted first, as the others need its profile: {_numbers(first)}", flush=True)
            needed = [job for folder in (*running, *first) if (job := jobs.read(folder)) is not None]
            starter.start(write(folders, needed), logs, folders, needed)
            print(f"submitted: {_numbers(folders)}; logs are in {logs}", flush=True)
            if asked.wait:
                wait(starter)
    except BaseException as error:
        if not isinstance(error, _Left):
            for job in starter.made.values():
                jobs.cancel(job)
        raise


class _Left(SystemExit):
    """This program was told to end, and its jobs go on."""


@contextmanager
def _left_alone(enabled: bool, sweep: Path) -> Iterator[None]:
    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        print(f"ended; the jobs go on: mdcs jobs {sweep}", file=sys.stderr, flush=True)
        raise _Left(128 + signum)

    previous = signal.getsignal(signal.SIGTERM)
    if enabled:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _numbers(folders: Sequence[Path]) -> str:
    return ", ".join(job.number for job in map(jobs.read, folders) if job is not None)


def to_end_before(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Folders of jobs that must end before these jobs begin: (jobs to submit now, jobs that have not ended yet).

    A job that only one of `folders` needs is in neither list: that job runs it itself.
    """
    needed = Counter(each for folder in folders for each in jobs.before(folder))
    running = [folder for folder in needed if jobs.state(folder)]
    first = [folder for folder, n in needed.items() if folder not in running and n > 1 and (folder / jobs.COMMAND).exists()]
    for folder in needed:
        if folder not in (*running, *first):
            (folder / jobs.FILE).unlink(missing_ok=True)  # left by a job that has ended
    return first, running


def script(
    asked: MdcsSlurmConf, code: Path | None, logs: Path, folders: Sequence[Path], after: Sequence[jobs.Job] = (), *, resumes: bool
) -> str:
    """The batch script of the jobs in `folders`: one job, or an array of several.

    code: folder that is on Python's path before all others; `$code` in the commands.
    after: jobs that must end well first. If one does not, SLURM removes these jobs from the queue.
    """
    slurm, several = asked.executor == "slurm", len(folders) > 1
    lines = ["#!/bin/bash"]
    if slurm:
        options = {name.replace("_", "-"): getattr(asked, name) for name in _SBATCH if getattr(asked, name) is not None}
        options |= {"ntasks-per-node": asked.ranks_per_node, "open-mode": "append"}
        options |= {"signal": f"USR1@{asked.grace_s}"} if asked.requeue and resumes else {}
        options |= {"output": logs / ("%A_%a.log" if several else "%j.log"), "requeue" if asked.requeue else "no-requeue": True}
        options |= {name.replace("_", "-"): value for name, value in asked.sbatch.items()}
        conditions = [asked.dependency, options.get("dependency"), after and f"afterok:{':'.join(job.number for job in after)}"]
        if dependency := ",".join(each for each in conditions if each):
            options |= {"dependency": dependency, "kill-on-invalid-dep": "yes"}
        options |= {"exclusive": True} if asked.exclusive else {}
        options |= {"array": f"0-{len(folders) - 1}%{asked.parallel}"} if several else {}
        lines += [f"#SBATCH --{key}" + ("" if value is True else f"={shlex.quote(str(value))}") for key, value in options.items()]
        number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if several else "$SLURM_JOB_ID"
    else:
        number = "$$"
    lines += [f"export {REQUEUE}=1"] if slurm and asked.requeue and resumes else []
    lines += [f"module load {shlex.quote(module)}" for module in asked.modules]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in asked.env.items()]
    if code is not None:
        lines += [f"code={shlex.quote(str(code))}", 'export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"']
    lines += [*asked.setup, "case ${SLURM_ARRAY_TASK_ID:-0} in"]
    for i, folder in enumerate(folders):
        command = (folder / jobs.COMMAND).read_text(encoding="utf-8")
        lines.append(f"{i}) folder={shlex.quote(str(folder))} command=({command}) ;;")
    launch = [*shlex.split(asked.container or ""), asked.python or sys.executable, "-u"]
    srun = ["srun", "--kill-on-bad-exit=1", "--open-mode=append", *(
        f"--{name.replace('_', '-')}={value}" for name in ("cpus_per_task", "cpu_bind", "gpu_bind")
        if (value := getattr(asked, name)) is not None  # srun does not take over the script's CPUs
    ), *asked.srun_args]  # fmt: skip
    run = f'{shlex.join(srun)} --output="$logs/rank-%t.log" ' if slurm else ""
    lines += [
        "esac",
        f'logs={shlex.quote(str(logs))}/{number}; mkdir -p "$logs"; rm -f "$folder/{jobs.EXIT_CODE}"',
        "trap : TERM USR1",  # the ranks are told, too, and this script waits for them
        f'{run}{shlex.join(launch)} "${{command[@]}}"' + ("" if slurm else ' >"$logs/rank-0.log" 2>&1'),
        f'code=$?; echo $code >"$folder/{jobs.EXIT_CODE}"; exit $code',
    ]
    return "\n".join(lines) + "\n"


class _Slurm:
    """Starts jobs with sbatch. made: the jobs, by folder."""

    def __init__(self) -> None:
        self.made: dict[Path, jobs.Job] = {}

    def start(self, text: str, logs: Path, folders: Sequence[Path], after: object = ()) -> None:
        """Submit the script of these jobs. Raises ValueError if sbatch refuses it."""
        try:
            said = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            raise ValueError("hydra/launcher: there is no sbatch here: submit from a login node of a SLURM cluster") from None
        except subprocess.CalledProcessError as error:
            raise ValueError(f"hydra.launcher: sbatch refuses the jobs: {' '.join(error.stderr.split())}") from error
        number = said.strip().partition(";")[0]
        for i, folder in enumerate(folders):
            self._add(folder, jobs.Job("slurm", each := f"{number}_{i}" if len(folders) > 1 else number, str(logs / each)))
        (logs / f"{number}.sh").write_text(text, encoding="utf-8")

    def states(self) -> list[str]:
        """The states of all jobs."""
        return jobs.states([*self.made.values()])

    def _add(self, folder: Path, job: jobs.Job) -> None:
        self.made[folder] = job
        jobs.write(folder, job)


class _Local(_Slurm):
    """Starts jobs as processes of this machine, `parallel` at a time."""

    def __init__(self, parallel: int) -> None:
        super().__init__()
        self.parallel, self.processes = parallel, list[subprocess.Popen[bytes]]()

    def start(self, text: str, logs: Path, folders: Sequence[Path], after: Any = ()) -> None:
        """Start the jobs of this script, each as soon as there is a slot, and after those that must end before."""
        while any(self.states()) or any(jobs.states(after)):
            time.sleep(_POLL_SECONDS)
        for i, folder in enumerate(folders):
            while sum(map(bool, self.states())) >= self.parallel:
                time.sleep(_POLL_SECONDS)
            env = os.environ | {"SLURM_ARRAY_TASK_ID": str(i)}
            process = subprocess.Popen(["bash", "-c", text], stdin=subprocess.DEVNULL, env=env, start_new_session=True)
            self.processes.append(process)
            self._add(folder, jobs.Job("local", str(process.pid), str(logs / str(process.pid))))

    def states(self) -> list[str]:
        for process in self.processes:
            process.poll()  # a process that has ended stays in /proc until then
        return super().states()


def snapshot(target: Path) -> Path:
    """Copy the code as it is now into a new folder in `target`. Return the folder. Later changes do not affect jobs.

    The name of the folder is the hash of its contents. A job that is submitted again after a change runs the new code.
    """
    part = target / f".{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    for name in CODE:
        shutil.copytree(ROOT / name, part / name, ignore=shutil.ignore_patterns("__pycache__"))
    digest = hashlib.sha256()
    for file in sorted(path for path in part.rglob("*") if path.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(part)} {len(content)} ".encode() + content)
    made = target / digest.hexdigest()[:12]
    if made.exists():
        shutil.rmtree(part)
    else:
        part.rename(made)
    return made


def wait(starter: _Slurm) -> None:
    """Wait until every job has ended, and print the jobs' states now and then."""
    shown, said, began = 0.0, "", time.monotonic()
    while True:
        states = starter.states()
        table = jobs.table(starter.made, states)
        if table != said and (not any(states) or time.monotonic() - shown > _SHOW_SECONDS):
            print(table, flush=True)
            shown, said = time.monotonic(), table
        if not any(states):
            return
        waited = time.monotonic() - began  # ask SLURM's controller less often the longer the wait
        time.sleep(min(max(_POLL_SECONDS, waited / 100), _SHOW_SECONDS / 2))
