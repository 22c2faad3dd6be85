"""Modules used otherwise than through their own forward, and outputs of every kind: they train as with DDP, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mdcs
from mdcs.plan.ledger import min_feasible_budget
from mdcs.planner.registry import SCHEDULERS, STRATEGIES
from mdcs.planner.strategies import RandomMix, Uniform
from mdcs.profiler.consensus import merge_profiles, on_rank_zero
from mdcs.profiler.model_profile import measure_profile
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import Ranks

WIDTH, STEPS = 6, 4
LEAVES = mdcs.ByLeaf()
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    loss: Loss = lambda model, x: model(x).square().mean()
    policy: Any = None
    departs: bool = False

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.model()
        return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.two(torch.tanh(self.one(self.norm(x))))
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 3)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


# ---- parameters outside of their module's forward


class Clip(nn.Module):
    """Two towers, and a scale at the root that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Stack(), Stack()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.one(x), self.two(x), self.logit_scale.exp()


def contrastive(model: Clip, x: Tensor) -> Tensor:
    one, two, scale = model(x)
    return F.cross_entropy(scale * one @ two.t(), torch.arange(len(x)))


def contrastive_of_methods(model: Clip, x: Tensor) -> Tensor:
    one, two = model.one(x), model.two(x)
    return F.cross_entropy(model.logit_scale.exp() * one @ two.t(), torch.arange(len(x)))


class CallsForward(Stack):
    """``block.forward(x)``: hooks of the block do not run."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class Functional(Stack):
    """Weights of layers without a call of any of them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(x @ block.one.weight.t() + block.one.bias) @ block.two.weight.t()
        return F.linear(x, self.head.weight, self.head.bias)


class Tied(nn.Module):
    """The embedding's weight makes the logits in the root's forward, transposed or not."""

    def __init__(self, how: str = "linear") -> None:
        super().__init__()
        self.how = how
        self.wte, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wte((x.abs() * 5).long().clamp(max=10)).sum(1)
        for block in self.blocks:
            hidden = block(hidden)
        w = self.wte.weight
        return F.linear(hidden, w) if self.how == "linear" else hidden @ w.t() if self.how == "transposed" else hidden @ w.T


class Vae(nn.Module):
    """The loop calls its methods, and never the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(), nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.quant = nn.Parameter(torch.randn(3, 3))

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x) @ self.quant
        return out

    def decode(self, z: Tensor) -> Tensor:
        out: Tensor = self.decoder(z)
        return out


def reconstruction(model: Vae, x: Tensor) -> Tensor:
    return (model.decode(model.encode(x)) - x).square().mean()


class Dora(nn.Module):
    """The adapter reads the frozen weight of the layer below it, as PEFT's DoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1).detach())

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        weight = self.base.weight + (self.up.weight @ self.down.weight).detach()
        scale = self.magnitude / torch.linalg.norm(weight, dim=1).detach()
        return x + result + (scale - 1) * F.linear(x, self.base.weight) + scale * self.up(self.down(x))


class Adapted(nn.Module):
    """A copy of a layer is trained in the place of the frozen one, as PEFT's ``modules_to_save``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Dora() for _ in range(3)))
        self.original = nn.Linear(WIDTH, 3).requires_grad_(False)
        self.saved = nn.ModuleDict({"default": nn.Linear(WIDTH, 3)})
        self.active = "default"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.saved[self.active](self.blocks(x))
        return out


def decayed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())


def normalised(model: Stack, x: Tensor) -> Tensor:
    """A weight's norm without gradients scales the loss."""
    out = model(x).square().mean()
    with torch.no_grad():
        norm = model.blocks[0].one.weight.norm()
    return out / norm


def attention() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0) for _ in range(2)]
    return nn.Sequential(nn.Unflatten(0, (1, 4)), *layers)


class Sometimes(Stack):
    """The profiled step does not use the first weight once more; later ones do."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.blocks[0].one.weight.sum() if x.sum() > 0 else out


class Lends(nn.Module):
    """Gives its parameter away as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Borrows(Stack):
    """Its outputs are parameters, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lends, self.scale = Lends(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.lends()), self.scale


OUTSIDE = {
    "a scale at the root": Case(Clip, contrastive),
    "a scale in the loss": Case(Clip, contrastive_of_methods),
    "block.forward": Case(CallsForward),
    "functional": Case(Functional),
    "tied at the root": Case(Tied),
    "tied at the root, transposed": Case(lambda: Tied("transposed")),
    "tied at the root, a view": Case(lambda: Tied("view"), policy=LEAVES),
    "methods": Case(Vae, reconstruction),
    "adapters that read weights": Case(Adapted),
    "adapters that read weights, leaves": Case(Adapted, policy=LEAVES),
    "weights in the loss": Case(Stack, decayed),
    "a norm without gradients": Case(Stack, normalised),
    "attention, leaves": Case(attention, policy=LEAVES),
    "in some steps": Case(Sometimes, departs=True),
    "outputs that are parameters": Case(Borrows, lambda model, x: torch.mul(*model(x)).square().mean()),
    "outputs that are parameters, leaves": Case(Borrows, lambda model, x: torch.mul(*model(x)).square().mean(), LEAVES),
}

# ---- outputs


class Changing(nn.Module):
    """Layers with operations in place behind them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Adds(nn.Module):
    def __init__(self, of_view: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.of_view = linear(), linear(), of_view

    def forward(self, x: Tensor) -> Tensor:
        out = self.one(x.view(2, 2, WIDTH) if self.of_view else x)
        out += self.two(x).view(out.shape)
        out.mul_(0.5)
        return torch.tanh(out).view(x.shape)


class Squeezes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x.unsqueeze(0)).squeeze(0))


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Holder:
    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Wraps(Block):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(super().forward(x))


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], get: Callable[[Any], Tensor] = lambda out: out.hidden) -> None:
        super().__init__()
        self.blocks, self.get = nn.ModuleList(Wraps(wrap) for _ in range(3)), get

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[:-1]:
            x = self.get(block(x))
        return self.blocks[-1](x)


