"""The schema of configs, group by group: names, types, defaults and ranges of the groups below are declared only here.

A group of options (`OPTION_GROUPS`) is a mapping for Hydra. Its YAML names a dataclass with `_target_` and gives values
for it; types and ranges stand beside that class's fields (:mod:`experiments.config.targets`). The other groups are
dataclasses of Hydra's schema (`register`). :mod:`experiments.config.checks` applies all ranges. Every error is a
`ConfigError`: one line that starts with the full key.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from experiments.config.files import register_budgets
from mdcs.options import Checked, option
from mdcs.profile.link import ALGORITHMS
from mdcs.sizes import Budget

if TYPE_CHECKING:
    from experiments.tasks.data import Data
    from experiments.tasks.model import Model
    from experiments.tasks.optimizers import Optimizer
    from experiments.trackers.tracker import Tracker
    from mdcs.planner.pipeline import JointPlanner, Scheduler, StrategyPlanner
    from mdcs.planner.recompute import RecomputeRule

    Strategy = StrategyPlanner | JointPlanner
    Engine: TypeAlias = "EngineOptions"
else:  # for Hydra these groups are mappings; checks.from_composed makes the objects
    Model = Data = Optimizer = Strategy = Scheduler = RecomputeRule = Engine = Tracker = Any


@dataclass
class CurveConfig:
    """Settings of mdcs curve."""

    strategies: list[str] = option([], "options of strategy to compare; none: the job's own")
    schedulers: list[str] = option([], "options of scheduler to compare; none: the job's own")
    shares: int = option(17, "values of budget.schedule_share on the curve, from 0 to 1", at_least=3)
    budgets: list[str] = option(
        [f"floor+{more}%" for more in (0, 5, 10, 20, 40, 80)], "budgets of the front: floor+10%, 75% of ddp, 300MiB"
    )
    plane: int = option(
        0, "values of each share on the plane of both shares (recompute=planned); 0: no plane", at_least=0
    )
    measure: str = option(
        "none", "plans that are also trained; plane: its corners, middle and stop point",
        choices=("none", "stop", "curve", "front", "plane", "all"),
    )


@dataclass
class CompareConfig:
    """Settings of mdcs compare."""

    vary: dict[str, str] = option({}, "candidates: name → overrides; KEY=A,B makes one for each value")
    base: str | None = option(None, "candidate that ratios and losses are compared with; null: the first")
    only: list[str] = option([], "candidates to run; none: all that can run here")
    over: list[str] = option([], "overrides with lists: each plan with every combination (KEY=A,B is the same)")
    rounds: int = option(3, "how often each runs", at_least=1)
    budgets: list[str] = option(
        [], "budgets of candidates with a plan: floor+10%, 75% of ddp, 1.5GiB, none; none: the job's own"
    )


@dataclass
class PlanConfig:
    """Settings of mdcs plan."""

    format: str = option("text", "json: one JSON document on stdout and nothing else", choices=("text", "json"))


OWN = {"curve": "curve", "compare": "compare", "plan": "plan"}  # groups that only one command has, with its name
SCHEMA_NAME = "mdcs_schema"
OPTION_GROUPS = ("model", "data", "optimizer", "strategy", "scheduler", "recompute", "engine", "tracker")


class ConfigError(ValueError):
    """A config that cannot be run. `key` is the full key of the wrong value, e.g. `budget.limit`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


# Besides the limits of mdcs.options, a field may have two limits that refer to `name` of its group. used_by: with any
# other name, the field must keep its default. needed_by: with these names, the field must not be null.


@dataclass
class BudgetConfig:
    """The budget: all tensor bytes per rank. `budget=40GiB` sets `budget.limit`."""

    limit: str = option("none", "40GiB, 75% of ddp, floor+10% (of the smallest feasible peak), or none")
    schedule_share: float | None = option(
        None, "share of the slack that is reserved for early messages; null: no division", at_least=0, at_most=1
    )
    activation_share: float | None = option(
        None, "share of the strategies' slack that keeps activations (recompute=planned); null: no division",
        at_least=0, at_most=1,
    )
    reserve_mib: float = option(0.0, "part of the budget that is kept free", at_least=0)
    exceeded: str = option(
        "warn", "reaction to a step above the budget (a larger batch): warn once, or raise on every rank",
        choices=("warn", "raise"),
    )

    @property
    def limited(self) -> bool:
        return self.value.is_limit

    @property
    def value(self) -> Budget:
        return Budget.of(self.limit)


