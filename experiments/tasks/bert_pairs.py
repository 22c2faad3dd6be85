"""BERT (Devlin et al. 2019) as a classifier of pairs of sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.tasks.inputs import Pairs
from experiments.tasks.transformer import Transformer
from mdcs.options import option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class BertPairs(Transformer):
    """transformers' BERT with a classifier on its pooled first token."""

    sequence: int = option(128, "tokens of a pair", at_least=4)
    vocab: int = option(259, "tokens in the vocabulary; without a tokenizer bytes and three special ones", at_least=5)
    classes: int = option(3, "classes of pairs", at_least=2)

    @property
    def inputs(self) -> Pairs:
        """Two sentences in one sequence."""
        return Pairs(self.sequence, self.vocab, self.classes)

    def numbers(self) -> dict[str, Any]:
        """Arguments of BertConfig."""
        return {
            "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width, "max_position_embeddings": self.sequence, "vocab_size": self.vocab,
        }  # fmt: skip

    def make(self) -> Task:
        """Make the task. Layers are units; embeddings, pooler and classifier lie outside of the layers."""
        from transformers import BertConfig, BertForSequenceClassification

        from experiments.tasks.task import Task, cross_entropy

        chosen: dict[str, Any] = {"attn_implementation": "sdpa"}
        config = BertConfig(
            hidden_dropout_prob=self.dropout, attention_probs_dropout_prob=self.dropout, pad_token_id=None,
            **self.numbers(), **chosen,
        )  # fmt: skip
        config.num_labels = self.classes
        model = self.new(BertForSequenceClassification, config)
        self.recompute(model)
        return Task(model, cross_entropy, ("BertLayer",), self.inputs)
