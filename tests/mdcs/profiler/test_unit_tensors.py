"""Inputs that several units share and that are gone when backward begins, and outputs of units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mdcs
from mdcs.profiler.unit_tensors import UnitTensors


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
