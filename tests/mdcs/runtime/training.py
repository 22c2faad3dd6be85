"""Training by a rank in the tests: build a small model, train it with torch's DDP and with a plan, compare.

Every model is a function of its name, every batch of (step, micro-step, rank), so a reference run is made once per
process and serves all plans.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from experiments.tasks.model import Bert, Gpt2, Llama, Model, ResNet
from mdcs.model.recompute import reasons_to_keep
from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.period import Strategy
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.pipeline import SCHEDULERS, STRATEGIES, JointPlanner, Scheduler, StrategyPlanner
from mdcs.profile.link import Collectives
from mdcs.profile.recompute import CHOICES, RecomputeOption, RecomputeUse
from mdcs.profile.schema import Profile
from mdcs.profiler.consensus import on_rank_zero
from mdcs.profiler.merging import merge_profiles
from mdcs.sizes import MIB
from tests.mdcs.measured import measure_profile
from tests.mdcs.optimizers import OPTIMIZERS
from tests.mdcs.profiles import in_nodes

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Tied(nn.Module):
    """A language model of a few hundred numbers whose head is its embedding; its second block has frozen weights."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(blocks))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Empty(Tied):
    """The same with parameters without elements, one of which no forward uses, and with a buffer that is expanded."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.norm.nothing, self.norm.unused = nn.Parameter(torch.zeros(0, 6)), nn.Parameter(torch.zeros(0))
        self.norm.register_buffer("mask", torch.ones(1, 6).expand(5, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.norm.mask[:, :1] + self.norm.nothing.sum()


class Norm(nn.LayerNorm):
    """In the precision of its parameters, whatever that of its input is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Mixed(Tied):
    """The same with norms in its blocks, which are in ``wide``, as the embedding is; linear layers are in ``narrow``."""

    narrow, wide = torch.bfloat16, torch.float32

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.norm = Norm(6)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, nn.Sequential)
            self.blocks[i] = nn.Sequential(Norm(6), *block.to(self.narrow))
        for module in (self.embedding, *(m for m in self.modules() if isinstance(m, Norm))):
            module.to(self.wide)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).to(self.narrow)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(self.norm(hidden).to(self.wide))
        return logits


class Wider(Mixed):
    """Mixed types of which torch's SGD updates every element in the same way; in bfloat16 it depends on where shards are cut."""

    narrow, wide = torch.float32, torch.float64


class Twice(nn.Module):
    """Calls one block twice, and another inside a block that has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(self.first(x))
        logits: Tensor = self.last(self.again(hidden) + hidden)
        return logits


@dataclass(frozen=True, eq=False)
class Setup:
    """``batch`` gives the inputs of (step, micro-step, rank)."""

    model: nn.Module
    loss: Loss
    policy: Any
    batch: Callable[[int, int, int], Batch]


def seeded(step: int, micro: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(step * 1000 + micro * 100 + rank)


def square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


def tied(blocks: int = 3, kind: type[Tied] = Tied) -> Setup:
    torch.manual_seed(0)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"]).flatten(0, 1)
        if logits.element_size() < 4:
            logits = logits.float()
        return nn.functional.cross_entropy(logits, batch["tokens"].flatten())

    batch = lambda *at: {"tokens": torch.randint(0, 11, (3, 5), generator=seeded(*at))}  # noqa: E731
    return Setup(kind(blocks), loss, mdcs.ByClass(("Sequential",)), batch)


class TwoStages(ResNet):
    """A ResNet with two stages."""

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {"depths": [1, 1], "hidden_sizes": [4, 8]}


TINY: dict[str, Model] = {
    "gpt2": Gpt2(layers=2, width=16, heads=2, sequence=8, vocab=31),
    "bert": Bert(layers=1, width=16, heads=2, sequence=8, vocab=31),
    "llama": Llama(layers=2, width=16, heads=2, kv_heads=1, inner=32, sequence=8, vocab=31),
    "resnet": TwoStages(image=16, width_divisor=16, classes=10),
}


def line(*widths: int) -> Setup:
    """Linear layers without bias, one after the other, each a unit."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))
    return Setup(model, square, mdcs.ByLeaf(), lambda *at: {"x": torch.randn(1, widths[0], generator=seeded(*at))})


