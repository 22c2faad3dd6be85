"""Models that keep something from pass to pass, or have another's memory, start in the loop and train as with DDP."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from tests.mdcs.runtime.ranks import Ranks

STEPS = 20
WIDTH = 8


class Keeping(nn.Module):
    """One of the things that a forward pass reads, and changes for the next one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(WIDTH, WIDTH)
        self.calls, self.state, self.generator = 0, torch.zeros(WIDTH), torch.Generator().manual_seed(5)
        self.dice, self.memory = (random.Random(5), np.random.default_rng(5)), [torch.zeros(WIDTH)]
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counter":
            self.calls += 1
            return self.inner(x) / self.calls**0.5
        if self.kind == "state":  # in place, and in a list
            y = self.inner(x + self.state + self.memory[-1])
            self.state.add_(y.detach().mean(0))
            self.memory.append(y.detach().mean(0))
            return y
        if self.kind == "generators":
            noise = torch.rand(x.shape, generator=self.generator)
            return self.inner(x + noise) * self.dice[0].random() + float(self.dice[1].random())
        if self.kind == "buffer":  # as a codebook: of this rank's batch
            y = self.inner(x - self.mean)
            self.mean.lerp_(y.detach().mean(0), 0.1)
            return y
        y = self.inner(x) - self.mean
        return y + self.zero.requires_grad_(self.training)


class Direct(nn.Module):
    """Calls of ``forward``, which no hook of a layer sees, in the order in which they are registered or in another."""

    def __init__(self, is_reversed: bool) -> None:
        super().__init__()
        self.layers, self.is_reversed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), is_reversed

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if self.is_reversed else self.layers:
            x = layer.forward(x)
        return x


def loop(kind: str, ours: bool, broadcasts: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping(kind), nn.Linear(WIDTH, 4))
    if kind.startswith("direct"):
        model = Direct(kind == "direct, reversed")
    inner, optimizer, parallel = model, torch.optim.SGD(model.parameters(), lr=0.001), None
    if ours:
        parallel = mdcs.parallelize(
            model, optimizer, broadcast_buffers=broadcasts, profiles=False, seconds=0.5, progress=False, timeout_s=30
        )
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group(), broadcast_buffers=broadcasts)
    losses = []
    for step in range(8 if kind == "state" else STEPS):  # what it keeps makes it diverge
        x = torch.rand(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if parallel is not None:
        parallel.close()
    return losses, {name: p.detach().clone() for name, p in inner.named_parameters()}


def both(kind: str, broadcasts: bool) -> list[str]:
    """Names of values that differ from DDP's."""
    warnings.simplefilter("ignore")
    wanted, found = loop(kind, False, broadcasts), loop(kind, True, broadcasts)
    changed = [] if wanted[0] == found[0] else [f"losses {found[0]} {wanted[0]}"]
    return changed + [name for name, value in wanted[1].items() if not torch.equal(value, found[1][name])]


@pytest.mark.parametrize(
    ("kind", "broadcasts"),
    [
        ("counter", True), ("state", True), ("generators", True), ("buffer", True), ("buffer", False),
        ("gradient of a buffer", True), ("direct", False), ("direct, reversed", False),
    ],
)  # fmt: skip
def test_what_a_module_keeps_is_ddps_in_every_step(two: Ranks, kind: str, broadcasts: bool) -> None:
    assert two.run(both, kind, broadcasts, timeout_s=100.0) == [[], []]


def of_other_memory(kind: str, folder: str) -> list[float]:
    """Losses of a model with memory that is not of torch's allocator."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    if kind == "numpy":
        for p in model.parameters():
            p.data = torch.from_numpy(p.detach().numpy().copy())
    elif kind == "mapped":
        path = f"{folder}/{dist.get_rank()}.pt"
        torch.save(model.state_dict(), path)
        model.load_state_dict(torch.load(path, mmap=True), assign=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    warnings.simplefilter("ignore")
    with mdcs.parallelize(model, optimizer, profiles=False, seconds=0.5, progress=False, timeout_s=30) as parallel:
        for step in range(3):
            loss = model(torch.ones(2, WIDTH) * (step + dist.get_rank())).square().mean()
            loss.backward()
            parallel.step()
            losses.append(loss.item())
        assert parallel.memory()["measured"]["parameters"] > 0
    return losses


@pytest.mark.parametrize("kind", ["numpy", "mapped"])
def test_weights_of_a_mapped_file_or_an_array_are_trained(two: Ranks, tmp_path: Path, kind: str) -> None:
    assert two.run(of_other_memory, kind, str(tmp_path)) == two.run(of_other_memory, "torch", "")


def evaluated_nested() -> tuple[int, ...]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    optimizer, mask = torch.optim.Adam(model.parameters()), torch.tensor([[False] * 3 + [True]] * 2)
    warnings.simplefilter("ignore")
    with mdcs.parallelize(model, optimizer, profiles=False, seconds=0.5, progress=False, timeout_s=30) as parallel:
        for _ in range(2):
            model(torch.ones(2, 4, WIDTH), src_key_padding_mask=mask).square().mean().backward()
            optimizer.step()
        model.eval()
        with parallel.evaluate():
            return tuple(model(torch.ones(2, 4, WIDTH), src_key_padding_mask=mask).shape)


def test_nested_tensors_between_layers_are_no_obstacle(two: Ranks) -> None:
    assert two.run(evaluated_nested, timeout_s=100.0) == [(2, 4, WIDTH)] * 2
