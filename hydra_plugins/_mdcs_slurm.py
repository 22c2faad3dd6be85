"""Hydra launchers for jobs that SLURM runs, or that this machine runs in the background. A sweep is an array of jobs.

    mdcs train -m hydra/launcher=mdcs_slurm hydra.launcher.nodes=2 hydra.launcher.ranks_per_node=8 …

The program's task function writes into every job's folder the files that a later run needs, and the list of jobs that
must end before (`_mdcs_handed.BEFORE`). The launcher hands the jobs in through submitit. In a job, one task per node
starts that node's ranks. The jobs run a copy of the code as it was when they were handed in.

The underscore in the module's name has the same reason as in `hydra_plugins._mdcs_sweeper`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NEEDED
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from hydra_plugins import _mdcs_handed as handed

ROOT = Path(__file__).resolve().parent.parent
CODE = ("analysis", "experiments", "hydra_plugins", "launch", "mdcs", "conf")
JOB = "frozen.yaml"
"""File in the folder of each job that is to run: its resolved config."""
REQUEUE = "MDCS_REQUEUE"
"""Environment variable: a job that is told to stop continues later (`launch.preemption`)."""

_POLL_SECONDS = 0.5
_SHOW_SECONDS = 30.0
_ENDED = "ended"


@dataclass
class MdcsSlurmConf:
    """Resources of a job, and how long this program waits. Hydra checks the types, the launcher checks the ranges."""

    _target_: str = "hydra_plugins._mdcs_slurm.MdcsLauncher"
    executor: str = "slurm"
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    mem_gb: float | None = None
    time_min: int = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    modules: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    sbatch: dict[str, str] = field(default_factory=dict)
    srun_args: list[str] = field(default_factory=list)
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


class MdcsLauncher(Launcher):
    """Hands jobs in, and waits for them if the config says so.

    Raises ValueError from `setup` on, when a setting is wrong.
    """

    def __init__(self, **settings: Any) -> None:
        self.asked = MdcsSlurmConf(**settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        check(self.asked)
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        sweep = Path(str(self.config.hydra.sweep.dir)).resolve()
        frozen = [self._freeze(list(overrides), initial_job_idx + i) for i, overrides in enumerate(job_overrides)]
        folders = [Path(made.hydra_cfg.hydra.runtime.output_dir) for made in frozen]  # type: ignore[union-attr]
        ready = [folder for folder in folders if (folder / JOB).exists()]
        if ready:
            self._hand_in(sweep, ready)
        return frozen

    def _freeze(self, overrides: list[str], number: int) -> JobReturn:
        config: Any = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return run_job(
            self.task_function, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.hydra_context, configure_logging=False
        )

    def _hand_in(self, sweep: Path, folders: Sequence[Path]) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ValueError(f"hydra.launcher: handing jobs in needs submitit (pip install submitit): {error}") from error
        asked, logs = self.asked, sweep / "submitted"
        code = snapshot(sweep / "code") if asked.snapshot else ROOT
        try:
            executor = submitit.AutoExecutor(folder=logs, cluster=asked.executor)
        except RuntimeError as error:
            raise ValueError(f"hydra.launcher.executor: {asked.executor} is not possible here: {error}") from error
        if asked.print_script:
            print(script(asked, code, logs, folders[0]), flush=True)
        first, running = to_end_before(folders)
        jobs: list[Any] = []

        def submit(folders: Sequence[Path], after: Sequence[str] = ()) -> None:
            executor.update_parameters(**parameters(asked, code, after))
            runs = [functools.partial(run_command, command(asked, folder), code) for folder in folders]
            for job, folder in zip(_submitted(executor, runs, asked), folders, strict=True):
                jobs.append(job)
                handed.note(folder, asked.executor, job.job_id)

        try:
            if first:
                submit(first)
                print(f"handed in first, as the others need what it leaves: {_numbers(jobs)}", flush=True)
            if asked.executor != "slurm":
                while any(not job.done() for job in jobs) or any(handed.state(folder) for folder in running):
                    time.sleep(_POLL_SECONDS)
            submit(folders, [str(handed.number(folder)) for folder in (*running, *first)])
            print(f"handed in: {_numbers(jobs[len(first) :])}; logs are in {logs}", flush=True)
            if asked.wait:
                wait(jobs, [*first, *folders], _states if asked.executor == "slurm" else _own_states)
        except submitit.core.utils.FailedJobError as error:
            raise ValueError(f"hydra.launcher: sbatch refuses the jobs: {' '.join(str(error).split())}") from error
        except BaseException:
            for job in jobs:
                if asked.executor == "slurm" or not job.done():  # a finished process's number may be reused
                    handed.cancel(asked.executor, job.job_id)
            raise


def to_end_before(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Folders of jobs that must end before these jobs begin: (jobs to hand in now, jobs that have not ended yet).

    A job that only one of `folders` needs is in neither list: that job runs it itself.
    """
    needed = Counter(each for folder in folders for each in handed.before(folder))
    running = [folder for folder in needed if handed.state(folder)]
    first = [folder for folder, count in needed.items() if folder not in running and count > 1 and (folder / JOB).exists()]
    for folder in needed:
        if folder not in (*running, *first):
            (folder / handed.FILE).unlink(missing_ok=True)  # left by a job that has ended
    return first, running