def twice() -> Setup:
    torch.manual_seed(0)
    return Setup(Twice(), square, mdcs.ByLeaf(), lambda *at: {"x": torch.randn(4, 6, generator=seeded(*at))})


def pictures() -> Setup:
    """Convolutions in channels_last, with parameters of odd sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh()), nn.Sequential(nn.Conv2d(5, 7, 1), nn.Conv2d(7, 3, 2)), nn.Flatten(),
        nn.Sequential(nn.Linear(27, 3)),
    ).to(memory_format=torch.channels_last)  # fmt: skip

    def batch(*at: int) -> Batch:
        return {"x": torch.randn(2, 3, 6, 6, generator=seeded(*at)).to(memory_format=torch.channels_last)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert all(c.weight.is_contiguous(memory_format=torch.channels_last) for c in model.modules() if isinstance(c, nn.Conv2d))
        return square(model, batch)

    return Setup(model, loss, mdcs.ByClass(("Sequential",)), batch)


def tiny(name: str, samples: int = 2, **options: Any) -> Setup:
    """A model of :mod:`experiments.tasks` in miniature, its blocks or, with "/leaf", its leaves being the units.

    "frozen" is a gpt2 whose first block is frozen, "checkpointed" one that computes its blocks again in backward.
    """
    name, _, wrap = name.partition("/")
    if name == "checkpointed":
        options["checkpointing"] = True
    task = replace(TINY["gpt2" if name in ("frozen", "checkpointed") else name], **options).build()
    if name == "frozen":
        for parameter in task.model.transformer.h[0].parameters():  # type: ignore[union-attr]
            parameter.requires_grad_(False)

    def batch(step: int, micro: int, rank: int) -> Batch:
        return task.example_batch(samples, seed=step * 1000 + micro * 100 + rank)

    return Setup(task.model, task.loss, mdcs.ByLeaf() if wrap else mdcs.ByClass(task.block_classes), batch)


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def setup(name: str, double: bool = False, half: str = "", **options: Any) -> Setup:
    """"tied", "empty", "mixed" or "wider" (types), "twice", "pictures", "line-8-16-4" for linear layers of these widths, or
    one that :func:`tiny` knows.

    ``double`` is all in float64, ``half`` names another precision of all, or "masters": that which the model has.
    """
    if name.startswith("line-"):
        made = line(*map(int, name.split("-")[1:]))
    elif name in ("tied", "empty", "mixed", "wider"):
        made = tied(kind={"tied": Tied, "empty": Empty, "mixed": Mixed, "wider": Wider}[name], **options)
    elif name in ("twice", "pictures"):
        made = {"twice": twice, "pictures": pictures}[name](**options)
    else:
        made = tiny(name, **options)
    if half == "masters" or not (double or half):
        return made
    one, dtype = made.batch, HALF.get(half, torch.float64)
    made.model.to(dtype)

    def batch(step: int, micro: int, rank: int) -> Batch:
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in one(step, micro, rank).items()}

    return Setup(made.model, made.loss, made.policy, batch)


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of OPTIMIZERS, "adam", "sgd" (momentum, not fused), "plain sgd", or "adamw" with two groups: matrices decay, the
    rest does not.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name in OPTIMIZERS:
        return OPTIMIZERS[name](parameters)
    if name == "plain sgd":
        return torch.optim.SGD(parameters, lr=0.05)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "adamw":
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)
    return torch.optim.Adam(parameters, lr=1e-2)


@dataclass(frozen=True)
class Job:
    """A training. ``half``: the precision of compute where masters are float32, of gradients as well unless they are
    ``wide_gradients``. With ``exact_norm`` DDP clips by a norm that is summed in float64.
    """

    model: str
    micro_steps: int = 1
    optimizer: str = "adam"
    clip_norm: float | None = None
    double: bool = False
    steps: int = 20
    half: str = ""
    wide_gradients: bool = False
    exact_norm: bool = False

    @property
    def mixed(self) -> dict[str, Any]:
        """Arguments for a profile of this precision."""
        return {
            "master_dtype": torch.float32 if self.half else None,
            "grad_dtype": torch.float32 if self.wide_gradients else None,
        }

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))


@dataclass(frozen=True)
class How:
    """How it is planned. ``budget`` counts what all fsdp needs (:func:`all_fsdp_bytes`); None is unlimited.

    ``bytes`` is the size of partitioning's blocks, and half of fusion's buckets: small enough to cut some of the tiny
    models' units and to fuse others.
    """

    strategy: str = "dp"
    scheduler: str = "wfbp"
    cross_iteration: bool = True
    budget: float | None = None
    seed: int = 0
    emulated: bool = False
    depth: int = 2
    collectives: Collectives = Collectives()
    bytes: int = 4000
    per_node: int = 0
    recompute: str = ""  # of all units that can; "random" by unit


HALVES = [
    [
        *(
            How(strategy, "wfbp", budget=1.0 if (i + half) % 2 else None, cross_iteration=(i + half) % 2 == 0)
            for i, strategy in enumerate(("dp", "zero2", "sdp", "fsdp"))
        ),
        How("random", "random", seed=1 + half),
    ]
    for half in (0, 1)
]
"""Every strategy without a budget, and with the smallest and a barrier: a half of them for every other case."""

SOLVER_S = 2.0  # the other ranks wait for it, and for no more than their timeout


def strategy_for(how: How) -> StrategyPlanner | JointPlanner:
    if how.strategy == "joint":
        return Joint(block_mib=how.bytes / MIB, seconds=SOLVER_S)
    if how.strategy == "random":
        return STRATEGIES["random"](seed=how.seed)  # type: ignore[call-arg]
    return STRATEGIES[how.strategy]() if how.strategy in STRATEGIES else STRATEGIES["uniform"](kind=how.strategy)  # type: ignore[call-arg]


def scheduler_for(how: How) -> Scheduler | None:
    if how.scheduler == "joint":
        return None
    options: dict[str, Any] = {
        "random": {"seed": how.seed},
        "fusion": {"bucket_mib": 2 * how.bytes / MIB},
        "partitioning": {"block_mib": how.bytes / MIB},
        "priority": {"block_mib": how.bytes / MIB},
        "memory_aware": {"block_mib": how.bytes / MIB, "seconds": SOLVER_S},
    }.get(how.scheduler, {})
    return SCHEDULERS[how.scheduler](**options)


@dataclass(frozen=True)
class Reference:
    """DDP's run: the rank's loss of every micro-step, and the state dict afterwards."""

    losses: tuple[float, ...]
    state: dict[str, Tensor]


def clip(model: nn.Module, limit: float, exact: bool) -> None:
    """As DDP's loops do, with torch's norm or with one that is rounded once."""
    if not exact:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.cat([g.flatten().double() for g in gradients]).norm()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm.to(gradients[0].dtype))


@lru_cache(maxsize=64)
def reference(job: Job) -> Reference:
    made = setup(job.model, job.double)
    rank = dist.get_rank()
    # Its own process group: its collectives must not come between those of a plan.
    group = dist.new_group()
    ddp = nn.parallel.DistributedDataParallel(made.model, process_group=group)
    optimizer = optimizer_for(job.optimizer, made.model)
    scheduler = job.scheduler(optimizer)
    losses = []
    for step in range(job.steps):
        for micro in range(job.micro_steps):
            with ddp.no_sync() if micro < job.micro_steps - 1 else nullcontext():
                loss = made.loss(ddp, made.batch(step, micro, rank)) / job.micro_steps
                loss.backward()
            losses.append(loss.item())
        if job.clip_norm is not None:
            clip(made.model, job.clip_norm, job.exact_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    # DDP broadcasts rank 0's buffers at the next forward; what rank 0 has now is what the model is.
    state = {name: value.detach().clone() for name, value in made.model.state_dict().items()}
    for name, _ in made.model.named_buffers():
        if name in state:
            dist.broadcast(state[name], src=0, group=group)
    # DDP's reducer must not be the last to hold the group: it would wait for gloo's threads with the GIL.
    del ddp
    gc.collect()
    dist.destroy_process_group(group)
    return Reference(tuple(losses), state)


def measured(model: nn.Module, units: list[mdcs.ModelUnit], loss: Callable[[], Any], optimizer: Any, **options: Any) -> Profile:
    """The ranks' profile of one iteration, with a link that is made up."""
    options = {"world": dist.get_world_size(), "link": mdcs.Link.uniform(1.0, 50.0), "iterations": 1} | options
    return merge_profiles(measure_profile(model, units, loss, optimizer, **options))


