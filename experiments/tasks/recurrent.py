"""The module of :class:`experiments.tasks.lstm.Lstm`."""

from __future__ import annotations

from torch import Tensor, nn


class Recurrent(nn.Module):
    """Tokens [batch, sequence] → logits [batch, sequence, vocab]."""

    def __init__(self, layers: int, width: int, vocab: int, *, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits at every position, computed from the tokens up to that position."""
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden, _ = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits
