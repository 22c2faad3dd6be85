"""Models of others, and ways to run them: they train as with DistributedDataParallel, or a sentence says why they do not.

Every group below is a line of docs/dev/loop-behaviours.md, and runs in one call to the ranks.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import mdcs
from mdcs.plan.ledger import min_feasible_budget
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.strategies import RandomMix, Uniform
from mdcs.profile.recompute import CHOICES
from mdcs.profiler.consensus import on_rank_zero
from mdcs.runtime.validation import keeps_order
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import measured, recomputing

WIDTH, STEPS = 6, 4
BLOCKS = mdcs.ByClass(("Block", "Aside", "Remembers", "Named", "Lora", "Nested", "Changes", "Marked", "Sequential"))
LEAVES = mdcs.ByLeaf()
Loss = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, after: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.one, self.two, self.after = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH), after

    def forward(self, x: Tensor) -> Any:
        return self.after(x + self.two(torch.tanh(self.one(x))))


class Stack(nn.Module):
    """Blocks, each a unit, and a head; ``join`` takes a block and its input and gives the next one's."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, join: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)
    ) -> None:
        super().__init__()
        self.blocks, self.join = nn.ModuleList(block() for _ in range(3)), join
        self.head = nn.Linear(WIDTH, 3)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.join(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclass
class Case:
    """A model and its loss; trained in float64 unless not ``double``.

    ``departs``: its steps are not the profiled one. ``broadcast``: ranks have rank 0's buffers.
    """

    model: Callable[[], nn.Module]
    loss: Loss = square
    policy: Any = BLOCKS
    double: bool = True
    departs: bool = False
    broadcast: bool = True

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.model()
        if self.double:
            model.double()
        return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64 if self.double else torch.float32)


# ---- what a forward pass returns, and what is done to it


class Pair(NamedTuple):
    nothing: None
    hidden: Tensor


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Wrapped(nn.Module):
    """Its last unit returns an object."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = Block(), Block(wrap)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))


def of_inner(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).hidden["a"][0].hidden
    return out.square().mean()


class Changing(nn.Sequential):
    """Operations in place behind layers: of modules, and an addition to a view."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0, inplace=True),
            nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x).squeeze(0)
        out += x
        return out.mul_(0.5)


class Aside(Block):
    """Has outputs that the loss does not depend on."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = super().forward(x)
        return y, y.detach(), (2 * y).sum()


class Remembers(Block):
    """The loss depends on what it keeps, too, not on its output alone."""

    def forward(self, x: Tensor) -> Any:
        self.kept = torch.tanh(self.one(x))
        return x + self.two(self.kept)


class Named(Block):
    def forward(self, *, hidden: Tensor, options: Any = None) -> Any:
        return super().forward(hidden)


def returning(after: Callable[[Tensor], Any], back: Callable[[Any], Tensor]) -> Case:
    return Case(lambda: Stack(lambda: Block(after), lambda block, x: back(block(x))))


def in_place(block: nn.Module, x: Tensor) -> Tensor:
    """Changes a block's output through a view of it."""
    view: Tensor = block(x).unsqueeze(0)
    view += 1.5
    return view.squeeze(0).tanh_()


def frozen_and_changed() -> nn.Module:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), frozen, nn.SiLU(inplace=True), nn.Linear(WIDTH, WIDTH))


def of_an_object(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).hidden.square().mean()


def of_what_is_kept(model: Any, x: Tensor) -> Tensor:
    return square(model, x) + sum(block.kept.square().mean() for block in model.blocks)


