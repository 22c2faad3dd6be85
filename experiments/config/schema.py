"""What can be configured: the only place of names, types, defaults and ranges.

The dataclasses are Hydra's schema (`register`), so the YAML files in conf/ can only choose among what is
declared here. Ranges stand beside their field, as its metadata; :mod:`experiments.config.checks` applies them. Every complaint
is a `ConfigError`: one line that starts with the full key.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore

from mdcs.planner.ilp.solver import SOLVERS
from mdcs.profile.algorithms import ALGORITHMS

SCHEMA_NAME = "mdcs_schema"

T = TypeVar("T")


class ConfigError(ValueError):
    """A config that cannot be run. `key` is the full key of the offending value, e.g. `budget.gib`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


def _option(default: T, about: str, **limits: Any) -> T:
    """A field with its description and limits, which `check` applies.

    at_least, above, at_most, below: limits of a number, or of each number of a list; length: of a list.
    choices: the values allowed. used_by: names (of the same group) for which the field means something:
    with any other it must keep its default. needed_by: names for which it must not be null.
    """
    metadata = {"about": about, **limits}
    made = (
        field(default_factory=lambda: list(default), metadata=metadata)
        if isinstance(default, list)
        else field(default=default, metadata=metadata)
    )
    return made  # type: ignore[return-value]  # dataclasses.field returns a Field and says it returns the default's type


def shown(value: Any) -> str:
    """A value as it is typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


TRANSFORMERS = ("gpt2", "gpt2-tiny", "gpt2-small", "bert", "bert-tiny", "bert-base")
SOLVED_STRATEGIES = ("ilp", "joint")
SOLVED_SCHEDULERS = ("memory_aware",)
RESNETS = ("resnet50", "resnet152", "resnet-tiny")


@dataclass
class ModelConfig:
    """Which model, and which of its numbers differ from that model's own (null: the model's own)."""

    name: str = _option(
        "gpt2-tiny", "a model of experiments/models.py", choices=(*TRANSFORMERS, *RESNETS, "mlp")
    )
    layers: int | None = _option(None, "transformer blocks", at_least=1, used_by=TRANSFORMERS)
    width: int | None = _option(None, "hidden size", at_least=1, used_by=(*TRANSFORMERS, "mlp"))
    heads: int | None = _option(None, "attention heads; divides width", at_least=1, used_by=TRANSFORMERS)
    sequence: int | None = _option(None, "tokens in a sequence", at_least=1, used_by=TRANSFORMERS)
    vocab: int | None = _option(None, "tokens in the vocabulary", at_least=2, used_by=TRANSFORMERS)
    tie: bool | None = _option(None, "input and output embeddings are one parameter", used_by=TRANSFORMERS)
    dropout: float | None = _option(None, "dropout everywhere", at_least=0, below=1, used_by=TRANSFORMERS)
    checkpointing: bool | str | None = _option(
        None, "recompute activations in backward; auto: if that is predicted to be faster within the budget",
        choices=(True, False, "auto"), used_by=TRANSFORMERS,
    )  # fmt: skip
    depths: list[int] | None = _option(None, "residual blocks per stage", at_least=1, used_by=RESNETS)
    hidden_sizes: list[int] | None = _option(None, "channels per stage", at_least=1, used_by=RESNETS)
    stem: int | None = _option(None, "channels of the stem", at_least=1, used_by=RESNETS)
    width_divisor: int | None = _option(None, "divides all numbers of channels", at_least=1, used_by=RESNETS)
    depth: int | None = _option(None, "linear layers", at_least=1, used_by=("mlp",))
    image: int | None = _option(None, "pixels along an edge", at_least=1, used_by=(*RESNETS, "mlp"))
    channels: int | None = _option(None, "channels of an image", at_least=1, used_by=(*RESNETS, "mlp"))
    classes: int | None = _option(None, "classes of images", at_least=2, used_by=(*RESNETS, "mlp"))
    wrap: str = _option("block", "what becomes a unit", choices=("block", "size", "leaf"))
    wrap_min_params: int = _option(100_000, "wrap=size: the smallest unit, in parameters", at_least=1)
    frozen: list[str] = _option([], "parameters that are not trained: patterns of their names (fnmatch)")

    def options(self) -> dict[str, Any]:
        """The keyword arguments for `experiments.tasks.models.build`: what differs from the model's own numbers."""
        own = ("name", "wrap", "wrap_min_params", "frozen")
        values = {key: value for key, value in dataclasses.asdict(self).items() if key not in own}
        return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if v is not None}


@dataclass
class DataConfig:
    name: str = _option(
        "stdlib_bytes", "a source of experiments/data.py", choices=("stdlib_bytes", "digits", "synthetic")
    )
    batch_size: int = _option(4, "samples per rank and micro-step", at_least=1)
    seed: int = _option(0, "seed of the order of samples", at_least=0)
    max_bytes: int | None = _option(
        None, "cut the text after so many bytes", at_least=1, used_by=("stdlib_bytes",)
    )


@dataclass
class OptimizerConfig:
    name: str = _option("adam", "the optimizer", choices=("sgd", "adam", "adamw"))
    lr: float = _option(1e-3, "learning rate", at_least=0)
    momentum: float = _option(0.0, "of SGD", at_least=0, below=1, used_by=("sgd",))
    betas: list[float] = _option(
        [0.9, 0.999], "of Adam", at_least=0, below=1, length=2, used_by=("adam", "adamw")
    )
    eps: float = _option(1e-8, "of Adam", above=0, used_by=("adam", "adamw"))
    weight_decay: float = _option(0.0, "weight decay", at_least=0)
    fused: bool | None = _option(None, "torch's fused update; null: torch decides")
    foreach: bool | None = _option(None, "torch's foreach update; null: torch decides")
    schedule: str = _option("constant", "of the learning rate", choices=("constant", "linear", "cosine"))
    warmup_steps: int = _option(0, "steps in which the learning rate rises linearly to lr", at_least=0)
    clip_norm: float | None = _option(
        None, "largest global norm of the gradient; a barrier before the update", above=0
    )


@dataclass
class StrategyConfig:
    """Who decides the strategy of each unit."""

    name: str = _option("uniform", "the strategy planner", choices=("uniform", "random", "greedy", "ilp", "joint"))
    kind: str | None = _option(
        None,
        "the strategy of all units",
        choices=("dp", "zero1", "sdp", "fsdp"),
        used_by=("uniform",),
        needed_by=("uniform",),
    )
    seed: int | None = _option(
        None, "seed of the draw", at_least=0, used_by=("random",), needed_by=("random",)
    )
    solver: str = _option("HIGHS", "through python-mip", choices=SOLVERS, used_by=SOLVED_STRATEGIES)
    seconds: float = _option(20.0, "limit of the solver", above=0, used_by=SOLVED_STRATEGIES)


@dataclass
class SchedulerConfig:
    """Who decides when which message is sent."""

    name: str = _option(
        "wfbp",
        "the scheduler",
        choices=(
            "sequential", "wfbp", "fusion", "mg_wfbp", "partitioning", "priority", "dear", "random", "memory_aware", "joint",
        ),
    )
    bucket_mib: float | None = _option(
        None,
        "fused messages hold about so much",
        above=0,
        used_by=("fusion", "dear"),
        needed_by=("fusion", "dear"),
    )
    block_mib: float | None = _option(
        None,
        "size of a block; null: the smallest that saturates the link",
        above=0,
        used_by=("partitioning", "priority", "memory_aware", "joint"),
    )
    seed: int | None = _option(
        None, "seed of the draw", at_least=0, used_by=("random",), needed_by=("random",)
    )
    solver: str = _option("HIGHS", "through python-mip", choices=SOLVERS, used_by=SOLVED_SCHEDULERS)
    seconds: float = _option(20.0, "limit of the solver", above=0, used_by=SOLVED_SCHEDULERS)
    cross_iteration: bool = _option(
        True, "messages may cross from one iteration to the next; false: a barrier between"
    )