_PROFILES: dict[tuple[Any, ...], Profile] = {}


def profile_of(job: Job, how: How, made: Setup, units: list[mdcs.ModelUnit], model_optimizer: Any) -> Profile:
    """Measured once per kind of job and process; the link is made up."""
    key = (job.model, job.optimizer, job.double, job.half, job.wide_gradients)
    world, rank = dist.get_world_size(), dist.get_rank()
    if key not in _PROFILES:
        loss = lambda: made.loss(made.model, made.batch(0, 0, rank))  # noqa: E731
        _PROFILES[key] = measured(made.model, units, loss, model_optimizer, **job.mixed)
    link = mdcs.Link.uniform(1.0, 50.0, how.depth, how.emulated)
    if how.per_node:
        link = in_nodes(link, world, how.per_node, 0.1, how.collectives)
    return dataclasses.replace(_PROFILES[key], link=link, collectives=how.collectives)


def all_fsdp_bytes(job: mdcs.Job) -> int:
    """The peak of all fsdp with the sequential schedule: the floor, or a little more."""
    return PlanningProblem(job, None).peak([Strategy.fsdp] * len(job.profile.units))


def recomputing(job: mdcs.Job, model: nn.Module, units: list[mdcs.ModelUnit], choices: Sequence[str]) -> mdcs.Job:
    """The job in which the units that can compute activations again do as ``choices`` say; bytes and seconds are made up."""
    reasons, profile = reasons_to_keep(model, units), job.profile
    able = [u for u, unit in enumerate(profile.units) if unit.backward is not None and not reasons[u] and not unit.aliased]
    spans = [(unit.forward[0], (unit.backward or (0,))[0]) for unit in profile.units]
    options = tuple(RecomputeOption(u, choice, (RecomputeUse(*spans[u], 0, 1.0, 0),)) for u in able for choice in CHOICES[1:])
    chosen = tuple(choice if u in able else "none" for u, choice in enumerate(choices))
    return dataclasses.replace(job, profile=dataclasses.replace(profile, recompute=options), recompute=chosen)


