"""Llama (Touvron et al. 2023) over bytes: predicts the next byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.tasks.inputs import Tokens
from experiments.tasks.transformer import TextTransformer
from mdcs.options import OptionError, option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Llama(TextTransformer):
    """transformers' Llama with the head of a language model. Raises OptionError unless `kv_heads` divides `heads`."""

    kv_heads: int = option(8, "heads of keys and values; divides heads", at_least=1)
    inner: int = option(8192, "hidden size of the gated layers", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise OptionError("kv_heads", f"must divide heads={self.heads}, got {self.kv_heads}")

    @property
    def inputs(self) -> Tokens:
        """Sequences with the next token of each position as label."""
        return Tokens(self.sequence, self.vocab)

    def numbers(self) -> dict[str, Any]:
        """Arguments of LlamaConfig."""
        return {
            "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "intermediate_size": self.inner, "vocab_size": self.vocab,
            "max_position_embeddings": self.sequence, "tie_word_embeddings": self.tie,
        }  # fmt: skip

    def make(self) -> Task:
        """Make the task. Blocks are units; embeddings and the last norm lie outside of the blocks."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from experiments.tasks.task import Task, cross_entropy

        config = LlamaConfig(
            attention_dropout=self.dropout, bos_token_id=None, eos_token_id=None, **{**self.library_options(), **self.numbers()}
        )
        model = self.new(LlamaForCausalLM, config)
        self.recompute(model)
        return Task(model, cross_entropy, ("LlamaDecoderLayer",), self.inputs)