@dataclass
class BudgetConfig:
    """Tensor bytes per rank for everything; neither gib nor over_floor: unlimited."""

    gib: float | None = _option(None, "the budget", above=0)
    over_floor: float | None = _option(None, "the budget is the floor times 1 + over_floor", at_least=0)
    schedule_share: float | None = _option(
        None, "share of the slack kept for the schedule; null: no division", at_least=0, at_most=1
    )
    reserve_mib: float = _option(0.0, "part of the budget that is kept free", at_least=0)


@dataclass
class LinkConfig:
    name: str = _option(
        "real", "real: as it is; emulated: real collectives, paced", choices=("real", "emulated")
    )
    rate_gbit: float | None = _option(
        None, "bandwidth of a rank", above=0, used_by=("emulated",), needed_by=("emulated",)
    )
    latency_us: float | None = _option(
        None, "per message", at_least=0, used_by=("emulated",), needed_by=("emulated",)
    )
    depth: int | None = _option(
        2, "messages in flight; null: as few as are nearly as fast as any", at_least=1, needed_by=("emulated",)
    )


@dataclass
class CollectivesConfig:
    """Which algorithm carries messages; auto: the fastest measured, on an emulated link the default.

    The algorithms are explained in mdcs/collectives.py.
    """

    all_reduce: str = _option(
        "auto", "default native", choices=("auto", *ALGORITHMS["gloo"]["all_reduce"])
    )
    reduce_scatter: str = _option(
        "auto", "default all_to_all, then a local sum", choices=("auto", *ALGORITHMS["gloo"]["reduce_scatter"])
    )
    all_gather: str = _option(
        "auto", "default broadcast, one from each rank", choices=("auto", *ALGORITHMS["gloo"]["all_gather"])
    )

    def named(self) -> dict[str, str]:
        """Algorithms by operation, of those that are not auto."""
        return {operation: name for operation, name in dataclasses.asdict(self).items() if name != "auto"}


