"""A model of plain PyTorch with data, inputs and a loss of its own: it predicts a curve from its noisy points.

    mdcs train model=own model._target_=examples.own_model.plain.build_model model.points=32 \
        model.loss='{_target_: examples.own_model.plain.loss, _partial_: true, power: 2}' \
        data=own data._target_=examples.own_model.plain.Curves data.points=32

or shorter, with the file conf/model/points.yaml beside this one, and samples that its inputs draw:

    mdcs train --config-dir examples/own_model/conf model=points data=synthetic
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Points:
    """Inputs of a kind of its own: `sample` draws the arrays of one sample, for `data=synthetic`."""

    points: int = 32

    def sample(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw a sine with noise, and the sine."""
        curve = np.sin(random.uniform(1, 5) * np.linspace(0, 1, self.points) + random.uniform(0, 6))
        return {"noisy": (curve + random.normal(0, 0.1, self.points)).astype("f"), "curve": curve.astype("f")}


class Curves(Dataset):
    """Data of its own: `count` noisy curves, of which evaluations see others."""

    def __init__(self, points: int, count: int = 1024, held_out: bool = False) -> None:
        inputs, random = Points(points), np.random.default_rng(int(held_out))
        self.samples = [inputs.sample(random) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.samples[index]


class Block(nn.Module):
    """A residual block of two linear layers: [batch, width] → [batch, width]."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def build_model(points: int, width: int = 128, depth: int = 4, activation: nn.Module | None = None) -> nn.Module:
    """Build `depth` blocks between two linear layers: [batch, points] → [batch, points]."""
    blocks = [Block(width, activation or nn.GELU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(points, width), *blocks, nn.Linear(width, points))


def loss(model: nn.Module, batch: dict[str, Tensor], power: float = 2) -> Tensor:
    """Mean distance from the curve, to the power `power`."""
    return torch.mean((model(batch["noisy"]) - batch["curve"]).abs() ** power)