OUTPUTS = {
    "a tuple with None": returning(lambda y: (None, y), lambda out: out[1]),
    "a named tuple": returning(lambda y: Pair(None, y), lambda out: out.hidden),
    "an object, of the last unit": Case(lambda: Wrapped(Holder), of_an_object),
    "slots, of the last unit": Case(lambda: Wrapped(Slotted), of_an_object),
    "objects in objects, of the last unit": Case(lambda: Wrapped(lambda y: Holder({"a": [Holder(y)]})), of_inner),  # type: ignore[arg-type]
    "in place behind leaves": Case(lambda: Stack(Changing), policy=LEAVES),
    "outputs without use": Case(lambda: Stack(Aside, lambda block, x: block(x)[0])),
    "inputs by keyword": Case(lambda: Stack(Named, lambda block, x: block(hidden=x, options={}))),
    "changed in place": Case(lambda: Stack(join=in_place)),
    "changed in place, leaves": Case(lambda: Stack(join=in_place), policy=LEAVES),
    "kept for the loss": Case(lambda: Stack(Remembers), of_what_is_kept),
    "a closure, of the last unit": Case(lambda: Wrapped(lambda y: lambda: y), lambda model, x: model(x)().square().mean()),
    "a view": returning(lambda y: y.view(-1), lambda out: out.view(4, WIDTH)),
    "in place behind a frozen layer": Case(frozen_and_changed, policy=LEAVES),
}

# ---- how a loss is made


def siamese(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - model(x.flip(0))).square().mean() + model(x).mean()


def of_parts(model: Any, x: Tensor) -> Tensor:
    """The loop calls the model's parts, and not the model."""
    hidden: Tensor = model.body(x)
    return model.head(hidden).square().mean() + model.head(hidden.detach()).mean()


