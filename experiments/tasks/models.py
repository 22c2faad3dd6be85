"""The models that experiments train, built from numbers alone: random weights, no downloads.

`build(name, **options)` returns a `Task`: the model, its loss, the inputs it reads and the classes of
modules that make units. A name is a shape (`gpt2-small` is the real one, with bytes for a vocabulary) and
every option overrides one number of it, so a test trains the same architecture in miniature.

Every parameter is reached by the loss: what transformers builds but the loss does not use (BERT's pooler, the
second name of its decoder's bias) is left out, since DDP would wait for a gradient that never comes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.tasks.data import IGNORED, Images, Inputs, Tokens, batches

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A model and what training it takes.

    loss: (model, batch) → scalar tensor. The model is an argument since it may be wrapped (DDP, FSDP) by
        then; the batch is what `experiments.tasks.data.batches` gives for `inputs`, floats in the model's dtype.
    block_classes: names of the module classes whose instances the default wrap policy makes units of; what
        lies outside of them (embeddings, head, stem) is in units of its own.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    block_classes: tuple[str, ...]
    inputs: Inputs

    def example_batch(self, batch_size: int, seed: int = 0) -> Batch:
        """A synthetic batch with the shapes and dtypes of real ones, on the CPU."""
        return next(batches("synthetic", self.inputs, rank=0, world=1, batch_size=batch_size, seed=seed))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the labelled positions of the batch, for tokens and for images alike.

    transformers' own losses cast logits to float32, which would also round a float64 model's; here only half
    precision is widened, so that runs compared in float64 are float64 all the way.
    """
    output = model(**{key: value for key, value in batch.items() if key != "labels"})
    logits = output if isinstance(output, Tensor) else output.logits
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED)


class Mlp(nn.Module):
    """`depth` linear layers with ReLU in between: (batch, features) → (batch, classes)."""

    def __init__(self, depth: int, width: int, features: int, classes: int) -> None:
        super().__init__()
        sizes = [features, *[width] * (depth - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layers[0](inputs)
        for layer in self.layers[1:]:
            hidden = layer(functional.relu(hidden))
        return hidden


# ---- families: keyword arguments are the options, their defaults the family's best known shape.
# transformers takes seconds to import: each family does so itself, and the MLP does without.


def _gpt2(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    sequence: int = 1024,
    vocab: int = 256,
    tie: bool = True,
    dropout: float = 0.0,
    checkpointing: bool = False,
) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    _check_transformer(layers, width, heads, dropout)
    inputs = Tokens(sequence, vocab)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=sequence,
        vocab_size=vocab,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        **_transformer_options(tie),
    )
    model = GPT2LMHeadModel(config)
    if checkpointing:
        _checkpoint_blocks(model)
    return Task(model, cross_entropy, ("GPT2Block",), inputs)


def _bert(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    sequence: int = 512,
    vocab: int = 256,
    tie: bool = True,
    dropout: float = 0.0,
    checkpointing: bool = False,
) -> Task:
    from transformers import BertConfig, BertForMaskedLM

    _check_transformer(layers, width, heads, dropout)
    inputs = Tokens(sequence, vocab, masked=True)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=sequence,
        vocab_size=vocab + 1,  # the mask token
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=None,  # by default byte 0 would be padding, with an embedding that is never trained
        **_transformer_options(tie),
    )
    model = BertForMaskedLM(config)
    # `predictions.bias` is a second name of `predictions.decoder.bias` when tied, and unused otherwise.
    # Without it each parameter belongs to the module that computes with it.
    del model.cls.predictions.bias
    if checkpointing:
        _checkpoint_blocks(model)
    return Task(model, cross_entropy, ("BertLayer",), inputs)


