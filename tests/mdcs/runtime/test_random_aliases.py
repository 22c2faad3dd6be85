"""Property: a model with tensors that share memory with its parameters trains as with DDP, or is refused by name; it never dies.

60 models (``MDCS_EXAMPLES=2``: twice as many), each a function of its seed: views, slices, expansions, transposes and
``.data`` of trainable and frozen weights, returned in tuples, dictionaries, dataclasses and objects, kept on modules, in closures
and in lists; used by the model, by later modules, in the loss; outputs changed in place; parameters that are tied, or share
memory without being one; buffers, attributes and caches over weights. Each is trained under a random strategy and a random
scheduler, half of them under the smallest budget.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mdcs
from mdcs.plan.ledger import min_feasible_budget
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.strategies import RandomMix, Uniform
from mdcs.profiler.consensus import on_rank_zero
from mdcs.runtime.unshard import Unsharder
from tests.mdcs.profiles import TIMES
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import measured

WIDTH, STEPS = 6, 3
MODELS = round(60 * max(1, TIMES))
CALLS = MODELS // 20  # all but the first are slow


class Holder:
    def __init__(self, out: Tensor, alias: Tensor) -> None:
        self.out, self.alias = out, alias


@dataclass
class Pair:
    out: Tensor
    alias: Tensor


# Of a part's weight (WIDTH x WIDTH) or bias, a matrix of rows as long or a vector.
VIEWS: dict[str, Callable[[Any], Tensor]] = {
    "slice": lambda p: p.w[:2],
    "transpose": lambda p: p.w.t(),
    "expand": lambda p: p.b.expand(4, WIDTH),
    "broadcast": lambda p: torch.broadcast_to(p.b, (3, WIDTH)),
    "data": lambda p: p.w.data[1:],
    "detach": lambda p: p.w.detach(),
    "row": lambda p: p.w[1],
    "chunk": lambda p: p.w.chunk(2)[0],
    "unbind": lambda p: p.w.unbind(0)[2],
    "flat": lambda p: p.w.reshape(-1)[:WIDTH],
    "diagonal": lambda p: p.w.diagonal(),
    "strided": lambda p: p.w.as_strided((2, WIDTH), (WIDTH, 1), p.w.storage_offset() + WIDTH),
    "whole": lambda p: p.w,
    "numpy": lambda p: torch.from_numpy(p.w.detach().numpy())[:2],
    "new parameter": lambda p: nn.Parameter(p.w.detach()[0]),
    "copy": lambda p: p.w.clone(),
}
RETURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda y, a: (y, None, a), lambda got: (got[0], got[2])),
    "dict": (lambda y, a: {"y": y, "more": [a]}, lambda got: (got["y"], got["more"][0])),
    "dataclass": (Pair, lambda got: (got.out, got.alias)),
    "object": (Holder, lambda got: (got.out, got.alias)),
    "namespace": (lambda y, a: SimpleNamespace(y=[y], a=a), lambda got: (got.y[0], got.a)),
    "object in a tuple": (lambda y, a: (y, Holder(y, a)), lambda got: (got[0], got[1].alias)),
}
KEPT = ("attribute", "container", "closure", "list")
TIES = ("one parameter", "data", "new parameter", "transposed", "buffer", "attribute", "closure", "cache")
USES = ("later part", "next part", "model", "loss", "without gradients", "")


@dataclass(frozen=True)
class Habit:
    """How one part treats its weights."""

    view: str
    carrier: str
    use: str
    let_go: bool  # of what it keeps, at the end of forward
    frozen: bool
    in_place: bool
    checkpointed: bool

    @classmethod
    def random(cls, rng: random.Random) -> Habit:
        view = rng.choice([v for v in VIEWS if v not in ("whole", "numpy") or rng.random() < 0.2])
        carrier = rng.choice([*RETURNED, *KEPT])
        return cls(
            view, carrier, rng.choice(USES), rng.random() < 0.9, rng.random() < 0.3, rng.random() < 0.3, rng.random() < 0.2
        )


def combined(y: Tensor, alias: Tensor) -> Tensor:
    """Depends on the values of both, in backward too."""
    return y * alias if alias.dim() == 1 else y + y @ alias.t() @ alias


class Part(nn.Module):
    def __init__(self, habit: Habit, store: list[Tensor]) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH) / 3)
        self.habit, self.store = habit, store
        if habit.frozen:
            self.requires_grad_(False)

    def forward(self, x: Tensor, given: Tensor | None) -> Any:
        y = F.linear(x if given is None else combined(x, given), self.w, self.b)
        alias = VIEWS[self.habit.view](self)
        if self.habit.carrier in RETURNED:
            return RETURNED[self.habit.carrier][0](y, alias)
        if self.habit.carrier == "attribute":
            self.kept = alias
        elif self.habit.carrier == "container":
            self.options = {"kept": [Holder(y, alias)]}
        elif self.habit.carrier == "closure":
            self.get = lambda: alias
        else:
            self.store.append(alias)
        return y

    def unpack(self, got: Any) -> tuple[Tensor, Tensor]:
        if self.habit.carrier in RETURNED:
            return RETURNED[self.habit.carrier][1](got)
        if self.habit.carrier == "attribute":
            return got, self.kept
        if self.habit.carrier == "container":
            return got, self.options["kept"][0].alias
        if self.habit.carrier == "closure":
            return got, self.get()
        return got, self.store[-1]

    def let_go(self) -> None:
        for name in ("kept", "options", "get"):
            vars(self).pop(name, None)


class Net(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.store: list[Tensor] = []
        self.parts = nn.ModuleList(Part(Habit.random(rng), self.store) for _ in range(rng.choice([2, 3, 4])))
        self.head = nn.Linear(WIDTH, 3)
        self.tie = rng.choice(TIES) if rng.random() < 0.2 else ""
        a, b = rng.sample(list(self.parts), 2)
        if self.tie == "one parameter":
            b.w = a.w
        elif self.tie == "data":
            b.w.data = a.w.data
        elif self.tie == "new parameter":
            b.w = nn.Parameter(a.w, a.w.requires_grad)
        elif self.tie == "transposed":
            b.w = nn.Parameter(a.w.detach().t(), a.w.requires_grad)
        elif self.tie == "buffer":
            b.register_buffer("over", a.w.detach()[0])
        elif self.tie == "attribute":
            b.over = {"rows": [a.w.detach()[0]]}
        elif self.tie == "closure":
            rows = a.w.data[0]
            b.scale = lambda: rows
        elif self.tie == "cache":
            self.cached: list[Any] = [a]

    def forward(self, x: Tensor) -> Tensor:
        waiting: list[Tensor] = []
        if self.tie == "cache" and isinstance(self.cached[0], Part):
            part = self.cached[0]
            part.register_forward_hook(lambda m, args, out: setattr(self, "cached", [m.b.detach()[:3]]))
        late: list[Tensor] = []
        given: Tensor | None = None
        for part in self.parts:
            habit = part.habit
            if habit.checkpointed:
                got = checkpoint(part, x, given, use_reentrant=False)
            else:
                got = part(x, given)
            y, alias = part.unpack(got)
            if habit.in_place:
                y += 0.5 * x
                y = torch.tanh(y)
            else:
                y = torch.tanh(y) + 0.5 * x
            given = waiting.pop() if waiting else None
            if habit.use == "next part":
                given = alias
            elif habit.use == "later part":
                waiting.append(alias)
            elif habit.use == "model":
                y = combined(y, alias)
            elif habit.use == "loss":
                late.append(alias)
            elif habit.use == "without gradients":
                with torch.no_grad():
                    scale = 1 + alias.mean()
                y = y * scale
            x = y
            del got, y, alias
        for alias in late:
            x = combined(x, alias)
        out: Tensor = self.head(x)
        for alias in late:
            out = out * (1 + alias.square().mean())
        for part in self.parts:
            if part.habit.let_go:
                part.let_go()
        if all(part.habit.let_go for part in self.parts):
            self.store.clear()
        return out


@dataclass(frozen=True)
class Training:
    seed: int
    strategy: str
    scheduler: str
    micro_steps: int
    adam: bool
    tight: bool
    evaluates: bool

    @classmethod
    def random(cls, seed: int) -> Training:
        rng = random.Random(-seed - 1)
        strategy = rng.choice(["fsdp", "fsdp", "fsdp", "sdp", "zero2", "dp", "random", "random"])
        scheduler = "joint" if rng.random() < 0.02 else rng.choice([s for s in SCHEDULERS if s != "memory_aware"])
        return cls(seed, strategy, scheduler, rng.choice([1, 1, 2]), rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.seed)
        model = Net(random.Random(self.seed)).double()
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.Adam(trained, lr=1e-2) if self.adam else torch.optim.SGD(trained, lr=0.05)

    def loss(self, model: nn.Module, step: int, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + dist.get_rank())
        x = torch.randn(2, 2, WIDTH, generator=generator, dtype=torch.float64)
        return model(x).square().mean() / self.micro_steps

    def plan(self, model: nn.Module, units: list[mdcs.ModelUnit], optimizer: torch.optim.Optimizer) -> mdcs.Plan:
        profile = measured(model, units, lambda: self.loss(model, 0, 0), optimizer)
        mix = RandomMix(seed=self.seed) if self.strategy == "random" else Uniform(self.strategy)
        job = mdcs.Job(profile, self.micro_steps)
        joint = self.scheduler == "joint"
        planner: Any = Joint(seconds=0.5) if joint else mix

        def make() -> mdcs.Plan:
            plan = mdcs.make_plan(job, planner, None if joint else SCHEDULERS[self.scheduler]())
            return dataclasses.replace(plan, budget=min_feasible_budget(plan)) if self.tight else plan

        return on_rank_zero(make)


def losses_of(training: Training, model: nn.Module, update: Callable[[], object], evaluate: Callable[[], Any]) -> list[float]:
    losses = []
    for step in range(STEPS):
        for micro in range(training.micro_steps):
            loss = training.loss(model, step, micro)
            loss.backward()
            losses.append(loss.item())
        update()
        if training.evaluates:
            with evaluate(), torch.no_grad():
                losses.append(training.loss(model, step, 7).item())
    return losses


def with_ddp(training: Training) -> tuple[list[float], dict[str, Tensor]]:
    """State after DDP's training: gradients are averaged, whatever shares memory with a weight follows it."""
    model, optimizer = training.build()
    group = dist.new_group()

    def update() -> None:
        for p in model.parameters():
            if p.requires_grad and p.grad is not None:
                dist.all_reduce(p.grad.div_(2), group=group)
        optimizer.step()
        optimizer.zero_grad()

    return losses_of(training, model, update, nullcontext), model.state_dict()