def functional(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    return out.square().mean()


def of_inputs(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x.clone().requires_grad_())


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    return out.float().square().mean()


def offloaded(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return square(model, x)


def watched(model: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            return square(model, x)


def uneven(model: nn.Module, x: Tensor) -> Tensor:
    """Rank 1 has no samples, rank 0 a few."""
    return model(x[: 3 - 3 * dist.get_rank()]).sum()


def seeded(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(int(x.abs().sum().item() * 1000))
    return square(model, x)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return square(model, x)
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + gradient.square().mean()


def labelled(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = model(-x)
    return (model(x) - wanted).square().mean()


LOSSES = {
    "with a gradient penalty": Case(Stack, penalty, departs=True),
    "of labels by the model itself": Case(Stack, labelled, departs=True),
    "of several forward passes": Case(Stack, siamese),
    "of the model's parts": Case(Stack, of_parts),
    "by functional_call": Case(Stack, functional),
    "with gradients of inputs": Case(Stack, of_inputs),
    "in autocast": Case(Stack, autocast, double=False),
    "with save_on_cpu": Case(Stack, offloaded),
    "with anomaly detection": Case(Stack, watched),
    "of an empty batch": Case(Stack, uneven),
    "with dropout": Case(lambda: Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))), seeded),
}

# ---- hooks of others


def hooked(what: str) -> Case:
    def build() -> nn.Module:
        model = Stack()
        for block in model.blocks:
            if what == "pre":
                block.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
            elif what == "pre with keywords":
                block.register_forward_pre_hook(lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True)
            elif what == "post":
                block.register_forward_hook(lambda m, a, out: out * 2, always_call=True)
            elif what == "reading weights":
                block.register_forward_pre_hook(lambda m, a: (a[0] + m.one.weight.norm(),))
                block.register_forward_hook(lambda m, a, out: out + m.two.weight.norm())
            elif what == "backward":
                block.register_full_backward_hook(lambda m, into, out: tuple(g if g is None else 2 * g for g in into))
            elif what == "before backward":
                block.register_full_backward_pre_hook(lambda m, out: tuple(2 * g for g in out))
            elif what == "on outputs":
                block.register_forward_hook(_double_gradient)
            elif what == "on parameters":
                for p in block.parameters():
                    p.register_hook(lambda g: 2 * g)
        return model

    return Case(build)


def _double_gradient(module: nn.Module, args: Any, out: Tensor) -> None:
    if out.requires_grad:
        out.register_hook(lambda g: 2 * g)


HOOKS = {
    what: hooked(what)
    for what in (
        "pre", "pre with keywords", "post", "reading weights", "backward", "before backward", "on outputs", "on parameters",
    )
}  # fmt: skip

# ---- checkpointing


class Checkpointed(Stack):
    """Part of a block, each block, or all blocks at once; with dropout, whose random numbers come again."""

    def __init__(self, what: str) -> None:
        def of_part() -> nn.Module:
            block = Block()
            block.two = nn.Sequential(block.two, nn.Dropout(0.3))
            forward = block.forward
            block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
            return block

        each = what == "each block"
        super().__init__(
            of_part if what == "parts of blocks" else Block,
            lambda block, x: checkpoint(block, x, use_reentrant=False) if each else block(x),
        )
        self.at_once = what == "several blocks at once"

    def body(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().body, x, use_reentrant=False) if self.at_once else super().body(x)
        return out


class Reentrant(Stack):
    """Blocks whose forward is checkpointed from within, as transformers does it: hooks are around that."""

    def __init__(self) -> None:
        def block() -> nn.Module:
            made = Block()
            forward = made.forward
            made.forward = lambda x: checkpoint(forward, x, use_reentrant=True)  # type: ignore[method-assign]
            return made

        super().__init__(block)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x.clone().requires_grad_())  # else there are no gradients


class LossInside(Stack):
    """The loss, too, is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        forward = super().forward
        out: Tensor = checkpoint(lambda x: forward(x).square().mean(), x, use_reentrant=False)
        return out


CHECKPOINTS = {
    what: Case(lambda what=what: Checkpointed(what), seeded)
    for what in ("each block", "parts of blocks", "several blocks at once")
} | {
    "reentrant": Case(Reentrant),
    "the loss, too": Case(LossInside, lambda model, x: model(x)),
    "leaves": Case(lambda: Checkpointed("several blocks at once"), policy=LEAVES),
}

# ---- models


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


class LoraInPlace(Lora):
    """The output of a layer of a 3-D input is a view: changed in place, it loses its hooks."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x.view(2, 2, WIDTH))
        result += self.up(self.down(x)).view(2, 2, WIDTH)
        return torch.tanh(result).view(4, WIDTH)


class Queries(nn.Module):
    def __init__(self, keeps: bool, once: bool) -> None:
        super().__init__()
        self.weight, self.keeps, self.once = nn.Parameter(torch.randn(8, WIDTH)), keeps, once

    def forward(self) -> Tensor:
        if self.keeps:
            self.kept = self.weight.detach()[:4]
        return self.weight[:4]


class Queried(Stack):
    """Its first unit returns a view of its parameter, which the model uses after other units have run."""

    made_once: Any = None

    def __init__(self, keeps: bool = False, once: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.queries = Queries(keeps, once).requires_grad_(not frozen)

    def body(self, x: Tensor) -> Tensor:
        queries = self.queries()
        if self.queries.once:
            # A closure, as an attribute would be seen anyway.
            self.made_once = self.made_once or [queries.detach()]
            queries = queries + self.made_once[0]
        return super().body(x) * queries


class Backbone(Stack):
    """Its blocks are frozen, and run without gradients, as in fine-tuning."""

    def __init__(self, without: Callable[[], Any] = torch.no_grad) -> None:
        super().__init__()
        self.without = without
        self.blocks.requires_grad_(False)
        self.tail = Block()

    def body(self, x: Tensor) -> Tensor:
        with self.without():
            x = super().body(x)
        tail: Tensor = self.tail(x.clone())
        return tail


class Loose(Stack):
    """Parameters in lists and dictionaries, of no dimension, transposed, and of a class of their own with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(3)), "scale": nn.Parameter(torch.tensor(2.0))})
        self.turned = nn.Parameter(torch.randn(3, WIDTH).t())
        self.head.weight = Special(self.head.weight.detach().clone())
        self.head.weight.no_decay = True

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.head.weight, Special) and self.head.weight.no_decay
        hidden = self.body(x) * self.scales[0] + self.scales[1] * self.scales[2]
        return self.head(hidden) * self.named["scale"] + self.named["bias"] + x @ self.turned


class Special(nn.Parameter):
    no_decay = False


class Recurrent(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        hidden, (last, _) = self.lstm(x.unsqueeze(0))
        return super().body(hidden.squeeze(0)) + last.sum()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(torch.relu(self.stem(x.view(1, 1, 4, WIDTH).to(memory_format=torch.channels_last))))
        return out


class Nested(nn.Module):
    """A unit with parameters of its own around another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.outer = nn.Parameter(torch.ones(WIDTH)), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x) * self.scale)
        return out


class Marked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.nothing = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.nothing.sum()