def plan_for(job: Job, how: How, profile: Profile, model: nn.Module | None = None) -> mdcs.Plan:
    """``model`` is needed where units are to compute activations again."""
    options = {"micro_steps": job.micro_steps, "cross_iteration": how.cross_iteration and job.clip_norm is None}
    planned = mdcs.Job(profile, **options)
    if how.recompute:
        assert model is not None
        rng, units = random.Random(how.seed), mdcs.partition(model, setup(job.model).policy)
        choices = [how.recompute if how.recompute != "random" else rng.choice(CHOICES) for _ in units]
        planned = recomputing(planned, model, units, choices)
    budget = None if how.budget is None else int(how.budget * all_fsdp_bytes(planned))
    return on_rank_zero(lambda: mdcs.make_plan(planned, strategy_for(how), scheduler_for(how), budget=budget))


def plans_of_half(job: Job, profile: Profile, half: int) -> Iterator[tuple[How, mdcs.Plan]]:
    """The plans of a half of HALVES, those with a budget under the smallest one that they keep."""
    for how in HALVES[half]:
        plan = plan_for(job, replace(how, budget=None), profile)
        yield how, plan if how.budget is None else replace(plan, budget=min_feasible_budget(plan))


@contextmanager
def parallel_for(
    job: Job, how: How, made: Setup | None = None, optimizer: Any = None, *, plan: mdcs.Plan | None = None, **options: Any
) -> Iterator[tuple[Setup, mdcs.Session, Any]]:
    made = made or setup(job.model, job.double)
    optimizer = optimizer or optimizer_for(job.optimizer, made.model)
    units = mdcs.partition(made.model, made.policy)
    if plan is None:
        plan = plan_for(job, how, profile_of(job, how, made, units, optimizer), made.model)
    options = {"clip_norm": job.clip_norm, "timeout_s": 20.0} | options
    with mdcs.parallelize(made.model, optimizer, plan, units, **options) as parallel:
        yield made, parallel, optimizer


