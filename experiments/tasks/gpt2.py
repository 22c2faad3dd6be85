"""GPT-2 (Radford et al. 2019) over bytes: predicts the next byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.tasks.inputs import Tokens
from experiments.tasks.transformer import TextTransformer

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Gpt2(TextTransformer):
    """transformers' GPT-2 with the head of a language model."""

    @property
    def inputs(self) -> Tokens:
        """Sequences with the next token of each position as label."""
        return Tokens(self.sequence, self.vocab)

    def numbers(self) -> dict[str, Any]:
        """Arguments of GPT2Config."""
        return {
            "n_layer": self.layers, "n_embd": self.width, "n_head": self.heads, "n_positions": self.sequence,
            "vocab_size": self.vocab,
        }  # fmt: skip

    def make(self) -> Task:
        """Make the task. Blocks are units; embeddings and the last norm lie outside of the blocks."""
        from transformers import GPT2Config, GPT2LMHeadModel

        from experiments.tasks.task import Task, cross_entropy

        config = GPT2Config(
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            bos_token_id=None,
            eos_token_id=None,
            **self.numbers(),
            **self.library_options(),
        )
        model = self.new(GPT2LMHeadModel, config)
        self.recompute(model)
        return Task(model, cross_entropy, ("GPT2Block",), self.inputs)