def wrapped(wrap: Callable[[Tensor], Any], get: Callable[[Any], Tensor] = lambda out: out.hidden, policy: Any = None) -> Case:
    return Case(lambda: Wrapped(wrap, get), lambda model, x: get(model(x)).square().mean(), policy)


class LossInside(Stack):
    """The loss, too, is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return super(LossInside, self).forward(x).square().mean()

        out: Tensor = checkpoint(loss, x, use_reentrant=False)
        return out


class Grows(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return super().forward(x) + self.seen.mean()


def object_of(hidden: Tensor) -> Any:
    return Holder([Holder({"a": hidden})])


OUTPUTS = {
    "relu in place": Case(lambda: Changing(linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True)), policy=LEAVES),
    "dropout in place": Case(
        lambda: Changing(linear(), nn.GELU(), nn.Dropout(0.5, inplace=True), linear(), nn.Dropout(0.0, inplace=True)),
        lambda model, x: (torch.manual_seed(3), model(x).square().mean())[1], LEAVES,
    ),
    "silu in place of a frozen layer": Case(
        lambda: Changing(linear(), linear().requires_grad_(False), nn.SiLU(inplace=True), linear()), policy=LEAVES
    ),
    "added in place": Case(lambda: Changing(Adds(), Adds()), policy=LEAVES),
    "added in place to a view": Case(lambda: Changing(Adds(True), Adds(True)), policy=LEAVES),
    "squeezed": Case(lambda: Changing(Squeezes(), Squeezes()), policy=LEAVES),
    "a namespace": wrapped(lambda y: SimpleNamespace(hidden=y)),
    "a namespace, leaves": wrapped(lambda y: SimpleNamespace(hidden=y), policy=LEAVES),
    "an object": wrapped(Holder),
    "an object with slots": wrapped(Slotted),
    "objects in objects": wrapped(object_of, lambda out: out.hidden[0].hidden["a"]),
    "a closure": wrapped(lambda y: lambda: y, lambda out: out()),
    "a view": wrapped(lambda y: y.view(-1), lambda out: out.view(4, WIDTH)),
    "a view that is changed": wrapped(lambda y: y.unsqueeze(0), lambda out: out.squeeze(0).tanh_()),
    "the loss in a checkpoint": Case(LossInside, lambda model, x: model(x)),
    "the loss in a checkpoint, leaves": Case(LossInside, lambda model, x: model(x), LEAVES),
    "a buffer that grows": Case(Grows),
}  # fmt: skip


# ---- reentrant checkpoints


class Reentrant(Stack):
    """Checkpoints of each block, of all of them, of one in another, of blocks that come twice."""

    def __init__(self, what: str, mix: Callable[[nn.Module], Any] = lambda model: None) -> None:
        super().__init__()
        self.what = what
        mix(self)

    def body(self, x: Tensor) -> Tensor:
        x, run = x.clone().requires_grad_(), super().body  # else there are no gradients
        if self.what == "all":
            return again(run, x)
        if self.what == "nested":
            return again(lambda x: self.blocks[2](again(lambda x: self.blocks[1](self.blocks[0](x)), x)), x)
        if self.what == "twice":
            return again(self.blocks[0], again(lambda x: self.blocks[1](self.blocks[0](x)), x))
        if self.what == "used outside":
            return again(lambda x: F.linear(x, self.blocks[0].one.weight).tanh() @ self.blocks[0].one.weight, run(x))
        if self.what == "plain":
            return run(x)
        if self.what == "used before":
            x = again(lambda x: x * self.blocks[2].one.weight.sum(), self.blocks[0](x))
            return self.blocks[2](self.blocks[1](x))
        for block in self.blocks:
            x = again(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "loss":
            return again(lambda x: super(Reentrant, self).forward(x).square().mean(), x.clone().requires_grad_())
        if self.what == "tied loss":
            return again(lambda h: (h @ self.head.weight.t()).square().mean(), self.head(self.body(x)) @ self.head.weight)
        return super().forward(x)


def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, x, use_reentrant=True)
    return out


def parts_again(model: Stack, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    for block in model.blocks:
        x = again(block, x)
    out: Tensor = model.head(x)
    return out.square().mean()


def changing(*what: str) -> Loss:
    """The loss of a model that is checkpointed otherwise in each step."""

    def loss(model: Reentrant, x: Tensor) -> Tensor:
        model.what = next(each for i, each in enumerate(what) if torch.equal(x, batch(i)))
        return model(x).square().mean()

    return loss


def the_loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def frozen(model: Stack) -> None:
    model.blocks[1].requires_grad_(False)


REENTRANT = {
    **{
        f"{what}{', leaves' if policy else ''}": Case(partial(Reentrant, what), policy=policy)
        for what in ("each", "all", "nested", "twice", "used outside")
        for policy in (None, LEAVES)
    },
    **{
        f"{what}{', leaves' if policy else ''}": Case(partial(Reentrant, what), the_loss, policy)
        for what in ("loss", "tied loss")
        for policy in (None, LEAVES)
    },
    "each, one frozen": Case(partial(Reentrant, "each", frozen)),
    "all, one frozen": Case(partial(Reentrant, "all", frozen)),
    "called by the loop": Case(Stack, parts_again),
    "in later steps": Case(partial(Reentrant, ""), changing("plain", "each", "all", "nested"), departs=True),
    "before, in later steps": Case(partial(Reentrant, ""), changing("plain", "used before", "plain", "each"), departs=True),
    "in later steps, leaves": Case(partial(Reentrant, ""), changing("plain", "all", "nested", "plain"), LEAVES, departs=True),
    "otherwise in later steps": Case(partial(Reentrant, ""), changing("nested", "all", "each", "plain"), departs=True),
}


def plan_of(case: Case, how: str, model: nn.Module, units: list[mdcs.ModelUnit], optimizer: Any) -> mdcs.Plan:
    profile = merge_profiles(
        measure_profile(
            model, units, lambda: case.loss(model, batch(0)), optimizer, world=2, link=mdcs.Link.uniform(1.0, 50.0), iterations=1
        )
    )
    strategy, _, tight = how.partition(" ")

    def make() -> mdcs.Plan:
        if strategy == "joint":
            plan = mdcs.make_plan(profile, STRATEGIES["joint"](seconds=1.0), None)
        else:
            mixed = RandomMix(seed=3) if strategy == "random" else Uniform(strategy)
            plan = mdcs.make_plan(profile, mixed, SCHEDULERS["priority"](block_mib=1e-4))
        return replace(plan, budget=min_feasible_budget(plan)) if tight else plan

    return on_rank_zero(make)


def with_ddp(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state with DDP's averages, without its wrapper, which knows no call but forward."""
    model, optimizer = case.build()
    group, losses = dist.new_group(), []
    for step in range(STEPS):
        loss = case.loss(model, batch(step))
        loss.backward()
        losses.append(loss.item())
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad.div_(2), group=group)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def with_plan(case: Case, how: str) -> tuple[list[float], dict[str, Tensor], list[dict[str, int]]]:
    model, optimizer = case.build()
    units = mdcs.partition(model, case.policy)
    plan = plan_of(case, how, model, units, optimizer)
    losses = []
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=15, broadcast_buffers=False) as parallel:
        for step in range(STEPS):
            loss = case.loss(model, batch(step))
            loss.backward()
            losses.append(loss.item())
            parallel.step()
            if step == 1 and not any(True for _ in model.buffers()):
                with parallel.evaluate():
                    case.loss(model, batch(step))
        state = parallel.state_dict()
        return losses, state, [r.departures for r in parallel.records(flush=True)]