@dataclass
class LinkConfig:
    name: str = option(
        "real", "real: the link as it is; emulated: real collectives, held back to a rate", choices=("real", "emulated")
    )
    rate_gbit: float | None = option(
        None, "bandwidth of a rank", above=0, used_by=("emulated",), needed_by=("emulated",)
    )
    latency_us: float | None = option(None, "per message", at_least=0, used_by=("emulated",), needed_by=("emulated",))
    depth: int = option(2, "messages in flight; NCCL: always 1", at_least=1)


@dataclass
class CollectivesConfig:
    """The family of algorithms that carries all messages. They are explained in mdcs/profile/link.py."""

    algorithm: str = option("auto", "auto: ring on gloo, native on NCCL", choices=("auto", *ALGORITHMS["gloo"]))

    @property
    def named(self) -> str | None:
        return None if self.algorithm == "auto" else self.algorithm


@dataclass
class ClusterConfig:
    name: str = option(
        "local",
        "local: a process per rank; shaped: nodes behind real links of a set rate; emulated: one process, and "
        "messages that only take time; joined: the ranks that torchrun or srun has started, which a program says by "
        "itself",
        choices=("local", "shaped", "emulated", "joined"),
    )
    ranks: int = option(2, "number of ranks; joined: as many as were started", at_least=1)
    nodes: int | None = option(
        None, "number of hosts, with equally many ranks each; shaped: null is one host per rank", at_least=1,
        used_by=("shaped", "joined"),
    )  # fmt: skip
    network: str | None = option(
        None, "name of the network in keys of cached profiles; null: interface and rate", used_by=("joined",)
    )
    rank: int = option(0, "rank that the process stands for", at_least=0, used_by=("emulated",))
    rate_gbit: float | None = option(
        None, "Gbit/s of a rank's link in each direction", at_least=0.001, used_by=("shaped",), needed_by=("shaped",)
    )
    threads: int | None = option(None, "compute threads of a rank; null: cores // processes", at_least=1)
    timeout_s: float = option(60.0, "seconds without progress of any rank after which the job is ended", above=0)
    device: str = option("cpu", "where the model is", choices=("cpu", "cuda"))
    peak_tflops: float | None = option(
        None, "peak rate of a device in run.precision, TFLOP/s, to report MFU; null: no MFU", above=0
    )
    backend: str | None = option(
        None, "backend of torch.distributed; null: gloo on cpu, nccl on cuda", choices=("gloo", "nccl")
    )

    @property
    def emulated(self) -> bool:
        return self.name == "emulated"

    @property
    def processes(self) -> int:
        return 1 if self.emulated else self.ranks

    @property
    def hosts(self) -> int:
        """Number of hosts. In a shaped cluster, the namespaces that stand for hosts."""
        return self.nodes or (self.ranks if self.name == "shaped" else 1)

    def resolved_threads(self) -> int:
        """Threads per rank: as configured, or an equal part for each rank on this machine of the cores it may use."""
        here = -(-self.ranks // self.hosts) if self.name == "joined" else self.processes
        return self.threads or max(1, len(os.sched_getaffinity(0)) // here)

    def resolved_backend(self) -> str:
        return self.backend or ("nccl" if self.device == "cuda" else "gloo")

    def shaped_link(self) -> str:
        """Description of the link's rate, for profiles; empty for a link that is not shaped."""
        return "" if self.rate_gbit is None else f"{self.rate_gbit:g} Gbit/s"


@dataclass
class ProfileConfig:
    """Source of the profile: measured by the job's own ranks and kept for later jobs, or a file."""

    path: str | None = option(None, "profile.json to plan from; null: the cache, or a measurement")
    cache: bool = option(True, "read and write the cache of profiles")
    refresh: bool = option(False, "measure, even if the cache has the profile")

    @property
    def measures(self) -> bool:
        """Whether the job measures its profile, or reuses that of an equal job."""
        return self.path is None


@dataclass
class RunConfig:
    name: str | None = option(None, "name in tables and plots; null: plan, budget, model and ranks")
    varied: str | None = None  # by the program, as what no option declares: its name among the jobs of its sweep
    sweep: str | None = None  # by the program: the sweep it belongs to
    steps: int = option(30, "training steps in all", at_least=1)
    unmeasured_steps: int = option(5, "warm-up steps, left out of the summary", at_least=0)
    accumulation: int = option(1, "micro-steps per step", at_least=1)
    seed: int = option(0, "seed of the weights", at_least=0)
    precision: str = option(
        "fp32", "type of compute and messages; bf16 and fp16 update fp32 masters",
        choices=("fp32", "fp64", "bf16", "fp16"),
    )  # fmt: skip
    grad_precision: str = option(
        "same", "type of gradients on the wire and in shards; same: as precision", choices=("same", "fp32")
    )
    cross_iteration: bool = option(True, "messages may cross from one iteration to the next; false: a barrier between")
    eval_every: int | None = option(None, "steps between evaluations; null: none", at_least=1)
    eval_batches: int | None = option(8, "held-out batches of an evaluation, per rank; null: all", at_least=1)
    save_every: int | None = option(
        None, "steps between checkpoints; the last step has one, too; null: none", at_least=1
    )
    keep: int = option(2, "newest checkpoints that are kept", at_least=1)
    save_beside: bool = option(
        True, "write checkpoints in the background, from a copy, if the budget has room; false: training waits"
    )
    resume: str | None = option(
        None, "auto: the run's newest complete checkpoint, if any; a path: a folder of checkpoints, or one checkpoint"
    )
    profile_iterations: int = option(5, "most timed steps of each plan that profiling runs", at_least=1)


@dataclass
class SweepConfig:
    """Treatment of the runs in the folder of a repeated sweep. A single job may not set these keys."""

    force: bool = option(False, "run every job, also those with a finished run in the folder")
    retry_failed: bool = option(True, "run failed jobs again")
    fail_fast: bool = option(False, "stop the sweep after the first failed job")
    warm: bool = option(True, "reuse one process for the ranks of all jobs on this CPU; false: each job starts its own")


@dataclass
class PathsConfig:
    root: str = option(".", "folder of outputs/ and multirun/, unless hydra.run.dir or hydra.sweep.dir names another")


@dataclass
class BatchConfig:
    """A batch that mdcs plan finds, in the place of `data.batch_size`, within a budget in bytes."""

    find: str | None = option(
        None, "largest: most samples per rank; fastest: most predicted samples per second; null: data.batch_size",
        choices=("largest", "fastest"),
    )
    profiles: list[int] = option(
        [], "batch sizes that are profiled: the smallest and the largest give all others, the rest is a check; "
        "none: data.batch_size and four times as many", at_least=1,
    )
    at_most: int = option(4096, "largest batch that is tried", at_least=1)


@dataclass(frozen=True)
class EngineOptions(Checked, ABC):
    """The engine that trains the model, as a config chooses it. `name` is a class attribute; fields are the options."""

    name: ClassVar[str] = "engine"
    plans: ClassVar[bool] = False  # Whether the engine runs a plan. Peers schedule communication themselves.
    needs_cuda: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The name, with a suffix that distinguishes variants of one engine."""
        return self.name

    def check(self, config: Config) -> None:
        """Raise ConfigError for settings that the engine cannot run on any machine."""
        if self.needs_cuda and config.cluster.device != "cuda":
            raise ConfigError("engine", f"{self.name} needs cluster.device=cuda, got {config.cluster.device}")

    def require(self) -> None:
        """Raise ConfigError where this machine cannot run the engine. Called before anything is started."""

    @abstractmethod
    def prepare(self, config: Config, workload: Any) -> Any:
        """Wrap the model of the workload (`experiments.engines.base.Trained`), on every rank. Returns an
        `experiments.engines.base.Engine`. The workload has a plan if the engine `plans`."""


@dataclass
class Config:
    """The whole config of one job. `scheduler` is None where the strategy also decides the schedule."""

    model: Model = MISSING
    data: Data = MISSING
    optimizer: Optimizer = MISSING
    strategy: Strategy = MISSING
    scheduler: Scheduler | None = MISSING
    recompute: RecomputeRule = MISSING
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    engine: Engine = MISSING
    tracker: Tracker = MISSING
    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    curve: CurveConfig = field(default_factory=CurveConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


@functools.cache
def schema() -> DictConfig:
    """The schema into which Hydra composes. Groups of options accept any keys here; the checks know the classes of
    options and refuse unknown keys."""
    made = OmegaConf.structured(Config)
    for group in OPTION_GROUPS:
        made[group] = DictConfig({}, flags={"struct": False})
    assert isinstance(made, DictConfig)
    return made


def register() -> None:
    """Register the schema with Hydra; conf/config.yaml starts from it."""
    register_budgets()
    ConfigStore.instance().store(name=SCHEMA_NAME, node=schema())


def fields_by_key() -> dict[str, dataclasses.Field[Any]]:
    """The fields of the groups declared here that a command line may set, by full key."""
    return {f"{prefix}{leaf.name}": leaf for prefix, _, leaf in leaves(Config()) if "about" in leaf.metadata}


def leaves(config: Config) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Yield (prefix, group, field) for every field of the groups declared here."""
    for group in dataclasses.fields(config):
        if group.name not in OPTION_GROUPS:
            value = getattr(config, group.name)
            for leaf in dataclasses.fields(value):
                yield f"{group.name}.", value, leaf
