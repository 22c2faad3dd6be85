"""Modules used otherwise than through their own forward, and reentrant checkpoints around units: they train as with DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.mdcs.profiles import few
from tests.mdcs.runtime import test_loops_models
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops_models import LEAVES, WIDTH, Loss, as_with_ddp

Case = partial(test_loops_models.Case, policy=None)  # units are chosen


class Block(nn.Module):
    """The gradients of its norm come last of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.two(torch.tanh(self.one(self.norm(x))))
        return out


class Stack(test_loops_models.Stack):
    def __init__(self) -> None:
        super().__init__(Block)


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
    "attention, leaves": Case(test_loops_models.encoder, policy=LEAVES),
    "in some steps": Case(Sometimes, departs=True),
    "outputs that are parameters": Case(Borrows, lambda model, x: torch.mul(*model(x)).square().mean()),
    "outputs that are parameters, leaves": Case(Borrows, lambda model, x: torch.mul(*model(x)).square().mean(), policy=LEAVES),
}

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
    batches = Case(Stack).batch

    def loss(model: Reentrant, x: Tensor) -> Tensor:
        model.what = next(each for i, each in enumerate(what) if torch.equal(x, batches(i)))
        return model(x).square().mean()

    return loss


def the_loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def frozen(model: Stack) -> None:
    model.blocks[1].requires_grad_(False)


REENTRANT = {
    **{
        f"{what}{', leaves' if policy else ''}": Case(partial(Reentrant, what), *[the_loss] * ("loss" in what), policy=policy)
        for what in ("each", "all", "nested", "twice", "used outside", "loss", "tied loss")
        for policy in (None, LEAVES)
    },
    "each, one frozen": Case(partial(Reentrant, "each", frozen)),
    "all, one frozen": Case(partial(Reentrant, "all", frozen)),
    "called by the loop": Case(Stack, parts_again),
    **{
        " ".join(what): Case(partial(Reentrant, ""), changing(*what), policy=policy, departs=True)
        for what, policy in (
            (("plain", "each", "all", "nested"), None), (("plain", "used before", "plain", "each"), None),
            (("plain", "all", "nested", "plain"), LEAVES), (("nested", "all", "each", "plain"), None),
        )
    },
}


@pytest.mark.parametrize(("how", "group"), few([("random tight", "OUTSIDE"), ("sdp tight", "REENTRANT")]))
def test_they_train_as_with_ddp(two: Ranks, group, how):
    for found in two.run(as_with_ddp, __name__, group, how, timeout_s=240):
        assert found == dict.fromkeys(globals()[group], "")
