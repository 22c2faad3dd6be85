"""Measurements of slots and of the gradients that come in them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mdcs
from experiments.tasks.waiting import Block, Clock, Waiting
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.profiler import model_profile
from mdcs.profiler.model_profile import measure_profile
from mdcs.profiler.model_snapshot import preserve_model
from mdcs.telemetry.memory_meter import Meter, Reading, ShimMeter

from ..runtime.ranks import Ranks


def test_gradients_come_from_the_last_parameter_of_a_unit_to_its_first() -> None:
    model = Waiting(torch.nn.ModuleList(Block(numel, 4, 0, 0.001, 0.04, Clock(), False) for numel in (400, 40)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = mdcs.partition(model, mdcs.ByClass(("Block",)))
    profile = mdcs.measure_profile(
        model, units, lambda: model(torch.ones(1, 2)).sum(), optimizer, world=2, link=mdcs.Link.uniform(1.0, 50.0), iterations=1
    )
    for unit, elements in zip(profile.units, (104, 16), strict=True):  # 100 and 10, padded to 16 bytes
        assert [n for n, _ in unit.gradients] == [elements] * 4
        parts = [part for _, part in unit.gradients]
        assert parts == sorted(parts, reverse=True) and len(set(parts)) == 4
        assert parts[3] > 0 and parts[0] <= 1


class Outer(torch.nn.Module):
    """A unit around another one: its gradients come before and in the other's backward slot."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x @ self.before) @ self.after
        return out


def test_what_has_come_in_an_earlier_slot_is_there_when_the_last_begins() -> None:
    model = torch.nn.Sequential(Outer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = mdcs.partition(model, mdcs.ByClass(("Outer", "Linear")))
    profile = mdcs.measure_profile(
        model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer, world=2, link=mdcs.Link.uniform(1.0, 50.0), iterations=1
    )
    outer = next(unit for unit in profile.units if unit.numel == 32)
    assert outer.backward == (0, 1)
    (_, before), (_, after) = outer.gradients
    assert after == 0 < before


class Mixed(torch.nn.Module):
    """A linear layer in float32 whose bias is frozen, and a norm in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, dtype=torch.float64)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x).double()).float()
        return out


def test_units_around_one_module_are_in_use_together() -> None:
    """Of another type, of another optimizer, and frozen: each is needed while any of them computes."""
    model = torch.nn.Sequential(Mixed(), Mixed())
    *most, last = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.SGD(most, lr=0.1), torch.optim.Adam([last])]
    profile = mdcs.measure_profile(
        model, mdcs.partition(model, mdcs.ByClass(("Mixed",))), lambda: model(torch.ones(1, 4)).sum(), optimizers,
        world=2, link=mdcs.Link.uniform(1.0, 50.0), iterations=1,
    )  # fmt: skip
    assert [(u.name, u.dtype, u.trainable, u.optimizer) for u in profile.units] == [
        ("0", "float32", True, 0), ("0[float64]", "float64", True, 0), ("0[frozen]", "float32", False, 0),
        ("1", "float32", True, 0), ("1[float64]", "float64", True, 0), ("1[float64, Adam]", "float64", True, 1),
        ("1[frozen]", "float32", False, 0),
    ]  # fmt: skip
    for name in ("0", "1"):
        assert len({(u.forward, u.backward) for u in profile.units if u.modules == name}) == 1


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


class TotalsOnly(ShimMeter):
    """A meter as CUDA's: one number, which takes its time."""

    disturbs = True

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0

    def live(self) -> Reading:  # type: ignore[override]
        return self._total(super().live())

    def window(self) -> Reading:  # type: ignore[override]
        return self._total(super().window())

    def _total(self, reading: dict[str, int]) -> Reading:
        self.readings += 1
        return dict.fromkeys(CATEGORIES, None) | {"total": reading["total"]}


def slots_by(meter: ShimMeter) -> tuple[list[tuple[int, int]], list[int]]:
    """Live and peak bytes of slots beyond those at first, and how many readings there had been when each pass began."""
    torch.manual_seed(0)
    # Wide at first: the peak of the backward slot is over before the first layer's gradients come.
    model = torch.nn.Sequential(torch.nn.Linear(8, 500), torch.nn.ReLU(), torch.nn.Linear(500, 700), torch.nn.Linear(700, 3))
    units = mdcs.partition(model, mdcs.ByClass(("Sequential",)))
    optimizer, readings = torch.optim.SGD(model.parameters(), lr=0.1), []

    def step() -> torch.Tensor:
        readings.append(getattr(meter, "readings", 0))
        return model(torch.ones(64, 8)).square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_profile, "current_meter", lambda device: meter)
        link = mdcs.Link.uniform(1.0, 50.0)
        profile = mdcs.measure_profile(model, units, step, optimizer, world=2, link=link, iterations=2)
    first = profile.slots[0].live
    return [(slot.live - first, slot.peak - first) for slot in profile.slots], readings


def by_category_and_by_total() -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int]]:
    by_category, _ = slots_by(ShimMeter())
    return by_category, *slots_by(TotalsOnly())


def test_activations_are_the_same_by_a_meter_that_knows_only_the_total(single: Ranks) -> None:
    """Bytes of gradients are not there before the gradients: they were subtracted from peaks that were over by then."""
    ((by_category, by_total, readings),) = single.run(by_category_and_by_total)
    assert by_total == by_category and all(peak > live for live, peak in by_total)
    warm_up, memory, first, second, *_ = readings
    assert warm_up == memory < first == second  # passes that are timed are not read in


def bytes_with_and_without_state(meter: str) -> list[list[tuple[int, int]]]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_profile, "current_meter", lambda device: {"by category": ShimMeter, "by total": TotalsOnly}[meter]())
        for trained in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 500), torch.nn.ReLU(), torch.nn.Linear(500, 3))
            units, optimizer = mdcs.partition(model, mdcs.ByLeaf()), torch.optim.Adam(model.parameters())
            batch = torch.ones(64, 8)
            if trained:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            link = mdcs.Link.uniform(1.0, 50.0)
            profile = mdcs.measure_profile(
                model, units, lambda: model(batch).square().mean(), optimizer, world=2, link=link, iterations=2  # noqa: B023
            )
            found.append([(slot.live, slot.peak) for slot in profile.slots])
    return found


@pytest.mark.parametrize("meter", ["by category", "by total"])
def test_the_optimizers_state_of_a_run_that_goes_on_is_no_activations(single: Ranks, meter: str) -> None:
    ((fresh, resumed),) = single.run(bytes_with_and_without_state, meter)
    assert resumed == fresh


def test_all_ranks_run_as_many_steps() -> None:
    """A forward may have collectives: no rank stops before the others have measured enough."""
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [0]

    def step() -> Tensor:
        calls[0] += 1
        return model(torch.ones(2, 4)).sum()

    def steps(**options: Any) -> int:
        calls[0] = 0
        measure_profile(
            model, mdcs.partition(model), step, torch.optim.SGD(model.parameters(), lr=0.1), world=2,
            link=mdcs.Link.uniform(1.0, 50.0), iterations=3, seconds=1e-9, **options,
        )  # fmt: skip
        return calls[0]

    assert (steps(), steps(agree=lambda is_enough: False)) == (3, 5)
