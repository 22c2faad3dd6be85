"""Checkpointed forwards: the same gradients, one update of statistics, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdcs
from mdcs.model.recompute import Recomputation, reasons_to_keep, refuse_recomputation
from mdcs.model.units import ModelUnit, UnsupportedModel


class Block(nn.Module):
    """Dropout, running statistics, and an argument by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        hidden = torch.dropout(torch.tanh(self.norm(self.one(x))), 0.5, True)
        result: Tensor = x + self.two(hidden) * scale
        return result


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(kind() for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, scale=torch.full((4,), 2.0))
        return self.head(x)


class Log:
    """Units that compute again, in order; each forward with its recomputation."""

    def __init__(self) -> None:
        self.again: list[tuple[int, int]] = []
        self.forwards = 0

    def __call__(self, unit: int) -> Any:
        self.forwards += 1
        use = unit, self.forwards

        @contextlib.contextmanager
        def recomputing() -> Iterator[None]:
            self.again.append(use)
            yield

        return recomputing


def recomputed(model: nn.Module, selective: bool = False) -> tuple[Log, Recomputation]:
    log, units = Log(), mdcs.partition(model, mdcs.ByClass(("Block",)))
    return log, Recomputation(units, dict.fromkeys(range(2), selective), log)


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("selective", [False, True])
def test_loss_gradients_and_statistics_are_the_same_bit_for_bit(selective: bool) -> None:
    wanted, model = step(Net()), Net()
    log, _ = recomputed(model, selective)
    assert all(map(torch.equal, step(model), wanted))
    assert log.again == [(1, 2), (0, 1)]


def test_a_gradient_of_a_gradient_computes_again_twice() -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(6, 4, requires_grad=True)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + gradient.square().mean()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    wanted, model = penalty(Net()), Net()
    log, _ = recomputed(model)
    assert all(map(torch.equal, penalty(model), wanted))
    assert [unit for unit, _ in log.again] == [1, 0, 1, 0]


def test_what_is_kept_between_forward_and_backward() -> None:
    def saved(selective: bool | None) -> list[tuple[int, ...]]:
        model, shapes = Net(), []
        if selective is not None:
            recomputed(model, selective)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)), lambda _: None):
            model(torch.randn(6, 4))
        return shapes

    assert (6, 8) in saved(None) and (6, 8) not in saved(False)


def test_without_gradients_the_forward_is_the_modules_own() -> None:
    model = Net()
    log, _ = recomputed(model)
    with torch.no_grad():
        model(torch.randn(6, 4))
    assert log.forwards == 0


def test_hooks_of_others_run_once() -> None:
    model, calls = Net(), []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    recomputed(model)
    step(model)
    assert calls == ["before", "after"]


def test_copies_and_pickles_are_plain_models() -> None:
    wanted, model = step(Net()), Net()
    log, recomputation = recomputed(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, step(twin), wanted))
        assert b"mdcs.model.recompute" not in pickle.dumps(twin.blocks[0])
    assert not log.forwards and type(model.blocks[0]) is Block and model.state_dict().keys() == Net().state_dict().keys()
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x", "scale"]
    recomputation.remove()
    assert "forward" not in vars(model.blocks[0])


def test_a_forward_of_the_loops_own_comes_back() -> None:
    model = Net()
    own = model.blocks[0].forward
    model.blocks[0].forward = ours = lambda x, scale: own(x, scale=scale) * 1
    _, recomputation = recomputed(model)
    step(model)
    recomputation.remove()
    assert model.blocks[0].forward is ours


class Counting(Block):
    """Forward depends on how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x * self.runs, scale=scale)


class InPlace(Block):
    """Forward overwrites its input."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(x, scale=scale.mul_(2))


def test_a_forward_that_would_not_repeat_is_refused() -> None:
    model = Net(Counting)
    Recomputation(mdcs.partition(model, mdcs.ByClass(("Counting",))), {0: False}, Log())
    with pytest.raises(UnsupportedModel, match=r"blocks\.0: its forward changes a buffer"):
        step(model)
    model = Net(InPlace)
    Recomputation(mdcs.partition(model, mdcs.ByClass(("InPlace",))), {0: False}, Log())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)


def test_which_units_cannot() -> None:
    model = Net()
    model.blocks[1].two.weight = nn.Parameter(torch.ones(4, 8))
    model.head.weight, model.extra = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(1))
    model.tail = nn.Linear(4, 2)
    model.tail.weight = model.head.weight
    model.blocks[0].one.bias.requires_grad_(False)
    units = mdcs.partition(model, mdcs.ByClass(("Block",)))
    by_name = dict(zip((unit.name for unit in units), reasons_to_keep(model, units), strict=True))
    assert by_name["blocks.0"] == by_name["blocks.1"] == ""
    assert by_name["blocks.0[frozen]"] == "its module is another unit's"
    assert by_name["head+tail"] == "it has several modules" and by_name["model"] == "it is the whole model"
    with pytest.raises(UnsupportedModel, match="head.tail: cannot compute its activations again: it has several modules"):
        refuse_recomputation(model, units, [[unit.name for unit in units].index("head+tail")])


def test_a_unit_around_others_cannot() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    outer, inner = (ModelUnit(name, (model.get_submodule(name),), (), True) for name in ("0", "0.0"))
    assert reasons_to_keep(model, [outer, inner]) == ["other units run inside of it", ""]


class Cache:
    """Keys of earlier tokens, as transformers keeps them."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def get_seq_length(self, layer: int) -> int:
        return sum(len(keys) for keys in self.keys)


class Reader(nn.Module):
    """Appends to what it is given, and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: Any = None) -> Tensor:
        keys = self.linear(x).tanh()
        if seen is None:
            return keys
        held = seen.keys if isinstance(seen, Cache) else seen
        held.append(keys)
        total: Tensor = torch.stack([each.sum() for each in held]).sum() * keys
        return total


def test_an_empty_cache_is_left_out_and_one_that_is_read_is_refused() -> None:
    block, x, cache = Reader(), torch.ones(2, 4), Cache()
    recomputation = Recomputation([ModelUnit("block", (block,), (), True)], {0: False}, Log())
    assert torch.equal(block(x, cache), block(x)) and not cache.keys
    with pytest.raises(UnsupportedModel, match="block"):  # one that was left out before: it would have the first call's keys
        block(x, cache)
    with torch.no_grad():
        block(x, cache)
    with pytest.raises(UnsupportedModel, match="block"):
        block(x, seen=cache)
    with pytest.raises(UnsupportedModel, match="object"):
        block(x, [])
    recomputation.remove()
