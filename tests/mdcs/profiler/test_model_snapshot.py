"""Buffers after steps that were only measured: made ones are gone, others are as they were, whatever their layout."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mdcs.profiler.model_snapshot import ModuleSnapshot, preserve_model
from mdcs.telemetry.memory_meter import Meter


class Cached(nn.Module):
    """Makes a buffer in its first forward, replaces another when the input is longer, and notes both in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(2.0))
        self.register_buffer("later", None)
        self.length, self.calls = 2, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if len(x) > self.length:
            self.register_buffer("table", torch.arange(float(len(x))), persistent=False)
            self.length = len(x)
        if self.later is None:
            self.later = x.sum()
        if not hasattr(self, "mask"):
            self.register_buffer("mask", x.clone(), persistent=False)
        return x * self.table[: len(x)] * self.mask[: len(x)] + self.later


def test_a_module_that_made_buffers_is_as_it_was() -> None:
    model = nn.Sequential(Cached())
    table = model[0].table
    before = ModuleSnapshot(model)
    model(torch.ones(3))
    assert {name for name, _ in model.named_buffers()} == {"0.table", "0.later", "0.mask"}
    before.restore()
    assert [name for name, _ in model.named_buffers()] == ["0.table"]
    assert model[0].table is table and model[0].later is None and not hasattr(model[0], "mask")
    assert (model[0].length, model[0].calls) == (2, 0)
    assert list(model.state_dict()) == ["0.table"]
    assert torch.equal(model(torch.full((2,), 3.0)), torch.tensor([6.0, 15.0]))  # made anew, of this input


class Counts(nn.Module):
    """Changes buffers in place, through .data, and by putting another tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(2))
        self.register_buffer("data", torch.zeros(2))
        self.register_buffer("other", torch.zeros(2))
        self.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
        self.seen = 0
        self.note = SimpleNamespace(seen=0, sums=[])

    def forward(self, x: Tensor) -> Tensor:
        self.places.add_(x)
        self.data.data = torch.ones(3)
        self.other = self.other + x
        self.seen += 1
        self.note.seen += 1
        self.note.sums.append(self.seen)
        return x


def test_values_come_back_however_they_were_changed() -> None:
    model = Counts()
    buffers = dict(model.named_buffers())
    before = ModuleSnapshot(model)
    for _ in range(2):
        model(torch.ones(2))
    before.restore()
    assert {name: b is buffers[name] for name, b in model.named_buffers()} == dict.fromkeys(buffers, True)
    assert all(not buffers[name].any() and buffers[name].shape == (2,) for name in ("places", "data", "other"))
    assert torch.equal(model.mask, torch.ones(4, 3)) and model.mask.stride() == (0, 1)
    assert (model.seen, model.note.seen, model.note.sums) == (0, 0, [])


class OnCuda(torch.nn.Module):
    """Says that it is on a GPU, and has nothing there."""

    def parameters(self, recurse: bool = True):  # type: ignore[no-untyped-def]
        yield SimpleNamespace(device=torch.device("cuda", 1))


def test_every_random_state_that_a_forward_may_draw_from_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on a GPU draws from the device's generator; layers are dropped by Python's or numpy's."""
    on_device = {torch.device("cuda", 1): torch.tensor([1, 2, 3])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: on_device[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: on_device.__setitem__(device, state))

    def draw() -> tuple[float, ...]:
        (numbers,) = on_device.values()
        numbers += 1
        return float(numbers[0]), torch.rand(()).item(), random.random(), float(np.random.rand())

    with preserve_model(OnCuda(), Meter()):
        drawn = draw()
    assert draw() == drawn
