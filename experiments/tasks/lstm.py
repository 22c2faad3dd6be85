"""A language model of LSTM layers (Hochreiter and Schmidhuber 1997) over bytes: predicts the next byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.tasks.inputs import Tokens
from experiments.tasks.model import Model
from mdcs.options import option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Lstm(Model):
    """Embedding, `layers` LSTM layers, linear head."""

    layers: int = option(2, "LSTM layers", at_least=1)
    width: int = option(64, "hidden size", at_least=1)
    sequence: int = option(64, "tokens in a sequence", at_least=1)
    vocab: int = option(256, "tokens in the vocabulary", at_least=2)
    tie: bool = option(True, "input and output embeddings are one parameter")

    @property
    def inputs(self) -> Tokens:
        """Sequences with the next token of each position as label."""
        return Tokens(self.sequence, self.vocab)

    def make(self) -> Task:
        """Make the task. Layers are units; embedding and head lie outside of the layers."""
        from experiments.tasks.recurrent import Recurrent
        from experiments.tasks.task import Task, cross_entropy

        module = Recurrent(self.layers, self.width, self.vocab, tie=self.tie)
        return Task(module, cross_entropy, ("LSTM",), self.inputs)