@dataclass
class ClusterConfig:
    name: str = _option(
        "local",
        "local: a process per rank; shaped: each behind a real link of its own, of a set rate; emulated: one process, and "
        "messages that only take time",
        choices=("local", "shaped", "emulated"),
    )
    ranks: int = _option(2, "ranks", at_least=1)
    rank: int = _option(0, "which of the ranks the one process is", at_least=0, used_by=("emulated",))
    rate_gbit: float | None = _option(
        None, "of a rank's link, in each direction", at_least=0.001, used_by=("shaped",), needed_by=("shaped",)
    )
    threads: int | None = _option(None, "threads that compute, per rank; null: cores // processes", at_least=1)
    timeout_s: float = _option(60.0, "a job in which no rank moves for so long is ended", above=0)
    startup_s: float = _option(
        120.0, "granted on top of timeout_s until every rank has made a step", at_least=0
    )
    device: str = _option("cpu", "where the model is", choices=("cpu", "cuda"))
    backend: str | None = _option(
        None, "of torch.distributed; null: gloo on cpu, nccl on cuda", choices=("gloo", "nccl")
    )
    measure_memory: bool = _option(True, "count tensor bytes (on CPU: by a preloaded library)")

    @property
    def emulated(self) -> bool:
        return self.name == "emulated"

    @property
    def processes(self) -> int:
        return 1 if self.emulated else self.ranks

    def resolved_threads(self) -> int:
        """Threads per rank: as given, or an equal part of the cores this process may use."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.processes)

    def resolved_backend(self) -> str:
        return self.backend or ("nccl" if self.device == "cuda" else "gloo")

    def shaped_link(self) -> str:
        """In words, for profiles; empty for a link that is not shaped."""
        return "" if self.rate_gbit is None else f"{self.rate_gbit:g} Gbit/s"


def _analytic(about: str, **limits: Any) -> Any:
    return _option(None, about, used_by=("analytic",), needed_by=("analytic",), **{"above": 0, **limits})


@dataclass
class ProfileConfig:
    """Where the profile comes from: measured by the job's own ranks, kept for later jobs, or calculated."""

    name: str = _option(
        "measured", "measured, or analytic: a transformer calculated for planning", choices=("measured", "analytic")
    )
    path: str | None = _option(None, "a profile.json to plan with", used_by=("measured",))
    cache: bool = _option(True, "reuse what an equal job has measured, and keep it for others", used_by=("measured",))
    refresh: bool = _option(False, "measure anew, whatever is in the cache", used_by=("measured",))
    group: str = _option(
        "world", "parameters are sharded over so many devices", choices=("node", "world"), used_by=("analytic",)
    )
    layers: int | None = _analytic("transformer blocks")
    width: int | None = _analytic("hidden size")
    heads: int | None = _analytic("attention heads")
    sequence: int | None = _analytic("tokens in a sequence")
    vocab: int | None = _analytic("tokens in the vocabulary")
    batch: int | None = _analytic("sequences per device and micro-step")
    checkpointing: bool = _option(True, "recompute activations in backward", used_by=("analytic",))
    tflops: float | None = _analytic("peak rate of a device")
    efficiency: float | None = _analytic("share of the peak rate that is reached", at_most=1)
    memory_gbyte: float | None = _analytic("rate of a device's memory, GB/s")
    nodes: int | None = _analytic("nodes")
    per_node: int | None = _analytic("devices of a node", at_least=2)
    intra_gbyte: float | None = _analytic("rate of a device within its node, GB/s")
    intra_us: float | None = _analytic("latency of a hop within a node")
    inter_gbyte: float | None = _analytic("rate of a device across nodes, GB/s")
    inter_us: float | None = _analytic("latency of a hop across nodes")


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl, which is always written."""

    name: str = _option("none", "none or wandb", choices=("none", "wandb"))
    project: str = _option("mdcs", "W&B project", used_by=("wandb",))
    entity: str | None = _option(None, "W&B entity", used_by=("wandb",))
    group: str | None = _option(None, "W&B group; null: the name of the sweep", used_by=("wandb",))
    mode: str | None = _option(
        None,
        "null: online with a W&B account on this machine, else offline",
        choices=("offline", "online", "disabled"),
        used_by=("wandb",),
    )


PEERS = ("ddp", "ddp_no_overlap", "fsdp2", "fairscale", "fairscale_fsdp", "deepspeed", "dataparallel")


@dataclass
class EngineConfig:
    """What trains the model: mdcs, or one of its peers for comparison."""

    name: str = _option("mdcs", "what trains the model", choices=("mdcs", *PEERS))
    bucket_mib: float | None = _option(
        None,
        "gradients are reduced in buckets of about so much",
        above=0,
        used_by=("ddp", "ddp_no_overlap", "fairscale"),
        needed_by=("ddp", "ddp_no_overlap", "fairscale"),
    )
    gradient_as_bucket_view: bool | None = _option(
        None, "gradients are views of the buckets, not copied to them", used_by=("ddp",), needed_by=("ddp",)
    )
    reshard: str | None = _option(
        None,
        "after forward a block is sharded as at rest, not at all, or over groups of ranks",
        choices=("always", "never", "group"),
        used_by=("fsdp2",),
        needed_by=("fsdp2",),
    )
    reshard_group: int | None = _option(None, "ranks of a group, with reshard=group", at_least=2, used_by=("fsdp2",))
    prefetch: int | None = _option(
        None, "blocks gathered ahead, asynchronously; null: as fully_shard does by itself", at_least=1, used_by=("fsdp2",)
    )
    reduce_scatter: str | None = _option(
        None,
        "the backend's own, or an all-to-all with a local sum",
        choices=("own", "all_to_all"),
        used_by=("fsdp2",),
        needed_by=("fsdp2",),
    )
    stage: int | None = _option(
        None, "of ZeRO", at_least=1, at_most=3, used_by=("deepspeed",), needed_by=("deepspeed",)
    )
    loss_inside: bool | None = _option(
        None, "each device computes the loss of its part", used_by=("dataparallel",), needed_by=("dataparallel",)
    )

    @property
    def plans(self) -> bool:
        """Whether it trains by a plan; peers decide by themselves."""
        return self.name not in PEERS

    @property
    def label(self) -> str:
        """The name, with what distinguishes variants of one engine: fsdp2 never all_to_all 2, deepspeed 3."""
        shown = (self.reshard_group or self.reshard, self.reduce_scatter, self.prefetch, self.stage)
        return " ".join([self.name, *(str(value) for value in shown if value is not None)])


@dataclass
class RunConfig:
    name: str | None = _option(None, "name in tables and plots; null: made of strategy and scheduler")
    sweep: str | None = _option(None, "the sweep it belongs to; null: the sweep's folder, if any")
    steps: int = _option(30, "training steps in all", at_least=1)
    warmup_steps: int = _option(5, "the first of them, left out of the summary", at_least=0)
    accumulation: int = _option(1, "micro-steps per step", at_least=1)
    seed: int = _option(0, "seed of the weights", at_least=0)
    precision: str = _option(
        "fp32", "of compute and messages; bf16 and fp16 update fp32 masters", choices=("fp32", "fp64", "bf16", "fp16")
    )
    grad_precision: str = _option(
        "same", "of gradients from the end of their backward on, on the wire and in shards; same: as precision",
        choices=("same", "fp32"),
    )  # fmt: skip
    eval_every: int | None = _option(None, "steps between evaluations; null: none", at_least=1)
    profile_iterations: int = _option(5, "iterations the profile is measured with", at_least=1)


@dataclass
class TradeoffConfig:
    """What experiments/tradeoff.py looks for; other programs leave it alone."""

    strategies: list[str] = _option([], "options of strategy to compare; none: the job's own")
    schedulers: list[str] = _option([], "options of scheduler to compare; none: the job's own")
    shares: int = _option(17, "values of budget.schedule_share on the curve, from 0 to 1", at_least=3)
    sweep: bool = _option(True, "plan the whole curve; false: only what the search for the stop point asks for")
    budgets: list[float] = _option(
        [0.0, 0.05, 0.1, 0.2, 0.4, 0.8], "budgets of the front: the floor times 1 + each", at_least=0
    )
    measure: str = _option("none", "what to train as well", choices=("none", "stop", "curve", "front", "all"))


@dataclass
class Config:
    """Everything about one job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tradeoff: TradeoffConfig = field(default_factory=TradeoffConfig)