def differing(group: str, how: str, only: str = "") -> Iterator[tuple[str, str]]:
    for name, case in globals()[group].items():
        if only and name != only:
            continue
        try:
            (losses, state, departures), (ddp_losses, ddp_state) = with_plan(case, how), with_ddp(case)
            problem = [f"losses {losses} {ddp_losses}"] * (losses != ddp_losses)
            problem += [n for n in ddp_state if not torch.equal(state[n], ddp_state[n])]
            if any(departures) and not case.departs:
                problem += [str(departures)]
            yield name, ", ".join(problem)
        except Exception as e:
            import traceback
            yield name, f"{type(e).__name__}: {e} {traceback.format_exc()[-600:] if only else ''}"


def found(group: str, how: str, only: str = "") -> dict[str, str]:
    return {name: what for name, what in differing(group, how, only) if what}


@pytest.mark.parametrize(
    ("group", "how"),
    few(
        [
            ("OUTSIDE", "random tight"), ("OUTPUTS", "fsdp"), ("REENTRANT", "random tight"),
            *product(("OUTSIDE", "OUTPUTS", "REENTRANT"), ("dp", "sdp tight", "joint")),
        ],
        3,
    ),
)
def test_they_train_as_with_ddp(two: Ranks, group, how):
    for each in two.run(found, group, how, timeout_s=240):
        assert each == {}
