"""Costs of copies and updates on a device that is behind its host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mdcs.model.optimizers import Optimizers, Updates
from mdcs.profiler.model_profile import copy_seconds_per_byte, optimizer_costs, timer
from mdcs.telemetry.memory_meter import Meter
from tests.mdcs.profiler.gpu import CUDA, Gpu

LIKE: Any = SimpleNamespace(device=CUDA, dtype=torch.float32, element_size=lambda: 4)
"""A tensor on the GPU, as far as anybody looks."""
RATE = 1e12  # bytes per second
KERNEL = 2e-6  # seconds of a kernel for a few bytes


def kernel(name: str, size: int) -> float:
    return KERNEL + size / RATE


def test_a_copy_costs_what_the_device_takes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy alone would be timed with its launch and with the wait for its end, 15 us for 4 us of copying."""
    gpu = Gpu(kernel)
    gpu.take_the_place_of_cuda(monkeypatch)
    with gpu:
        found = copy_seconds_per_byte(LIKE, timer(CUDA))
    assert found == pytest.approx(1 / RATE, rel=0.02, abs=0)


def test_an_update_costs_what_the_device_takes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of few elements costs its kernels, though the host takes longer to launch them."""
    gpu = Gpu(kernel)
    gpu.take_the_place_of_cuda(monkeypatch)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.empty(1))], lr=0.1)
    with gpu:
        found = optimizer_costs(Updates(Optimizers(optimizer)).parts[0], LIKE, Meter(), timer(CUDA))
    assert found.seconds_per_run == pytest.approx(KERNEL, rel=0.02, abs=0)
    assert found.seconds_per_element == pytest.approx(4 / RATE, rel=0.02, abs=0)
