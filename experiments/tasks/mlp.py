"""Linear layers with ReLU in between. It is the model that starts fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.tasks.inputs import Images
from experiments.tasks.model import Model
from mdcs.options import option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Mlp(Model):
    """`depth` linear layers: [batch, channels·image·image] → [batch, classes]."""

    depth: int = option(4, "linear layers", at_least=1)
    width: int = option(256, "hidden size", at_least=1)
    image: int = option(8, "pixels along an edge", at_least=1)
    channels: int = option(1, "channels of an image", at_least=1)
    classes: int = option(10, "classes of images", at_least=2)

    @property
    def inputs(self) -> Images:
        """Images as flat rows of values."""
        return Images(self.image, self.channels, self.classes, flat=True)

    def make(self) -> Task:
        """Make the task. Every layer is a unit."""
        from experiments.tasks.perceptron import Perceptron
        from experiments.tasks.task import Task, cross_entropy

        module = Perceptron(self.depth, self.width, self.inputs.features, self.classes)
        return Task(module, cross_entropy, ("Linear",), self.inputs)
