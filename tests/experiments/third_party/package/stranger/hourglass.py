"""The model's module."""

from itertools import pairwise

from torch import Tensor, nn


class Layers(nn.Sequential):
    """Linear layers of these sizes, back to the width before the last."""

    def __init__(self, features: int, width: int, waist: int, classes: int) -> None:
        linear = [nn.Linear(a, b) for a, b in pairwise((features, width, waist, width, classes))]
        super().__init__(*[layer for each in linear for layer in (each, nn.ReLU())][:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = super().forward(inputs)
        return out
