"""A model of plain torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.tasks.model import ImageModel
from mdcs.options import option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Mlp(ImageModel):
    """`depth` linear layers with ReLU in between, on flat images. It is the model that starts fastest."""

    flat = True

    depth: int = option(4, "linear layers", at_least=1)
    width: int = option(256, "hidden size", at_least=1)

    def make(self) -> Task:
        """Make the task. Every linear layer is a unit."""
        from torch import nn

        from experiments.tasks.task import Task, cross_entropy

        sizes = [self.inputs.features, *[self.width] * (self.depth - 1), self.classes]
        model = nn.Sequential()
        for i, pair in enumerate(itertools.pairwise(sizes)):
            if i:
                model.add_module(f"relu{i}", nn.ReLU())
            model.add_module(f"linear{i}", nn.Linear(*pair))
        return Task(model, cross_entropy, ("Linear",), self.inputs)