class WithEmpty(Stack):
    """Parameters without elements: beside others, in a module of their own, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__(Marked)
        self.lone = nn.Linear(0, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.lone(x[:, :0]))


class Grows(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return super().forward(x) + self.seen.mean()


def normed(norm: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the older way, which is deprecated
            for module in [model.head, *(block.one for block in model.blocks)]:
                norm(module)
        return model

    return build


def encoder() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0) for _ in range(2)]
    return nn.Sequential(nn.Unflatten(0, (1, 4)), *layers)


MODELS = {
    "weight_norm": Case(normed(parametrizations.weight_norm)),
    "weight_norm, leaves": Case(normed(parametrizations.weight_norm), policy=LEAVES),
    "weight_norm of old": Case(normed(nn.utils.weight_norm), policy=LEAVES),
    "spectral_norm": Case(normed(parametrizations.spectral_norm)),
    "spectral_norm of old": Case(normed(nn.utils.spectral_norm), policy=LEAVES),
    "parameters without elements": Case(WithEmpty),
    "parameters without elements, leaves": Case(WithEmpty, policy=LEAVES),
    "adapters": Case(lambda: Stack(Lora)),
    "adapters added in place": Case(lambda: Stack(LoraInPlace), policy=LEAVES),
    "a view of a parameter": Case(Queried, policy=LEAVES),
    "a view of a frozen parameter": Case(lambda: Queried(frozen=True), policy=LEAVES),
    "a frozen backbone": Case(Backbone),
    "a frozen backbone in inference_mode": Case(lambda: Backbone(torch.inference_mode), policy=LEAVES),
    "loose parameters": Case(Loose),
    "an LSTM": Case(Recurrent),
    "attention": Case(encoder, policy=mdcs.ByClass(("TransformerEncoderLayer",))),
    "channels_last": Case(Images, policy=LEAVES),
    "units in units": Case(lambda: Stack(Nested)),
    "a buffer that grows": Case(Grows, broadcast=False),
}


def plan_of(case: Case, model: nn.Module, units: list[mdcs.ModelUnit], optimizer: Any, how: str) -> mdcs.Plan:
    """``how``: a strategy, "tight" for the smallest budget that its plan keeps, and what units compute again, or "mixed"."""
    profile = measured(model, units, lambda: case.loss(model, case.batch(0)), optimizer, world=2)
    job, rng, (strategy, *more) = mdcs.Job(profile), random.Random(3), how.split()
    for again in {*more} - {"tight"}:
        job = recomputing(job, model, units, [again if again != "mixed" else rng.choice(CHOICES) for _ in units])
    mixed = RandomMix(seed=3) if strategy == "random" else Uniform(strategy)
    plan = on_rank_zero(lambda: mdcs.make_plan(job, mixed, SCHEDULERS["priority"](block_mib=1e-4)))
    return replace(plan, budget=min_feasible_budget(plan)) if "tight" in more else plan


Trained = tuple[list[float], dict[str, Tensor]]


def trained_with_ddp(case: Case) -> Trained:
    """Losses and state with DDP's averages, without its wrapper, for it knows no call but forward."""
    model, optimizer = case.build()
    group, losses = dist.new_group(), []
    for step in range(STEPS):
        loss = case.loss(model, case.batch(step))
        loss.backward()
        losses.append(loss.item())
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad.div_(2), group=group)
        optimizer.step()
        optimizer.zero_grad()
        for buffer in model.buffers() if case.broadcast else ():
            dist.broadcast(buffer, 0, group=group)
    return losses, model.state_dict()


def trained(case: Case, how: str) -> tuple[Trained, list[Any]]:
    """With a plan, and steps that departed from it."""
    model, optimizer = case.build()
    units, losses = mdcs.partition(model, case.policy), []
    plan = plan_of(case, model, units, optimizer, how)
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=15, broadcast_buffers=case.broadcast) as parallel:
        for step in range(STEPS):
            loss = case.loss(model, case.batch(step))
            loss.backward()
            losses.append(loss.item())
            parallel.step()
            if case.broadcast and (step == 1 or not case.departs):  # else an evaluation changes buffers
                model.eval()
                with parallel.evaluate(), torch.no_grad():
                    case.loss(model, case.batch(step))
                model.train()
        return (losses, parallel.state_dict()), [r.departures for r in parallel.records(flush=True) if r.departures]


