"""Models that a config can choose: dataclasses of a family's numbers, which build the model from them.

Weights are random; those of transformers' models may come from a folder or the hub, if its model has the same numbers.
This module imports no torch: a config is checked before any process starts, and importing torch takes seconds. A family
imports its libraries in `make`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.tasks.data import Images, Inputs, Pairs, Tokens
from experiments.tasks.hub import is_local
from mdcs.options import Checked, OptionError, option, options, shown
from mdcs.sizes import MIB

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Model(Checked, ABC):
    """The options that all models share. A subclass adds its numbers, its inputs, and `make`."""

    computes: ClassVar[bool] = True  # whether forward and backward use the cores
    name: str = option("", "name of the model in tables", profiled=False)
    wrap: str = option("block", "rule that cuts the model into units", choices=("block", "size", "leaf"))
    wrap_min_params: int = option(100_000, "wrap=size: smallest unit, in parameters", at_least=1)
    frozen: tuple[str, ...] = option((), "parameters that are not trained: patterns of names (fnmatch)")

    @property
    def checkpointing(self) -> bool:
        """Return whether backward recomputes activations. Families that support recomputation make this an option."""
        return False

    @property
    def label(self) -> str:
        return self.name

    @property
    def made_of(self) -> dict[str, str]:
        """Further values on which a profile depends besides the options, by name, e.g. hashes of files."""
        return {}

    @property
    def fills_cache(self) -> bool:
        """Return whether the first build on a machine downloads what later ones find there."""
        return False

    @property
    @abstractmethod
    def inputs(self) -> Inputs:
        """The inputs that the model reads."""

    @abstractmethod
    def make(self) -> Task:
        """Make the task with a new model. Its weights come from torch's global generator."""

    def build(self, *, seed: int = 0) -> Task:
        """Make the task with a new model in training mode, on the CPU. Its weights depend only on `seed`. The global
        generator is left unchanged. Under `with torch.device("meta")` the model has shapes but no memory."""
        import torch
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every accelerator
            task = self.make()
        task.model.train()
        return task


@dataclass(frozen=True, kw_only=True)
class TextModel(Model):
    """The options of a language model."""

    masked: ClassVar[bool] = False
    sequence: int = option(512, "tokens in a sequence", at_least=1, sets="max_position_embeddings")
    vocab: int = option(256, "tokens in the vocabulary", at_least=2, sets="vocab_size")
    tie: bool = option(True, "input and output embeddings are one parameter", sets="tie_word_embeddings")

    @property
    def inputs(self) -> Tokens:
        """Sequences with the next token of each position as label, or with some tokens masked."""
        return Tokens(self.sequence, self.vocab, self.masked)


@dataclass(frozen=True, kw_only=True)
class ImageModel(Model):
    """The options of a classifier of images."""

    flat: ClassVar[bool] = False  # whether an image is a row of values
    image: int = option(224, "pixels along an edge", at_least=1)
    channels: int = option(3, "channels of an image", at_least=1, sets="num_channels")
    classes: int = option(1000, "classes of images", at_least=2)

    @property
    def inputs(self) -> Images:
        return Images(self.image, self.channels, self.classes, self.flat)


@dataclass(frozen=True, kw_only=True)
class Mlp(ImageModel):
    """`depth` linear layers with ReLU in between, on flat images. It is the model that starts fastest."""

    flat = True
    depth: int = option(4, "linear layers", at_least=1)
    width: int = option(256, "hidden size", at_least=1)

    def make(self) -> Task:
        from torch import nn

        from experiments.tasks.task import Task, cross_entropy
        sizes = [self.inputs.features, *[self.width] * (self.depth - 1), self.classes]
        model = nn.Sequential()
        for i, pair in enumerate(itertools.pairwise(sizes)):
            if i:
                model.add_module(f"relu{i}", nn.ReLU())
            model.add_module(f"linear{i}", nn.Linear(*pair))
        return Task(model, cross_entropy, ("Linear",), self.inputs)


_FP32 = 4  # bytes, in which block_mib counts


@dataclass(frozen=True, kw_only=True)
class Timed(Model):
    """A stand-in for a model on a missing device: parameters, gradients and updates are real, but compute only waits.
    Compute sleeps for its time and leaves the cores to messages and updates. So ranks on a few cores stand for as many
    devices."""

    computes = False
    layers: int = option(12, "blocks", at_least=1)
    block_mib: float = option(5.722, "parameters of a block, in float32", above=0)
    forward_ms: float = option(32.0, "milliseconds that the forward of a block takes", at_least=0)
    backward_ms: float = option(64.0, "milliseconds that the backward of a block takes", at_least=0)
    activations_mib: float = option(0.0, "MiB that a block keeps from forward to backward", at_least=0)
    checkpointing: bool = option(False, "every block recomputes its activations in backward, by torch's checkpoint")
    tensors: int = option(4, "parameter tensors of a block", at_least=1)

    @property
    def label(self) -> str:
        """The name with ", timed compute", so that no table shows it as a model that computes."""
        return f"{self.name}, timed compute"

    @property
    def made_of(self) -> dict[str, str]:
        return {"compute": "timed"}

    @property
    def inputs(self) -> Images:
        """One number per block. Labels are the targets of the weighted sum of the numbers."""
        return Images(1, self.layers, 2, flat=True)

    def make(self) -> Task:
        from torch import nn

        from experiments.tasks.task import Block, Clock, Task, Waiting, squared_error
        numel, kept = max(1, round(self.block_mib * MIB / _FP32)), round(self.activations_mib * MIB)
        seconds, clock = (self.forward_ms * 1e-3, self.backward_ms * 1e-3), Clock()
        blocks = (Block(numel, self.tensors, kept, *seconds, clock, self.checkpointing) for _ in range(self.layers))
        return Task(Waiting(nn.ModuleList(blocks)), squared_error, ("Block",), self.inputs)


@dataclass(frozen=True, kw_only=True)
class Library(Model):
    """A model of transformers. Raises OptionError for weights that are missing, or of a model with other numbers.
    Beside limits an option may have two values: `sets`, the argument of the model's config, and `divides`, an
    option."""

    cls: ClassVar[str]  # the class of transformers
    block: ClassVar[str]  # the class whose modules become units; the other parameters lie outside of them
    weights: str | None = option(
        None, "starting weights: a folder that save_pretrained has written, or a name on the hub; null: random",
        profiled=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, field in options(self).items():
            value, whole = getattr(self, name), field.metadata.get("divides")
            if whole and getattr(self, whole) % value:
                raise OptionError(name, f"must divide {whole}={getattr(self, whole)}, got {value}")
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

    def numbers(self) -> dict[str, Any]:
        return {of.metadata["sets"]: getattr(self, name) for name, of in options(self).items() if "sets" in of.metadata}

    def arguments(self) -> dict[str, Any]:
        classes = getattr(self, "classes", None)
        return {} if classes is None else {"num_labels": classes}

    def make(self) -> Task:
        import torch
        import transformers

        from experiments.tasks.task import Task, cross_entropy
        cls: Any = getattr(transformers, self.cls)
        config = cls.config_class(**(self.arguments() | self.numbers()))
        model = cls(config) if self.weights is None else cls.from_pretrained(
            self.weights, config=config, local_files_only=is_local(self.weights), dtype=torch.float32
        )  # fmt: skip
        if self.checkpointing:
            # The first name is newer. Both methods take the keyword arguments of torch.utils.checkpoint first.
            newer = getattr(model, "activation_checkpointing_enable", None)
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return Task(model, cross_entropy, (self.block,), self.inputs)


@dataclass(frozen=True, kw_only=True)
class Transformer(Library):
    """The numbers of a transformer."""

    dropouts: ClassVar[tuple[str, ...]] = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    """Arguments of the model's config."""
    layers: int = option(12, "transformer blocks", at_least=1, sets="num_hidden_layers")
    width: int = option(768, "hidden size", at_least=1, sets="hidden_size")
    heads: int = option(12, "attention heads; divides width", at_least=1, sets="num_attention_heads", divides="width")
    dropout: float = option(0.0, "dropout everywhere", at_least=0, below=1)
    checkpointing: bool = option(False, "recompute activations in backward")

    def numbers(self) -> dict[str, Any]:
        return {"intermediate_size": 4 * self.width} | super().numbers()

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"attn_implementation": "sdpa", **dict.fromkeys(self.dropouts, self.dropout)}


@dataclass(frozen=True, kw_only=True)
class TextTransformer(Transformer, TextModel):
    """A transformer with the head of a language model: predicts the next token."""

    def arguments(self) -> dict[str, Any]:
        no_special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # padding would not be trained
        cache = {"use_cache": False}  # it would hold every layer's keys and values until the end of forward
        return super().arguments() | no_special | cache


@dataclass(frozen=True, kw_only=True)
class Gpt2(TextTransformer):
    """GPT-2 (Radford et al. 2019)."""

    cls, block = "GPT2LMHeadModel", "GPT2Block"
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


@dataclass(frozen=True, kw_only=True)
class Llama(TextTransformer):
    """Llama (Touvron et al. 2023)."""

    cls, block = "LlamaForCausalLM", "LlamaDecoderLayer"
    dropouts = ("attention_dropout",)
    kv_heads: int = option(
        8, "heads of keys and values; divides heads", at_least=1, sets="num_key_value_heads", divides="heads"
    )
    inner: int = option(8192, "hidden size of the gated layers", at_least=1, sets="intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Bert(TextTransformer):
    """BERT (Devlin et al. 2019) that predicts masked tokens. The mask token's id is `vocab`."""

    cls, block, masked = "BertForMaskedLM", "BertLayer", True

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "vocab_size": self.vocab + 1}

    def make(self) -> Task:
        task = super().make()
        # `predictions.bias` is a second name of `predictions.decoder.bias` when tied, and unused otherwise.
        # Without it, each parameter belongs to the module that computes with it.
        del task.model.get_submodule("cls.predictions").bias
        return task


@dataclass(frozen=True, kw_only=True)
class BertPairs(Transformer):
    """BERT (Devlin et al. 2019) with a classifier of pairs of sentences on its pooled first token."""

    cls, block = "BertForSequenceClassification", "BertLayer"
    sequence: int = option(128, "tokens of a pair", at_least=4, sets="max_position_embeddings")
    vocab: int = option(
        259, "tokens in the vocabulary; without a tokenizer bytes and three special ones", at_least=5, sets="vocab_size"
    )
    classes: int = option(3, "classes of pairs", at_least=2)

    @property
    def inputs(self) -> Pairs:
        return Pairs(self.sequence, self.vocab, self.classes)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"pad_token_id": None}


@dataclass(frozen=True, kw_only=True)
class Vit(Transformer, ImageModel):
    """The Vision Transformer (Dosovitskiy et al. 2020)."""

    cls, block = "ViTForImageClassification", "ViTLayer"
    patch: int = option(
        16, "pixels along a patch's edge; divides image", at_least=1, sets="patch_size", divides="image"
    )

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {"image_size": self.image}


_STEM, _CHANNELS = 64, (256, 512, 1024, 2048)  # channels of the stem, and of each stage


@dataclass(frozen=True, kw_only=True)
class ResNet(Library, ImageModel):
    """A ResNet with bottlenecks (He et al. 2015). Raises OptionError when `width_divisor` does not divide 64."""

    cls, block = "ResNetForImageClassification", "ResNetBottleNeckLayer"
    depths: tuple[int, ...] = option((3, 4, 6, 3), "residual blocks per stage", at_least=1, length=len(_CHANNELS))
    width_divisor: int = option(1, "divisor of all numbers of channels, the stem's 64 too", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if _STEM % self.width_divisor:
            raise OptionError("width_divisor", f"must divide {_STEM}, got {self.width_divisor}")

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {
            "embedding_size": _STEM // self.width_divisor, "depths": list(self.depths),
            "hidden_sizes": [size // self.width_divisor for size in _CHANNELS], "layer_type": "bottleneck",
        }  # fmt: skip
