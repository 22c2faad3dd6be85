"""Launchers of Hydra for jobs that SLURM runs, or this machine in the background: a sweep is an array of jobs.

    python experiments/train.py -m hydra/launcher=mdcs_slurm hydra.launcher.nodes=2 hydra.launcher.ranks_per_node=8 …

The program's own task function leaves in every job's folder what it takes to run it later; here it is handed in, through
submitit. In a job one task per node starts that node's ranks. What runs is a copy of the code as it was when it was handed in.

The underscore is there as in `hydra_plugins._mdcs_sweeper`.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING as NEEDED
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

ROOT = Path(__file__).resolve().parent.parent
CODE = ("analysis", "experiments", "hydra_plugins", "launch", "mdcs", "conf")
JOB = "frozen.yaml"
"""Is in the folders of jobs that are to run."""
REQUEUE = "MDCS_REQUEUE"
"""Tells a job's processes that one that is to stop goes on later (`launch.preemption`)."""

_POLL_SECONDS = 0.5
_SHOW_SECONDS = 30.0
_ENDED = "ended"
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
"""What squeue still calls a job for a while."""


@dataclass
class MdcsSlurmConf:
    """What a job asks for, and how long this program stays. Types are Hydra's to check, ranges the launcher's."""

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
    """The same on this machine, without SLURM: what only SLURM knows is left out."""

    executor: str = "local"


for _name, _conf in (("mdcs_slurm", MdcsSlurmConf), ("mdcs_local", MdcsLocalConf)):
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_conf, provider="mdcs")


class MdcsLauncher(Launcher):
    """Hands jobs in, and if asked to waits for them. Raises ValueError, from `setup` on, for what the config says wrongly."""

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
        executor.update_parameters(**parameters(asked, code))
        if asked.print_script:
            print(script(asked, code, logs, folders[0]), flush=True)
        runs = [functools.partial(run_command, command(asked, folder), code) for folder in folders]
        if asked.executor == "slurm":  # its limit is the array's
            with executor.batch():
                handed = [executor.submit(run) for run in runs]
        else:
            handed = []
            for run in runs:
                while sum(not job.done() for job in handed) >= asked.parallel:
                    time.sleep(_POLL_SECONDS)
                handed.append(executor.submit(run))
        print(f"handed in: {', '.join(job.job_id for job in handed)}; logs are in {logs}", flush=True)
        if asked.wait:
            try:
                wait(handed, folders, _states if asked.executor == "slurm" else _own_states)
            except BaseException:
                for job in handed:
                    job.cancel(check=False)
                raise


def run_command(command: list[str], folder: Path) -> str:
    """What submitit runs on every node. Signals are the ranks' to act on: submitit would requeue the job at once."""
    import submitit

    if REQUEUE in os.environ:
        for each in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
    said: str = submitit.helpers.CommandFunction(command, cwd=folder)()
    return said


def check(asked: MdcsSlurmConf) -> None:
    """Raises ValueError, one line with the key, for the first value out of its range."""
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
    for name in asked.env:
        if not name.isidentifier():
            raise ValueError(f"hydra.launcher.env: {name} is no name of a variable")


_LOCAL = ("_target_", "executor", "ranks_per_node", "time_min", "env", "modules", "setup", "parallel", "snapshot", "wait")


def command(asked: MdcsSlurmConf, folder: Path) -> list[str]:
    """What each of a job's tasks runs, one on every node."""
    return [sys.executable, "-u", "-m", "launch.node", str(asked.ranks_per_node), "experiments.job.frozen", str(folder)]


def parameters(asked: MdcsSlurmConf, code: Path) -> dict[str, Any]:
    """What submitit is told; the code that runs is at `code`."""
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
    cpus = [] if asked.cpus_per_node is None else [f"--cpus-per-task={asked.cpus_per_node}"]  # srun does not inherit sbatch's
    wanted = {
        "cpus_per_task": asked.cpus_per_node,
        "mem_gb": asked.mem_gb,
        "slurm_partition": asked.partition,
        "slurm_account": asked.account,
        "slurm_qos": asked.qos,
        "slurm_constraint": asked.constraint,
        "slurm_additional_parameters": dict(asked.sbatch) or None,
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
    """The sbatch script of one job, as one would write it by hand: submitit's, which runs the command itself."""
    from submitit.slurm.slurm import _make_sbatch_string

    known = {"timeout_min": "time", "mem_gb": "mem", "name": "job_name", "tasks_per_node": "ntasks_per_node"}
    told = {known.get(name, name.removeprefix("slurm_")): value for name, value in parameters(asked, code).items()}
    told.pop("array_parallelism", None)
    if "mem" in told:
        told["mem"] = f"{round(told['mem'] * 1024)}MB"
    text = _make_sbatch_string(command=shlex.join(command(asked, folder)), folder=logs, **told)
    return text.replace("export SUBMITIT_EXECUTOR=slurm\n", f"cd {shlex.quote(str(code))}\n")


def snapshot(target: Path) -> Path:
    """A copy of the code that jobs run: what changes later does not change them. One that is there stays."""
    for name in CODE:
        if not (target / name).exists():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def wait(handed: Sequence[Any], folders: Sequence[Path], states_of: Callable[[Sequence[Any]], list[str]]) -> None:
    """Until every job has ended, saying now and then how far they are."""
    shown, said = 0.0, ""
    while True:
        states = states_of(handed)
        over = all(state == _ENDED for state in states)
        rows = zip(handed, states, folders, strict=True)
        table = "\n".join(f"  {job.job_id:12} {state:10} {folder}" for job, state, folder in rows)
        if table != said and (over or time.monotonic() - shown > _SHOW_SECONDS):
            print(table, flush=True)
            shown, said = time.monotonic(), table
        if over:
            return
        time.sleep(_POLL_SECONDS)


def _own_states(handed: Sequence[Any]) -> list[str]:
    """Of jobs of this machine."""
    return [_ENDED if job.done() else job.state for job in handed]


def _states(handed: Sequence[Any]) -> list[str]:
    """Of every job: SLURM's word while it has the job, which a cluster without accounting forgets a while after its end."""
    try:
        listed = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError:  # its controller may be away for a moment
        return ["unknown"] * len(handed)
    known = dict(line.split() for line in listed.splitlines())
    left = [known.get(job.job_id, _ENDED) for job in handed]
    return [_ENDED if state in _OVER else state for state in left]
