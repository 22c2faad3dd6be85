"""Where the memory of parameters is used, whatever tensor it is through; inputs that several units share, and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdcs
from mdcs.profiler.measurement import used_outside
from mdcs.profiler.step_tensors import UnitTensors
from tests.mdcs.measured import measure_profile


class Table(nn.Module):
    def __init__(self, view: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.view = nn.Parameter(torch.ones(4, 4)), view

    def forward(self) -> Any:
        return self.view(self.weight)


class Net(nn.Module):
    """Four units: the table, and layers of which the second's input depends on it; ``uses`` says how."""

    def __init__(self, view: Callable[[Tensor], Any], use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.table, self.use = Table(view), use
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table()
        out: Tensor = self.third(self.second(self.use(self.first(x), table)))
        return out


def profile_of(model: nn.Module) -> mdcs.Profile:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return measure_profile(model, mdcs.partition(model, mdcs.ByLeaf()), lambda: model(torch.ones(4, 4)).sum(), optimizer)


@pytest.mark.parametrize(
    ("view", "use", "forward", "aliased", "saved"),
    [
        (lambda w: w.clone(), lambda x, t: x * t, (0, 0), False, False),
        (lambda w: w[:1], lambda x, t: x * t, (0, 1), True, True),
        (lambda w: {"in": [w.t()]}, lambda x, t: x @ t["in"][0], (0, 1), True, True),
        (lambda w: functools.partial(Tensor.clone, w[0]), lambda x, t: x * t(), (0, 1), True, False),
    ],
    ids=["a copy", "a view", "in containers", "in a closure"],
)
def test_a_unit_is_whole_while_views_of_its_parameter_are_used(view, use, forward, aliased, saved):
    model = Net(view, use)
    profile = profile_of(model)
    table, *others = profile.units
    assert mdcs.Profile.from_json(profile.to_json()).units == profile.units
    assert (table.forward, table.aliased) == (forward, aliased)
    assert [(u.forward, u.aliased) for u in others] == [((i, i), False) for i in (1, 2, 3)]
    # Backward slots begin with those of third and second. In second's the product has its gradient, and needs the table's values.
    assert table.backward is not None and (table.backward[0] == 1) is saved


class Tied(nn.Module):
    """The root's forward reads the weight of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.second(self.first(x)), self.first.weight)


def test_a_unit_that_is_used_outside_of_its_module_is_whole_through_the_turn_and_said_so():
    profile = profile_of(Tied())
    first, second = profile.units
    assert (first.forward, first.backward, first.aliased) == ((0, 1), (0, 1), True)
    assert (second.forward, second.backward, second.aliased) == ((1, 1), (0, 0), False)
    assert used_outside(profile).startswith("used outside of their modules' forward: first. ")
    assert not used_outside(profile_of(nn.Sequential(nn.Linear(4, 4))))


class Heads(nn.Module):
    """Calls of ``forward``, which no hook of the layers sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second.forward(self.first.forward(x))


def test_slots_begin_with_the_first_use_of_a_weight_where_no_module_is_called():
    profile = profile_of(Heads())
    assert [(slot.unit, slot.phase) for slot in profile.slots] == [(0, "F"), (1, "F"), (1, "B"), (0, "B")]
    assert [(u.forward[0], u.backward) for u in profile.units] == [(0, (0, 1)), (1, (0, 0))]


# ---- inputs and outputs of units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, positions: Tensor, *, scale: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.linear(x + mask) * scale + positions
        return out


class Model(nn.Module):
    """Autograd keeps the scale for backward, the loop the mask, and nobody the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        positions, scale = torch.arange(4.0), torch.full((4,), 2.0)
        for block in self.blocks[:2]:
            x = block(x, positions, scale=scale, mask=mask)
        out: Tensor = self.blocks[2](x, torch.arange(4.0), scale=scale, mask=mask)
        return out.sum()


def test_each_of_the_units_that_share_an_input_is_charged_with_it() -> None:
    model, mask = Model(), torch.zeros(4)
    units = mdcs.partition(model, mdcs.ByClass(("Block",)))
    with UnitTensors(units) as tensors:
        loss = model(torch.ones(2, 4), mask)
        assert tensors.shared_inputs() == {0: 16, 1: 16, 2: 0}
        assert tensors.outputs() == {0: 32, 1: 32, 2: 32}
        loss.backward()
    assert not any(unit.modules[0]._forward_pre_hooks or unit.modules[0]._forward_hooks for unit in units)
