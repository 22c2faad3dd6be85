"""The module of :class:`experiments.tasks.mlp.Mlp`, in a file of its own because it imports torch."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional


class Perceptron(nn.Module):
    """`depth` linear layers with ReLU in between: [batch, features] → [batch, classes]."""

    def __init__(self, depth: int, width: int, features: int, classes: int) -> None:
        super().__init__()
        sizes = [features, *[width] * (depth - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layers[0](inputs)
        for layer in self.layers[1:]:
            hidden = layer(functional.relu(hidden))
        return hidden