def as_with_ddp(module: str, group: str, how: str) -> dict[str, str]:
    """By case of a module's group: what differs, or the error that it comes to."""
    found = {}
    for name, case in getattr(import_module(module), group).items():
        try:
            ((losses, state), departures), (theirs, wanted) = trained(case, how), trained_with_ddp(case)
            wrong = [n for n in wanted if not torch.allclose(state[n], wanted[n], rtol=1e-9, atol=1e-9)]
            wrong += [] if losses == pytest.approx(theirs, rel=1e-9) else [f"losses {losses} {theirs}"]
            wrong += [] if case.departs else map(str, departures)
            found[name] = ", ".join(wrong)
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    return found


@pytest.mark.parametrize("group", few(["HOOKS", "OUTPUTS", "LOSSES", "CHECKPOINTS", "MODELS"]))
@pytest.mark.parametrize("how", ["fsdp", pytest.param("random", marks=pytest.mark.slow)])
def test_models_of_others_train_as_with_ddp(two: Ranks, group, how):
    for found in two.run(as_with_ddp, __name__, group, how, timeout_s=120):
        assert found == dict.fromkeys(globals()[group], "")


# ---- refused when profiled, or when partitioned


class Changes(Block):
    """Changes a weight in its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Any:
        if self.how == "clamping":
            with torch.no_grad():
                self.one.weight.clamp_(-0.1, 0.1)
        elif self.how == "data":
            self.one.weight.data = self.one.weight.data / 2
        elif self.how == "max_norm":
            x = x + self.words(torch.arange(4))
        return super().forward(x) + self.words.weight.mean()


class Keeps(Block):
    """Keeps a view of its weight, which a loop of its own would see change."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"first": self.one.weight.detach()[0]}

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.kept["first"])


def of_function(transform: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Loss:
    return lambda model, x: square(model, x) + transform(lambda x: model(x).sum(), x).square().mean()


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x).square().mean()


TRANSFORMS = {
    "grad": of_function(lambda function, x: torch.func.grad(function)(x)),
    "jvp": of_function(lambda function, x: torch.func.jvp(function, (x,), (x,))[1]),
    "vmap": mapped,
}

REFUSED = {
    **{
        f"torch.func.{name}": (Case(Stack, loss), r"blocks.0: its forward runs inside of torch.func \([a-z, ]+\).* plain copy")
        for name, loss in TRANSFORMS.items()
    },
    "a view that forward keeps": (
        Case(lambda: Queried(keeps=True), policy=LEAVES), "queries: a tensor that shares the memory of its parameters is kept",
    ),
    "a view made once": (
        Case(lambda: Queried(once=True), policy=LEAVES), "queries: a tensor that shares the memory of its parameters is kept",
    ),
    "max_norm": (Case(lambda: Stack(lambda: Changes("max_norm"))), "blocks.0.words.weight: is changed by forward"),
    "clamping": (Case(lambda: Stack(lambda: Changes("clamping"))), "blocks.0.one.weight: is changed by forward"),
    "data": (Case(lambda: Stack(lambda: Changes("data"))), "blocks.0.one.weight: is changed by forward"),
    "a view that is kept": (
        Case(lambda: Stack(Keeps), double=False, policy=LEAVES),
        "blocks.0.kept: shares memory with the parameter blocks.0.one.weight, which has other memory while a plan runs",
    ),
}


def test_batch_norm_that_sends_itself_is_refused_where_messages_have_no_group_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    keeps_order(model, "gloo")
    with pytest.raises(mdcs.UnsupportedModel, match="1: SyncBatchNorm's collectives would come between the messages"):
        keeps_order(model, "nccl")


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_trained_say_so_when_they_are_profiled(tmp_path, name):
    case, message = REFUSED[name]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, optimizer = case.build()
        with pytest.raises((mdcs.UnsupportedModel, mdcs.RunError), match=message):
            plan_of(case, model, mdcs.partition(model, case.policy), optimizer, "fsdp")
    finally:
        dist.destroy_process_group()
