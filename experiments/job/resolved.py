"""A job as this machine resolves it: settings in its config, and its ranks, if torchrun or srun has started them.

Of such ranks, rank 0 runs the program, and every process is a rank of its jobs. Only rank 0 composes configs, and its
folder is the job's folder. The other ranks get the resolved config and a temporary folder; their logs are kept in the
job's folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.config import checks
from experiments.config.checks import Started
from experiments.config.schema import ClusterConfig, Config, ConfigError
from experiments.tasks.hub import is_local
from launch.elastic import Cluster, Outcome
from launch.place import NoPlace, Place, described, place
from mdcs.planner.recompute import AUTO
from mdcs.sizes import GIB, MIB

_CROWD, _MOST = 4, 16  # ranks per core above which a job is warned, and refused
_RANK_BYTES = 128 * MIB  # memory that a rank takes whatever its model: above all its torch
_MMAP_BYTES, _TRIM_BYTES = 32 * MIB, 2 * GIB - 1
_WARM_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_BYTES), "MALLOC_TRIM_THRESHOLD_": str(_TRIM_BYTES)}
"""Keep freed buffers in the process.

By default glibc returns large blocks to the system at every free, and faults each page in again. Buffers that are
released and allocated every step then cost five times as much. The budget counts requested bytes: it does not change.
"""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def crowded(config: Config) -> str | None:
    """A warning if many more ranks run on this machine than it has cores; else None."""
    ranks, cores = config.cluster.processes, len(os.sched_getaffinity(0))
    if config.cluster.name == "joined" or ranks <= _CROWD * cores:
        return None
    told = f"warning: {ranks} ranks share {'1 core' if cores == 1 else f'{cores} cores'}: starting may take minutes"
    return f"{told}, and steps take longer (cluster=emulated runs one rank of many)"


def require_room(config: Config) -> None:
    """Raise ConfigError for more ranks than this machine's cores, free memory, or GPUs with NCCL, carry."""
    cluster, ranks = config.cluster, config.cluster.processes
    if cluster.device == "cuda":
        import torch  # late: this takes seconds

        gpus = torch.cuda.device_count()
        if not gpus:
            raise ConfigError("cluster.device", "needs a GPU, and torch finds none; got cuda")
        if cluster.resolved_backend() == "nccl" and ranks > gpus:
            problem = f"nccl needs a GPU for each rank, of which there are {gpus}; got {ranks}"
            raise ConfigError("cluster.ranks", problem)
    cores, free = len(os.sched_getaffinity(0)), _free_memory()
    most = min(_MOST * cores, free // _RANK_BYTES)
    if ranks > max(1, most):
        here = f"{cores} cores and {free / GIB:.1f} GiB of free memory have room for {most} ranks"
        raise ConfigError("cluster.ranks", f"{here}, got {ranks}; cluster=emulated runs one rank of many")


def _free_memory() -> int:
    """Bytes that new processes can use."""
    said = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    return int(said[1]) << 10 if said else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resolve(config: Config, *, profile: Path | None = None) -> Config:
    """The config with all values that this machine decides, so that a rank has no decision left. profile: the file of
    an equal job's profile, with which the job is planned."""
    config = with_absolute_paths(config)
    cluster, path = config.cluster, config.profile.path if profile is None else str(profile.resolve())
    return replace(
        config,
        cluster=replace(cluster, threads=cluster.resolved_threads(), backend=cluster.resolved_backend()),
        run=replace(config.run, name=config.run.name or _name(config)),
        profile=config.profile if path is None else replace(config.profile, path=path, refresh=False),
    )


def with_absolute_paths(config: Config) -> Config:
    """The config with absolute paths for the files that it names."""
    engine: Any = config.engine
    if getattr(engine, "plan", None) is not None:
        engine = replace(engine, plan=os.path.abspath(engine.plan))
    profile, run = config.profile, config.run
    model, data = _with_absolute(config.model, "weights"), _with_absolute(config.data, "path", "tokenizer")
    if profile.path is not None:
        profile = replace(profile, path=os.path.abspath(profile.path))
    if run.resume not in (None, "auto"):
        run = replace(run, resume=os.path.abspath(run.resume))
    return replace(config, model=model, data=data, engine=engine, profile=profile, run=run)


def _with_absolute(options: Any, *names: str) -> Any:
    """The options with absolute paths for those of these names that are files here, not names on the hub."""
    said = {name: getattr(options, name, None) for name in names}
    found = {name: os.path.abspath(path) for name, path in said.items() if isinstance(path, str) and is_local(path)}
    return replace(options, **found)


def environment(cluster: ClusterConfig) -> dict[str, str]:
    """Variables of the ranks' environment beside that of the process that starts them."""
    threads = str(cluster.resolved_threads())
    env = {key: value for key, value in _WARM_HEAP.items() if key not in os.environ}
    return env | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


def _name(config: Config) -> str:
    """Name of a run: plan and swept settings, then budget, model and ranks: `dp fusion bucket_mib=25, mlp, 2 ranks`."""
    budget, cluster = config.budget, config.cluster
    plan = config.engine.label
    if config.engine.plans:
        plan = " ".join(planner.name for planner in (config.strategy, config.scheduler) if planner is not None)
        plan += "" if config.recompute == AUTO else f" recompute={config.recompute.name}"
        plan += "" if budget.schedule_share is None else f" s={budget.schedule_share:g}"
        plan += "" if budget.activation_share is None else f" a={budget.activation_share:g}"
    parts = [f"{plan} {config.run.varied}" if config.run.varied else plan]
    if budget.limited:
        said = str(budget.value)
        parts.append(f"{int(said) / MIB:.6g}MiB" if said.isdecimal() else said)
    ranks = "1 rank" if cluster.ranks == 1 else f"{cluster.ranks} ranks"
    if cluster.emulated:
        return f"{', '.join([*parts, config.model.label])} (rank {cluster.rank} of {cluster.ranks}, emulated)"
    return ", ".join([*parts, config.model.label, ranks])


def on_rank_zero(program: Callable[[], int]) -> int:
    """Run the program, which starts jobs, on one rank, and its jobs on all. Return its exit code, the same on all."""
    try:
        joined = place()
        return program() if joined is None else _take_part(joined, program)
    except NoPlace as error:
        print(error, file=sys.stderr, flush=True)
        return 2


def _take_part(place: Place, program: Callable[[], int]) -> int:
    from launch.spmd import Ranks  # torch takes seconds
    libc = ctypes.CDLL(None)
    for option, size in ((_MMAP_THRESHOLD, _MMAP_BYTES), (_TRIM_THRESHOLD, _TRIM_BYTES)):
        libc.mallopt(option, size)  # in a process that has started, variables of its environment would be too late
    ranks = Ranks(place, _prepare)

    def start(
        folder: Path, cluster: Cluster, env: Mapping[str, str], *, module: str, arguments: Sequence[str], on_tick: Any
    ) -> Outcome:
        config = checks.load(folder / "config.yaml")
        payload = checks.as_yaml(replace(config, profile=replace(config.profile, path=None)))
        return ranks.run(
            folder, cluster, payload=payload, module=module, arguments=arguments[1:], on_tick=on_tick
        )  # without the folder: each rank adds its own

    checks.here = Started(place.starter, place.world, place.hosts, described(ranks.interface), start)
    try:
        return ranks.serve(program if place.rank == 0 else None)
    finally:
        checks.here = None


def _prepare(folder: Path, payload: str) -> dict[str, str]:
    if not (folder / "config.yaml").exists():  # another rank's folder than the first's
        (folder / "config.yaml").write_text(payload, encoding="utf-8")
    return environment(checks.load(folder / "config.yaml").cluster)