def with_a_plan(training: Training) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = training.build()
    units = mdcs.partition(model, mdcs.ByLeaf())
    plan = training.plan(model, units, optimizer)
    with pytest.MonkeyPatch.context() as patch, mdcs.parallelize(model, optimizer, plan, units, timeout_s=15) as parallel:
        if training.tight:  # gather unit by unit in evaluations, for which so small a model has room at once
            patch.setattr(Unsharder, "fits", lambda unsharder, size: False)
        return losses_of(training, model, parallel.step, parallel.evaluate), parallel.state_dict()


def train(seed: int) -> str:
    """"right", "refused: ..." or what is wrong."""
    training = Training.random(seed)
    try:
        losses, state = with_a_plan(training)
    except mdcs.UnsupportedModel as e:
        names = [name for name, _ in training.build()[0].named_modules() if name]  # parameters' names begin with them
        return f"refused: {e}" if any(name in str(e) for name in names) else f"refused without a name: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    wanted, weights = with_ddp(training)
    if not torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-9, atol=1e-12):
        return f"losses {losses}, with DDP {wanted}"
    differ = [n for n, w in weights.items() if not torch.allclose(state[n], w, rtol=1e-9, atol=1e-12)]
    return f"weights differ: {differ}" if differ else "right"


def train_all(seeds: range) -> dict[int, str]:
    return {seed: train(seed) for seed in seeds}


@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.slow] if c else []) for c in range(CALLS)])
def test_models_are_right_or_refused_by_name(two: Ranks, call: int):
    seeds = range(call * MODELS // CALLS, (call + 1) * MODELS // CALLS)
    first, second = two.run(train_all, seeds, timeout_s=200)
    assert {seed: (a, second[seed]) for seed, a in first.items() if a != second[seed]} == {}
    assert {seed: what for seed, what in first.items() if what != "right" and not what.startswith("refused: ")} == {}
    count = Counter(what.partition(":")[0] for what in first.values())
    assert count["right"] > 0.6 * len(seeds) and count["refused"] > 0