def _numbers(jobs: Sequence[Any]) -> str:
    return ", ".join(job.job_id for job in jobs)


def _submitted(executor: Any, runs: Sequence[Callable[[], str]], asked: MdcsSlurmConf) -> Iterator[Any]:
    """Yield the jobs as they are handed in.

    SLURM's jobs are handed in at once: the array limits how many run. A job of this machine is handed in when there is
    a slot.
    """
    jobs: list[Any] = []
    if asked.executor == "slurm":
        with executor.batch():
            jobs = [executor.submit(run) for run in runs]
        yield from jobs
        return
    for run in runs:
        while sum(not job.done() for job in jobs) >= slots(asked):
            time.sleep(_POLL_SECONDS)
        jobs.append(executor.submit(run))
        yield jobs[-1]


def run_command(command: list[str], folder: Path) -> str:
    """Run the command on a node, for submitit.

    Signals to stop are ignored here and left to the ranks: submitit would requeue the job at once.
    """
    import submitit

    if REQUEUE in os.environ:
        for each in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
    said: str = submitit.helpers.CommandFunction(command, cwd=folder)()
    return said


def check(asked: MdcsSlurmConf) -> None:
    """Raise ValueError, one line with the key, for the first value out of its range."""
    for name in ("nodes", "ranks_per_node", "cpus_per_node", "time_min", "parallel", "grace_s"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise ValueError(f"hydra.launcher.{name}: must be >= 1, got {value}")
    if asked.mem_gb is not None and not asked.mem_gb > 0:
        raise ValueError(f"hydra.launcher.mem_gb: must be > 0, got {asked.mem_gb}")
    if asked.executor not in ("slurm", "local"):
        raise ValueError(f"hydra.launcher.executor: must be slurm or local, got {asked.executor}")
    if asked.executor == "local":
        for leaf in fields(asked):
            usual = leaf.default_factory() if leaf.default_factory is not NEEDED else leaf.default
            if leaf.name not in _LOCAL and getattr(asked, leaf.name) != usual:
                raise ValueError(f"hydra.launcher.{leaf.name}: has no effect without SLURM, got {getattr(asked, leaf.name)}")
        slots(asked)
    for name in asked.env:
        if not name.isidentifier():
            raise ValueError(f"hydra.launcher.env: {name} is no name of a variable")


_LOCAL = (
    "_target_", "executor", "ranks_per_node", "cpus_per_node", "mem_gb", "time_min", "env", "modules", "setup", "parallel",
    "snapshot", "wait",
)  # fmt: skip


MEASURED = (
    "executor", "nodes", "ranks_per_node", "cpus_per_node", "gpus_per_node", "partition", "constraint", "modules", "env", "setup",
    "sbatch", "srun_args",
)  # fmt: skip
"""Settings that change a job's measurements and so its identity. On this machine `parallel` does too."""

_OF_THE_QUEUE = ("begin", "comment", "deadline", "dependency", "job-name", "mail-type", "mail-user", "nice", "priority")
"""Options of sbatch that change when a job runs, but not its measurements."""


def measured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a launcher that its jobs' measurements depend on."""
    names = (*MEASURED, "parallel") if settings["executor"] == "local" else MEASURED
    made = {name: settings[name] for name in names}
    return made | {"sbatch": {key: value for key, value in made["sbatch"].items() if key.replace("_", "-") not in _OF_THE_QUEUE}}


def slots(asked: MdcsSlurmConf) -> int:
    """Number of jobs that this machine runs at a time: `parallel`, limited by cores and memory.

    Raises ValueError if one job needs more cores or memory than the machine has.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    count = asked.parallel
    for name, has in (("cpus_per_node", len(os.sched_getaffinity(0))), ("mem_gb", memory)):
        wanted = getattr(asked, name)
        if wanted is not None and wanted > has:
            raise ValueError(f"hydra.launcher.{name}: this machine has {has:.4g}, got {wanted:g}")
        count = count if wanted is None else min(count, int(has // wanted))
    return count


def command(asked: MdcsSlurmConf, folder: Path) -> list[str]:
    """The command of each of a job's tasks; one task runs on every node."""
    return [sys.executable, "-u", "-m", "launch.node", str(asked.ranks_per_node), "experiments.job.frozen", str(folder)]


def parameters(asked: MdcsSlurmConf, code: Path, after: Sequence[str] = ()) -> dict[str, Any]:
    """Parameters for submitit. The jobs run the code at `code`.

    after: numbers of SLURM jobs that must end first, with or without success. A job whose predecessor has failed
    reports it and ends; it does not stay in the queue for ever.
    """
    setup = [
        *(f"module load {shlex.quote(module)}" for module in asked.modules),
        *(f"export {name}={shlex.quote(value)}" for name, value in asked.env.items()),
        f'export PYTHONPATH={shlex.quote(str(code))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        *asked.setup,
    ]
    common = {"timeout_min": asked.time_min, "nodes": asked.nodes, "tasks_per_node": 1, "gpus_per_node": asked.gpus_per_node or 0}
    if asked.executor != "slurm":
        return {**common, "local_setup": setup}
    if asked.requeue:
        setup.insert(0, f"export {REQUEUE}=1")
    cpus = [] if asked.cpus_per_node is None else [f"--cpus-per-task={asked.cpus_per_node}"]  # not inherited by srun
    sbatch = dict(asked.sbatch)
    if after:
        sbatch["dependency"] = ",".join(filter(None, [sbatch.get("dependency"), f"afterany:{':'.join(after)}"]))
    wanted = {
        "cpus_per_task": asked.cpus_per_node,
        "mem_gb": asked.mem_gb,
        "slurm_partition": asked.partition,
        "slurm_account": asked.account,
        "slurm_qos": asked.qos,
        "slurm_constraint": asked.constraint,
        "slurm_additional_parameters": {"requeue" if asked.requeue else "no-requeue": True, **sbatch},
        "slurm_array_parallelism": asked.parallel,
        "slurm_setup": setup,
        "slurm_signal_delay_s": asked.grace_s,
        "slurm_srun_args": ["--kill-on-bad-exit=1", *cpus, *asked.srun_args],
        "name": "mdcs",
    }
    if not asked.gpus_per_node:
        del common["gpus_per_node"]
    return common | {name: value for name, value in wanted.items() if value is not None}


def script(asked: MdcsSlurmConf, code: Path, logs: Path, folder: Path) -> str:
    """The sbatch script of one job: the script of submitit, but with the job's own command, as a user would write it.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    known = {"timeout_min": "time", "mem_gb": "mem", "name": "job_name", "tasks_per_node": "ntasks_per_node"}
    told = {known.get(name, name.removeprefix("slurm_")): value for name, value in parameters(asked, code).items()}
    told.pop("array_parallelism", None)
    if "mem" in told:
        told["mem"] = f"{round(told['mem'] * 1024)}MB"
    text = _make_sbatch_string(command=shlex.join(command(asked, folder)), folder=logs, **told)
    return text.replace("export SUBMITIT_EXECUTOR=slurm\n", f"cd {shlex.quote(str(code))}\n")


def snapshot(target: Path) -> Path:
    """Copy the code as it is now into a new folder in `target`. Return the folder. Later changes do not affect jobs.

    The name of the folder is the hash of its contents. A job that is handed in again after a change runs the new code.
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


def wait(jobs: Sequence[Any], folders: Sequence[Path], states_of: Callable[[Sequence[Any]], list[str]]) -> None:
    """Wait until every job has ended, and print the jobs' states now and then."""
    shown, said, began = 0.0, "", time.monotonic()
    while True:
        states = states_of(jobs)
        over = all(state == _ENDED for state in states)
        rows = zip(jobs, states, folders, strict=True)
        table = "\n".join(f"  {job.job_id:12} {state:10} {folder}" for job, state, folder in rows)
        if table != said and (over or time.monotonic() - shown > _SHOW_SECONDS):
            print(table, flush=True)
            shown, said = time.monotonic(), table
        if over:
            return
        waited = time.monotonic() - began  # ask SLURM's controller less often the longer the wait
        time.sleep(min(max(_POLL_SECONDS, waited / 100), _SHOW_SECONDS / 2))


def _own_states(jobs: Sequence[Any]) -> list[str]:
    """States of jobs on this machine."""
    return [_ENDED if job.done() else job.state for job in jobs]


def _states(jobs: Sequence[Any]) -> list[str]:
    """SLURM's state of every job. A job that SLURM no longer lists has ended: a cluster without accounting forgets it.
    """
    known = handed.queue()
    return ["unknown" if known is None else known.get(job.job_id, _ENDED) for job in jobs]