def register() -> None:
    """Make the schema known to Hydra; conf/config.yaml starts from it."""
    import hydra_plugins._mdcs_sweeper  # noqa: F401  # which conf/config.yaml chooses, registers its own schema

    ConfigStore.instance().store(name=SCHEMA_NAME, node=Config)


def fields_by_key() -> dict[str, dataclasses.Field[Any]]:
    """Every leaf of the config, by its full key."""
    return {f"{group}{leaf.name}": leaf for group, _, leaf in leaves(Config())}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    for leaf in dataclasses.fields(config):
        value = getattr(config, leaf.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{leaf.name}.")
        else:
            yield prefix, config, leaf


def measured_for(config: Config) -> dict[str, str]:
    """What a profile's units, slots and bytes depend on; times depend on the machine too."""
    model, optimizer, gradients = config.model, config.optimizer, config.run.grad_precision
    used = {"momentum": optimizer.momentum, "weight_decay": optimizer.weight_decay, "fused": optimizer.fused}
    size = f" {model.wrap_min_params}" if model.wrap == "size" else ""
    return {
        "model": model.name,
        "options": json.dumps(model.options(), sort_keys=True),
        "wrap": f"{model.wrap}{size}",
        "frozen": " ".join(model.frozen),
        "optimizer": " ".join([optimizer.name, *(name for name, value in used.items() if value)]),
        "batch": str(config.data.batch_size),
        "precision": config.run.precision + (f", gradients {gradients}" if gradients != "same" else ""),
        "ranks": str(config.cluster.ranks),
    }
