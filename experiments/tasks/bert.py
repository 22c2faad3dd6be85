"""BERT (Devlin et al. 2019) over bytes: predicts masked bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.tasks.inputs import Tokens
from experiments.tasks.transformer import TextTransformer

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Bert(TextTransformer):
    """transformers' BERT with the head of a masked language model. The mask token's id is `vocab`."""

    @property
    def inputs(self) -> Tokens:
        """Sequences in which some tokens are masked."""
        return Tokens(self.sequence, self.vocab, masked=True)

    def numbers(self) -> dict[str, Any]:
        """Arguments of BertConfig."""
        return {
            "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width, "max_position_embeddings": self.sequence,
            "vocab_size": self.vocab + 1,  # the mask token
        }  # fmt: skip

    def make(self) -> Task:
        """Make the task. Layers are units; embeddings and head lie outside of the layers."""
        from transformers import BertConfig, BertForMaskedLM

        from experiments.tasks.task import Task, cross_entropy

        config = BertConfig(
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            pad_token_id=None,  # by default, byte 0 is padding and its embedding is never trained
            **self.numbers(),
            **self.library_options(),
        )
        model = self.new(BertForMaskedLM, config)
        # `predictions.bias` is a second name of `predictions.decoder.bias` when tied, and unused otherwise.
        # Without it, each parameter belongs to the module that computes with it.
        del model.cls.predictions.bias
        self.recompute(model)
        return Task(model, cross_entropy, ("BertLayer",), self.inputs)