@contextmanager
def planned(
    model: nn.Module, optimizer: Any, loss: Callable[[], object], strategy: str, policy: Any = mdcs.ByLeaf(), **options: Any  # noqa: B008
) -> Iterator[mdcs.Session]:
    """Measure, plan and run a model that no :class:`Job` names."""
    units = mdcs.partition(model, policy)
    profile = measured(model, units, loss, optimizer)
    plan = on_rank_zero(lambda: mdcs.make_plan(profile, strategy_for(How(strategy)), SCHEDULERS["wfbp"]()))
    with mdcs.parallelize(model, optimizer, plan, units, **{"timeout_s": 20.0} | options) as parallel:
        yield parallel


class Twin:
    """A model with DDP, to be compared with one that has a plan."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.ddp = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group(), **options)

    def step(self, *losses: Callable[[nn.Module], Tensor]) -> list[float]:
        """Update once, after a backward pass of each loss. Return the losses."""
        found = []
        for i, loss in enumerate(losses):
            with nullcontext() if i == len(losses) - 1 else self.ddp.no_sync():
                value = loss(self.ddp)
                value.backward()
            found.append(value.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def differing(self, state: dict[str, Tensor]) -> list[str]:
        return differing(state, self.model.state_dict())


def train(job: Job, made: Setup, parallel: mdcs.Session, optimizer: Any, steps: int | None = None) -> list[float]:
    rank, losses = dist.get_rank(), []
    scheduler = job.scheduler(optimizer)
    for step in range(job.steps if steps is None else steps):
        for micro in range(job.micro_steps):
            loss = made.loss(made.model, made.batch(step, micro, rank)) / job.micro_steps
            loss.backward()
            losses.append(loss.item())
        parallel.step()
        scheduler.step()
    return losses


def compare(job: Job, how: How) -> dict[str, Any]:
    """Train with the plan, compare with DDP: bitwise, or in float64 by loss and relative distance of the weights."""
    wanted = reference(job)
    with parallel_for(job, how) as (made, parallel, optimizer):
        losses = train(job, made, parallel, optimizer)
        state = parallel.state_dict()
        kinds = {str(m.kind) for m in parallel.plan.messages}
        count = len(parallel.plan.messages)
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, wanted.losses, strict=True)),
        "weights": distance(state, wanted.state),
        "bitwise": losses == list(wanted.losses) and not differing(state, wanted.state),
        "kinds": sorted(kinds),
        "messages": count,
    }


def compare_all(cases: list[tuple[Job, How]]) -> list[dict[str, Any]]:
    out = []
    for job, how in cases:
        try:
            out.append(compare(job, how))
        except Exception as e:
            raise RuntimeError(f"{job} {how}: {e}") from e
    return out


def differing(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names of what is not bitwise equal."""
    assert state.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(state[name], wanted[name])]


def distance(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """‖Δw‖₂ / ‖w‖₂ over everything that is a float."""
    floats = [name for name, value in wanted.items() if value.is_floating_point()]
    change = sum(((state[n].double() - wanted[n].double()) ** 2).sum() for n in floats)
    whole = sum((wanted[n].double() ** 2).sum() for n in floats)
    return float((change / whole) ** 0.5)