def _resnet(
    depths: tuple[int, ...] = (3, 4, 6, 3),
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048),
    stem: int = 64,
    width_divisor: int = 1,
    image: int = 224,
    channels: int = 3,
    classes: int = 1000,
) -> Task:
    from transformers import ResNetConfig, ResNetForImageClassification

    _check_positive(stem=stem, width_divisor=width_divisor)
    if not depths or len(depths) != len(hidden_sizes):
        raise ValueError(f"depths and hidden_sizes must be of one length, got {depths} and {hidden_sizes}")
    for depth in depths:
        _check_positive(depths=depth)
    if stem % width_divisor:
        raise ValueError(f"width_divisor={width_divisor} does not divide stem={stem}")
    for size in hidden_sizes:
        # The inner convolutions of a bottleneck have a quarter of its width.
        if size < 1 or size % (4 * width_divisor):
            raise ValueError(
                f"hidden_sizes must be multiples of 4 x width_divisor={width_divisor}, got {size}"
            )
    inputs = Images(image, channels, classes)
    config = ResNetConfig(
        num_channels=channels,
        embedding_size=stem // width_divisor,
        hidden_sizes=[size // width_divisor for size in hidden_sizes],
        depths=list(depths),
        layer_type="bottleneck",
    )
    config.num_labels = classes
    return Task(ResNetForImageClassification(config), cross_entropy, ("ResNetBottleNeckLayer",), inputs)


def _mlp(depth: int = 4, width: int = 256, image: int = 8, channels: int = 1, classes: int = 10) -> Task:
    _check_positive(depth=depth, width=width)
    inputs = Images(image, channels, classes, flat=True)
    return Task(Mlp(depth, width, inputs.features, classes), cross_entropy, ("Linear",), inputs)


# ---- registry


@dataclass(frozen=True)
class _Shape:
    family: Callable[..., Task]
    options: Mapping[str, Any]


_SHAPES: dict[str, _Shape] = {
    "gpt2": _Shape(_gpt2, {}),
    "gpt2-small": _Shape(_gpt2, {}),
    "gpt2-tiny": _Shape(_gpt2, {"layers": 2, "width": 64, "heads": 4, "sequence": 64}),
    "bert": _Shape(_bert, {}),
    "bert-base": _Shape(_bert, {}),
    "bert-tiny": _Shape(_bert, {"layers": 2, "width": 64, "heads": 4, "sequence": 64}),
    "resnet50": _Shape(_resnet, {}),
    "resnet152": _Shape(_resnet, {"depths": (3, 8, 36, 3)}),
    "resnet-tiny": _Shape(_resnet, {"depths": (1, 1, 1, 1), "width_divisor": 16, "image": 32, "classes": 10}),
    "mlp": _Shape(_mlp, {}),
}

NAMES = tuple(_SHAPES)


def defaults(name: str) -> dict[str, Any]:
    """Every option of the model `name` with its default. Raises ValueError for an unknown name."""
    if name not in _SHAPES:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(NAMES)}")
    shape = _SHAPES[name]
    family = {key: parameter.default for key, parameter in inspect.signature(shape.family).parameters.items()}
    return {**family, **shape.options}


def build(name: str, *, seed: int = 0, **options: Any) -> Task:
    """Build the model `name` in training mode; its weights are a function of `seed`.

    The global generator is left as it was. `with torch.device("meta")` gives the shapes without the memory.
    Options replace those of `defaults(name)`.

    Raises ValueError for an unknown name, an unknown option or a value that gives no model.
    """
    known = defaults(name)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"model {name} has no option {', '.join(unknown)}; its options: {', '.join(known)}")
    with _seeded(seed):
        try:
            task = _SHAPES[name].family(**{**known, **options})
        except ValueError as error:
            raise ValueError(f"model {name}: {error}") from error
    task.model.train()
    return task


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # Only the CPU's generator: torch.manual_seed would reseed every accelerator too.
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _transformer_options(tie: bool) -> dict[str, Any]:
    return {
        "tie_word_embeddings": tie,
        "use_cache": False,  # a cache would keep every layer's keys and values alive until the end of forward
        "attn_implementation": "sdpa",
    }


def _checkpoint_blocks(model: Any) -> None:
    # The first name is the newer one; both take the keyword arguments of torch.utils.checkpoint first.
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _check_transformer(layers: int, width: int, heads: int, dropout: float) -> None:
    _check_positive(layers=layers, width=width, heads=heads)
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
