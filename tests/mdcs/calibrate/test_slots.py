"""What is measured of slots and of the gradients that come in them."""

from __future__ import annotations

import torch

import mdcs
from experiments.tasks.stand_in import Shape, Unit, Use
from experiments.tasks.waiting import Waiting


def test_gradients_come_from_the_last_parameter_of_a_unit_to_its_first() -> None:
    uses = tuple(Use(unit, 0.001, 0.04, 0) for unit in (0, 1))
    model = Waiting(Shape((Unit("a", 400), Unit("b", 40)), uses), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = mdcs.partition(model, mdcs.ByClass(("Block",)))
    profile = mdcs.measure_profile(
        model, units, lambda: model(torch.ones(1, 2)).sum(), optimizer, world=2, link=mdcs.Link.uniform(1.0, 50.0), iterations=1
    )
    for unit, elements in zip(profile.units, (100, 10), strict=True):
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
