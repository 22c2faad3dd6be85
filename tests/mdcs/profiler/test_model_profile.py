"""Measurements of slots and of the gradients that come in them."""

from __future__ import annotations

import pytest
import torch

import mdcs
from experiments.tasks.task import Block, Clock, Waiting
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.runtime import context
from mdcs.telemetry.memory_meter import Reading, ShimMeter
from tests.mdcs.measured import measure_profile

from ..runtime.ranks import Ranks


def test_gradients_come_from_the_last_parameter_of_a_unit_to_its_first() -> None:
    model = Waiting(torch.nn.ModuleList(Block(numel, 4, 0, 0.001, 0.04, Clock(), False) for numel in (400, 40)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = mdcs.partition(model, mdcs.ByClass(("Block",)))
    profile = measure_profile(model, units, lambda: model(torch.ones(1, 2)).sum(), optimizer)
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
    profile = measure_profile(model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer)
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
    """Parts of another type, of another optimizer, and frozen: each is needed while any of them computes."""
    model = torch.nn.Sequential(Mixed(), Mixed())
    *most, last = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.SGD(most, lr=0.1), torch.optim.Adam([last])]
    units = mdcs.partition(model, mdcs.ByClass(("Mixed",)))
    profile = measure_profile(model, units, lambda: model(torch.ones(1, 4)).sum(), optimizers)
    assert [(u.name, u.dtype, u.trainable, u.optimizer) for u in profile.units] == [
        ("0", "float32", True, 0), ("0[float64]", "float64", True, 0), ("0[frozen]", "float32", False, 0),
        ("1", "float32", True, 0), ("1[float64]", "float64", True, 0), ("1[float64, Adam]", "float64", True, 1),
        ("1[frozen]", "float32", False, 0),
    ]  # fmt: skip
    for name in ("0", "1"):
        assert len({(u.forward, u.backward) for u in profile.units if u.modules == name}) == 1


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
        patch.setattr(context, "current_meter", lambda device: meter)
        profile = measure_profile(model, units, step, optimizer, iterations=2)
    first = profile.slots[0].live
    return [(slot.live - first, slot.peak - first) for slot in profile.slots], readings


def by_category_and_by_total() -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int]]:
    by_category, _ = slots_by(ShimMeter())
    return by_category, *slots_by(TotalsOnly())


def test_activations_are_the_same_by_a_meter_that_knows_only_the_total(single: Ranks) -> None:
    """Bytes of gradients are not there before the gradients: they were subtracted from peaks that were over by then."""
    ((by_category, by_total, readings),) = single.run(by_category_and_by_total)
    assert all(peak > live for live, peak in by_total)
    assert sum(by_total, ()) == pytest.approx(sum(by_category, ()), abs=64)  # scalars
    watched, first, second = readings
    assert watched < first == second  # passes that are timed are not read in
