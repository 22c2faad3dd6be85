"""The modules of :mod:`experiments.tasks.plain`."""

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


class Recurrent(nn.Module):
    """Embedding, LSTM layers, linear head: tokens [batch, sequence] → logits [batch, sequence, vocab]."""

    def __init__(self, layers: int, width: int, vocab: int, *, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden, _ = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits
