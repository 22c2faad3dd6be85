"""Base classes of transformers: their numbers, and the arguments for transformers' classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.tasks.library import Library
from mdcs.options import OptionError, option


@dataclass(frozen=True, kw_only=True)
class Transformer(Library):
    """The numbers of a transformer. Raises OptionError when `heads` does not divide `width`."""

    layers: int = option(12, "transformer blocks", at_least=1)
    width: int = option(768, "hidden size", at_least=1)
    heads: int = option(12, "attention heads; divides width", at_least=1)
    dropout: float = option(0.0, "dropout everywhere", at_least=0, below=1)
    checkpointing: bool | str = option(
        False, "recompute activations in backward; auto: if that is predicted to be faster within the budget",
        choices=(True, False, "auto"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise OptionError("heads", f"must divide width={self.width}, got {self.heads}")

    def recompute(self, model: Any) -> None:
        """Make transformers' model checkpoint its blocks if the options say so."""
        if self.checkpointing is True:
            # The first name is newer. Both methods take the keyword arguments of torch.utils.checkpoint first.
            newer = getattr(model, "activation_checkpointing_enable", None)
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


@dataclass(frozen=True, kw_only=True)
class TextTransformer(Transformer):
    """A transformer that reads tokens."""

    sequence: int = option(512, "tokens in a sequence", at_least=1)
    vocab: int = option(256, "tokens in the vocabulary", at_least=2)
    tie: bool = option(True, "input and output embeddings are one parameter")

    def library_options(self) -> dict[str, Any]:
        """Arguments of transformers' configs that do not depend on the family."""
        return {
            "tie_word_embeddings": self.tie,
            "use_cache": False,  # a cache would hold every layer's keys and values until the end of forward
            "attn_implementation": "sdpa",
        }
