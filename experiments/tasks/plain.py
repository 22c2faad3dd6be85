"""Models of plain torch: the modules are in :mod:`experiments.tasks.modules`, which imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.tasks.model import ImageModel, TextModel
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
        """Make the task. Every layer is a unit."""
        from experiments.tasks.modules import Perceptron
        from experiments.tasks.task import Task, cross_entropy

        module = Perceptron(self.depth, self.width, self.inputs.features, self.classes)
        return Task(module, cross_entropy, ("Linear",), self.inputs)


@dataclass(frozen=True, kw_only=True)
class Lstm(TextModel):
    """A language model of LSTM layers (Hochreiter and Schmidhuber 1997): predicts the next token."""

    layers: int = option(2, "LSTM layers", at_least=1)
    width: int = option(64, "hidden size", at_least=1)

    def make(self) -> Task:
        """Make the task. Layers are units; embedding and head lie outside of the layers."""
        from experiments.tasks.modules import Recurrent
        from experiments.tasks.task import Task, cross_entropy

        return Task(Recurrent(self.layers, self.width, self.vocab, tie=self.tie), cross_entropy, ("LSTM",), self.inputs)
