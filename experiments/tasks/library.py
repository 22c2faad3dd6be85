"""Models of transformers. Weights may come from a folder or the hub, if their model has the same numbers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.tasks.hub import is_local
from experiments.tasks.inputs import Pairs
from experiments.tasks.model import ImageModel, Model, TextModel
from mdcs.options import OptionError, option, shown

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Library(Model):
    """A model of transformers.

    Raises OptionError for weights that are missing, or that belong to a model with other numbers.
    """

    cls: ClassVar[str]
    """The class of transformers."""
    block: ClassVar[str]
    """The class whose modules become units; the other parameters lie outside of them."""

    weights: str | None = option(
        None,
        "starting weights: a folder that save_pretrained has written, or a name on the hub; null: random",
        profiled=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is None:
            return
        import transformers

        kind: Any = getattr(transformers, self.cls).config_class
        try:
            there = kind.from_pretrained(self.weights, local_files_only=is_local(self.weights))
        except (OSError, ValueError) as error:
            told = f"must be a folder with a model's config.json, or a name on the hub, got {self.weights}"
            raise OptionError("weights", told) from error
        for name, value in self.numbers().items():
            if (found := getattr(there, name, value)) != value:
                raise OptionError("weights", f"{self.weights} has {name}={shown(found)}, the model {shown(value)}")

    @property
    def fills_cache(self) -> bool:
        return self.weights is not None and not is_local(self.weights)

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """The arguments of the model's config that determine its shape."""

    def arguments(self) -> dict[str, Any]:
        """The other arguments of the model's config."""
        return {}

    def make(self) -> Task:
        """Make the task, with the folder's weights or random ones."""
        import torch
        import transformers

        from experiments.tasks.task import Task, cross_entropy

        cls: Any = getattr(transformers, self.cls)
        config = cls.config_class(**(self.arguments() | self.numbers()))
        if self.weights is None:
            model = cls(config)
        else:
            local = is_local(self.weights)
            model = cls.from_pretrained(self.weights, config=config, local_files_only=local, dtype=torch.float32)
        if self.checkpointing:
            # The first name is newer. Both methods take the keyword arguments of torch.utils.checkpoint first.
            newer = getattr(model, "activation_checkpointing_enable", None)
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return Task(model, cross_entropy, (self.block,), self.inputs)


@dataclass(frozen=True, kw_only=True)
class Transformer(Library):
    """The numbers of a transformer. Raises OptionError when `heads` does not divide `width`."""

    dropouts: ClassVar[tuple[str, ...]] = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    """Arguments of the model's config."""

    layers: int = option(12, "transformer blocks", at_least=1)
    width: int = option(768, "hidden size", at_least=1)
    heads: int = option(12, "attention heads; divides width", at_least=1)
    dropout: float = option(0.0, "dropout everywhere", at_least=0, below=1)
    checkpointing: bool = option(False, "recompute activations in backward")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise OptionError("heads", f"must divide width={self.width}, got {self.heads}")

    def numbers(self) -> dict[str, Any]:
        return {
            "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width,
        }  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        return {"attn_implementation": "sdpa", **dict.fromkeys(self.dropouts, self.dropout)}


@dataclass(frozen=True, kw_only=True)
class TextTransformer(Transformer, TextModel):
    """A transformer with the head of a language model: predicts the next token."""

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "max_position_embeddings": self.sequence, "vocab_size": self.vocab}

    def arguments(self) -> dict[str, Any]:
        no_special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # padding would not be trained
        cache = {"use_cache": False}  # it would hold every layer's keys and values until the end of forward
        return {**super().arguments(), **no_special, **cache, "tie_word_embeddings": self.tie}


@dataclass(frozen=True, kw_only=True)
class Gpt2(TextTransformer):
    """GPT-2 (Radford et al. 2019)."""

    cls, block = "GPT2LMHeadModel", "GPT2Block"
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


@dataclass(frozen=True, kw_only=True)
class Llama(TextTransformer):
    """Llama (Touvron et al. 2023). Raises OptionError unless `kv_heads` divides `heads`."""

    cls, block = "LlamaForCausalLM", "LlamaDecoderLayer"
    dropouts = ("attention_dropout",)

    kv_heads: int = option(8, "heads of keys and values; divides heads", at_least=1)
    inner: int = option(8192, "hidden size of the gated layers", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise OptionError("kv_heads", f"must divide heads={self.heads}, got {self.kv_heads}")

    def numbers(self) -> dict[str, Any]:
        return {
            **super().numbers(), "num_key_value_heads": self.kv_heads, "intermediate_size": self.inner,
            "tie_word_embeddings": self.tie,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bert(TextTransformer):
    """BERT (Devlin et al. 2019) that predicts masked tokens. The mask token's id is `vocab`."""

    cls, block, masked = "BertForMaskedLM", "BertLayer", True

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "vocab_size": self.vocab + 1}

    def make(self) -> Task:
        """Make the task, without a parameter that has no use of its own."""
        task = super().make()
        # `predictions.bias` is a second name of `predictions.decoder.bias` when tied, and unused otherwise.
        # Without it, each parameter belongs to the module that computes with it.
        del task.model.get_submodule("cls.predictions").bias
        return task


@dataclass(frozen=True, kw_only=True)
class BertPairs(Transformer):
    """BERT (Devlin et al. 2019) with a classifier of pairs of sentences on its pooled first token."""

    cls, block = "BertForSequenceClassification", "BertLayer"

    sequence: int = option(128, "tokens of a pair", at_least=4)
    vocab: int = option(259, "tokens in the vocabulary; without a tokenizer bytes and three special ones", at_least=5)
    classes: int = option(3, "classes of pairs", at_least=2)

    @property
    def inputs(self) -> Pairs:
        """Two sentences in one sequence."""
        return Pairs(self.sequence, self.vocab, self.classes)

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "max_position_embeddings": self.sequence, "vocab_size": self.vocab}

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "pad_token_id": None, "num_labels": self.classes}


@dataclass(frozen=True, kw_only=True)
class Vit(Transformer, ImageModel):
    """The Vision Transformer (Dosovitskiy et al. 2020). Raises OptionError when `patch` does not divide `image`."""

    cls, block = "ViTForImageClassification", "ViTLayer"

    patch: int = option(16, "pixels along a patch's edge; divides image", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise OptionError("patch", f"must divide image={self.image}, got {self.patch}")

    def numbers(self) -> dict[str, Any]:
        images = {"image_size": self.image, "patch_size": self.patch, "num_channels": self.channels}
        return {**super().numbers(), **images}

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "num_labels": self.classes}


_STEM = 64  # channels


@dataclass(frozen=True, kw_only=True)
class ResNet(Library, ImageModel):
    """A ResNet with bottlenecks (He et al. 2015). Raises OptionError for numbers that describe no network."""

    cls, block = "ResNetForImageClassification", "ResNetBottleNeckLayer"

    depths: tuple[int, ...] = option((3, 4, 6, 3), "residual blocks per stage", at_least=1)
    hidden_sizes: tuple[int, ...] = option((256, 512, 1024, 2048), "channels per stage", at_least=1)
    width_divisor: int = option(1, "divisor of all numbers of channels, the stem's 64 too", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths or len(self.depths) != len(self.hidden_sizes):
            raise OptionError("hidden_sizes", f"must have a value for each of depths={shown(self.depths)}, got "
                              f"{shown(self.hidden_sizes)}")  # fmt: skip
        if _STEM % self.width_divisor:
            raise OptionError("width_divisor", f"must divide {_STEM}, got {self.width_divisor}")
        for size in self.hidden_sizes:
            # The inner convolutions of a bottleneck have a quarter of its width.
            if size % (4 * self.width_divisor):
                raise OptionError(
                    "hidden_sizes", f"must be multiples of 4 × width_divisor={self.width_divisor}, got {size}"
                )

    def numbers(self) -> dict[str, Any]:
        return {
            "num_channels": self.channels, "embedding_size": _STEM // self.width_divisor,
            "depths": list(self.depths),
            "hidden_sizes": [size // self.width_divisor for size in self.hidden_sizes], "layer_type": "bottleneck",
        }  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        return {"num_labels": self.classes}
