"""Profiles of a chain of layers that are calculated: parameters, operations and bytes of each layer, without measuring.

A forward takes operations / rate seconds, a backward twice as many. Between its forward and its backward a layer keeps
``kept`` bytes, its input among them. The output of a layer lives until the next layer has kept it, and as long as its
gradient in backward. The link comes from :mod:`benchmarks.rings`.

**Decoders** are of the GPT and Llama families, with flash attention, in 16 bit.

**Parameters** of a block of width w, with k = w · kv_heads / heads: attention 2 w² + 2 w k, MLP 2 w h (two matrices) or
3 w h (gated), norms 2 w; with biases one for every output and norm. With ``experts``, every expert is such an MLP, and
a router has w · experts.

**Operations** in forward: two per parameter that a token uses and token, and 4 · sequence · w per token in attention.
Flash attention computes the scores again in backward; as all of backward is counted twice the forward, 2.5 times
attention is rounded to 2.

**Bytes** that a block keeps per token (2 bytes an element): inputs and outputs of both norms 4 w, q, k and v w + 2 k,
output of attention w, and in the MLP 2 h (GELU: its input and output) or 4 h (SwiGLU: gate, its SiLU, up, their
product), for each expert that the token goes to. Flash attention (Dao et al. 2022, https://arxiv.org/abs/2205.14135)
keeps no scores. Selective recomputation keeps outputs of matrix products and of attention, and frees the outputs of
norms and activations. That of torchtitan also repeats every second matrix product: of a Llama's it keeps the block's
input, q, v, the output of attention, the gate, and the output of the last product, 4 w + k + h
(https://github.com/pytorch/torchtitan/blob/582fe7d1f52ef96987a9d5265b3e2bbefc92d583/torchtitan/parallelisms/parallelize_llama.py).

The first and the last layer, embedding and head, share the root unit, as with FSDP. The head keeps logits and
log-probabilities; a third tensor of this size lives for a moment, in forward and in backward. A fused loss keeps the
logits only, and its backward writes their gradient
(https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/losses/cross_entropy.py).

**Convolutional networks** are VGG-16, ResNet-50, 101 and 152 and Inception V3, from their tables.

A convolution of k × l from c to d channels on an output of s × s has k · l · c · d parameters and as many multiply-adds
for each of the s² places; batch normalization adds 2 d parameters. What backward needs is its input and output, in
fp32. Layers are the units that a training loop reduces together: convolutions of VGG, bottlenecks of ResNet, blocks of
Inception.

Tables: Simonyan and Zisserman 2014 (https://arxiv.org/abs/1409.1556), He et al. 2015
(https://arxiv.org/abs/1512.03385), Szegedy et al. 2015 (https://arxiv.org/abs/1512.00567), without its auxiliary head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from mdcs.profile.link import Collectives, ExecutionModel, Link
from mdcs.profile.recompute import FULL, SELECTIVE, RecomputeOption, RecomputeUse
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit


@dataclass(frozen=True)
class Layer:
    """A part of a model that runs as a whole: one forward slot and one backward slot.

    - ``unit``: name of its unit. Layers with the same name share a unit, whose parameters are theirs together.
    - ``parameters``: elements. ``operations``: floating-point operations of its forward.
    - ``kept``: bytes that forward saves for backward, with its input. ``output``: bytes of its output.
    - ``cheap``: bytes of ``kept`` that selective recomputation frees: neither input nor output of a matrix product that
      is kept. 0: the layer does not recompute.
    - ``workspace``: bytes that only exist while it runs, in forward and in backward.
    - ``repeated``: operations of its forward that selective recomputation repeats.
    """

    unit: str
    parameters: int
    operations: float
    kept: int = 0
    output: int = 0
    cheap: int = 0
    workspace: int = 0
    repeated: float = 0.0


@dataclass(frozen=True)
class Precision:
    """Bytes of an element of a parameter in compute and when gathered, of a gradient when reduced, and of the copy that
    the optimizer updates (``master``; 0: it updates the parameters themselves).
    """

    parameter: int = 4
    gradient: int = 4
    master: int = 0


_TYPES = {0: "", 1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}  # by the bytes of an element


def layers_profile(
    layers: Sequence[Layer], rate: float, world: int, link: Link, *, precision: Precision, optimizer: Optimizer,
    interference: float = 0.0,
) -> Profile:
    """Return the profile of training a chain of layers on NCCL.

    - ``rate``: operations per second that the device reaches while no message is in flight.
    - ``interference``: slowdown of compute while a message is in flight.

    Updates run on a stream of their own. Layers with ``cheap`` bytes have two options of recomputation.
    """
    parameter, gradient, master = (_TYPES[size] for size in astuple(precision))
    last = len(layers) - 1
    names = list(dict.fromkeys(layer.unit for layer in layers))
    units = []
    for name in names:
        places = [i for i, layer in enumerate(layers) if layer.unit == name]
        first, final = places[0], places[-1]
        numel = sum(layers[i].parameters for i in places)
        spans = (first, final), (last - final, last - first)
        units.append(Unit(name, (numel,), True, *spans, parameter, gradient, master))
    return Profile(
        units=tuple(units), slots=_slots(layers, names, rate), world=world, link=link, optimizer=optimizer,
        collectives=Collectives.default("nccl"), execution=ExecutionModel("stream"), interference=interference,
        recompute=_options(layers, names, rate),
    )


def _slots(layers: Sequence[Layer], names: list[str], rate: float) -> tuple[Slot, ...]:
    before = [0, *itertools.accumulate(layer.kept for layer in layers)]  # bytes kept by the layers before
    inputs = [0, *(layer.output for layer in layers)]
    forward, backward = [], []
    for i, layer in enumerate(layers):
        unit, seconds = names.index(layer.unit), layer.operations / rate
        held = before[i + 1] + layer.output  # once it has run, and when its backward begins
        live = before[i] + inputs[i]
        forward.append(Slot(unit, "F", seconds, live, max(live, held + layer.workspace)))
        backward.append(Slot(unit, "B", 2 * seconds, held, held + inputs[i] + layer.workspace))
    return (*forward, *reversed(backward))


def _options(layers: Sequence[Layer], names: list[str], rate: float) -> tuple[RecomputeOption, ...]:
    found = []
    for i, layer in enumerate(layers):
        if not layer.cheap:
            continue
        unit, last, entry = names.index(layer.unit), len(layers) - 1, layers[i - 1].output
        for choice, freed, seconds in (
            (FULL, layer.kept - entry, layer.operations / rate),
            (SELECTIVE, layer.cheap, layer.repeated / rate),
        ):
            use = RecomputeUse(i, last - i, freed, seconds, freed + entry + layer.workspace)
            found.append(RecomputeOption(unit, choice, (use,)))
    return tuple(found)


# ---- decoders

_WIDTH = 2  # bytes of an element of an activation


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder.

    - ``layers``: number of blocks. ``width``, ``hidden``: widths of the model and of the MLP.
    - ``heads``, ``kv_heads``: heads of queries, and of keys and values (grouped-query attention).
    - ``vocab``: tokens in the vocabulary. ``tied``: whether the head has the embedding's matrix.
    - ``gated``: whether the MLP has three matrices (SwiGLU) instead of two.
    - ``positions``: rows of a learned position embedding. ``biases``: whether matrices and norms have biases.
    - ``experts``, ``active``: experts of each MLP, and how many of them a token goes to.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    biases: bool = False
    experts: int = 1
    active: int = 1

    def of_batch(
        self, sequences: int, sequence: int, loss_bytes: int = 4, every_second: bool = False
    ) -> tuple[Layer, ...]:
        """Return the layers for a batch of ``sequences`` of ``sequence`` tokens.

        - ``loss_bytes``: bytes of a log-probability: 4 under autocast, 2 in pure 16 bit, 0 with a fused loss.
        - ``every_second``: whether selective recomputation repeats every second matrix product (gated MLPs only).
        """
        w, tokens, matrices = self.width, sequences * sequence, 3 if self.gated else 2
        keys = w * self.kv_heads // self.heads  # width of the keys of a token, and of its values
        attention, mlp = 2 * w**2 + 2 * w * keys, matrices * w * self.hidden
        parameters = attention + self.experts * mlp + 2 * w + (w * self.experts if self.experts > 1 else 0)
        if self.biases:
            parameters += 4 * w + 2 * keys + self.experts * ((matrices - 1) * self.hidden + w)
        inside = (4 if self.gated else 2) * self.hidden * self.active
        # What is cheap: both norms' outputs; of SwiGLU the SiLU and the product, of GELU its output.
        cheap, repeated = _WIDTH * tokens * (2 * w + inside // 2), 0.0
        if every_second:
            cheap = _WIDTH * tokens * (2 * w + keys + 3 * self.hidden)
            repeated = 2.0 * tokens * w * (keys + w + self.hidden)  # keys, output of attention, up
        block = Layer(
            "block", parameters, tokens * (2.0 * (attention + self.active * mlp) + 4.0 * sequence * w),
            kept=_WIDTH * tokens * (6 * w + 2 * keys + inside), output=_WIDTH * tokens * w, cheap=cheap,
            repeated=repeated,
        )  # fmt: skip
        logits = tokens * self.vocab
        return (
            Layer("root", (self.vocab + self.positions) * w, 0.0, output=_WIDTH * tokens * w),
            *(replace(block, unit=f"block.{i}") for i in range(self.layers)),
            Layer(
                "root", (2 if self.biases else 1) * w + (0 if self.tied else self.vocab * w), 2.0 * logits * w,
                kept=_WIDTH * tokens * w + (_WIDTH + loss_bytes) * logits, workspace=max(_WIDTH, loss_bytes) * logits,
            ),
        )  # fmt: skip


# ---- convolutional networks

_FP32 = 4  # bytes of an element
CLASSES = 1000


def _layer(name: str, parts: Sequence[tuple[int, int, int]], batch: int) -> Layer:
    """Return a layer of (parameters, multiply-adds per sample, elements of output per sample) of each of its parts."""
    parameters, products, elements = zip(*parts, strict=True)
    outputs = [_FP32 * batch * each for each in elements]
    return Layer(name, sum(parameters), 2.0 * batch * sum(products), kept=sum(outputs), output=outputs[-1])


def _conv(
    inputs: int, outputs: int, size: int, kernel: tuple[int, int] = (1, 1), norm: bool = True
) -> tuple[int, int, int]:
    weights = kernel[0] * kernel[1] * inputs * outputs
    return weights + (2 if norm else 1) * outputs, weights * size**2, outputs * size**2 * (2 if norm else 1)


def _dense(inputs: int, outputs: int) -> tuple[int, int, int]:
    return (inputs + 1) * outputs, inputs * outputs, outputs


def vgg16(batch: int) -> tuple[Layer, ...]:
    """Return the layers of VGG-16 on images of 224 × 224."""
    layers, inputs, size = [], 3, 224
    for stage, (repeats, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for i in range(repeats):
            layers.append(_layer(f"conv{stage}_{i + 1}", [_conv(inputs, width, size, (3, 3), norm=False)], batch))
            inputs = width
        size //= 2
    dense = ((inputs * size**2, 4096), (4096, 4096), (4096, CLASSES))
    return (*layers, *(_layer(f"fc{6 + i}", [_dense(*shape)], batch) for i, shape in enumerate(dense)))


_REPEATS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(depth: int, batch: int) -> tuple[Layer, ...]:
    """Return the layers of a ResNet on images of 224 × 224."""
    layers = [_layer("conv1", [_conv(3, 64, 112, (7, 7))], batch)]
    inputs, size = 64, 56
    for stage, repeats in enumerate(_REPEATS[depth]):
        width = 64 << stage
        for i in range(repeats):
            entry = size
            size = size // 2 if stage and not i else size
            parts = [_conv(inputs, width, entry), _conv(width, width, size, (3, 3)), _conv(width, 4 * width, size)]
            parts += [_conv(inputs, 4 * width, size)] if not i else []
            inputs = 4 * width
            layers.append(_layer(f"conv{stage + 2}_{i + 1}", parts, batch))
    return (*layers, _layer("fc", [_dense(inputs, CLASSES)], batch))


_Branch = tuple[tuple[int, tuple[int, int]], ...]
"""(outputs, kernel) of the convolutions of a branch, one after the other."""


def _factored(*outputs: int) -> _Branch:
    """Convolutions of 1 × 7 and 7 × 1 in turns."""
    return tuple((width, (1, 7) if i % 2 == 0 else (7, 1)) for i, width in enumerate(outputs))


def inception_v3(batch: int) -> tuple[Layer, ...]:
    """Return the layers of Inception V3 on images of 299 × 299."""

    def block(inputs: int, size: int, *branches: _Branch) -> list[tuple[int, int, int]]:
        parts = []
        for branch in branches:
            width = inputs
            for outputs, kernel in branch:
                parts.append(_conv(width, outputs, size, kernel))
                width = outputs
        return parts

    def s(outputs: int, k: int = 1) -> tuple[int, tuple[int, int]]:
        return outputs, (k, k)

    stem = [(3, 32, 149, 3), (32, 32, 147, 3), (32, 64, 147, 3), (64, 80, 73, 1), (80, 192, 71, 3)]
    layers = [(f"stem_{i}", [_conv(a, b, size, (k, k))]) for i, (a, b, size, k) in enumerate(stem, 1)]
    for i, (inputs, pool) in enumerate(((192, 32), (256, 64), (288, 64))):
        branches = ((s(64),), (s(48), s(64, 5)), (s(64), s(96, 3), s(96, 3)), (s(pool),))
        layers.append((f"mixed_5{'bcd'[i]}", block(inputs, 35, *branches)))
    reduced = block(288, 17, (s(384, 3),)) + block(288, 35, (s(64), s(96, 3))) + block(96, 17, (s(96, 3),))
    layers.append(("mixed_6a", reduced))
    for i, c in enumerate((128, 160, 160, 192)):
        parts = block(768, 17, (s(192),), (s(c), *_factored(c, 192)), (s(c), *_factored(c, c, c, 192)), (s(192),))
        layers.append((f"mixed_6{'bcde'[i]}", parts))
    reduced = block(768, 17, (s(192),), (s(192), *_factored(192, 192)))
    layers.append(("mixed_7a", reduced + block(192, 8, (s(320, 3),), (s(192, 3),))))
    side_by_side = [_conv(384, 384, 8, (1, 3)), _conv(384, 384, 8, (3, 1))]
    for i, inputs in enumerate((1280, 2048)):
        parts = block(inputs, 8, (s(320),), (s(384),), (s(448), s(384, 3)), (s(192),)) + 2 * side_by_side
        layers.append((f"mixed_7{'bc'[i]}", parts))
    return (*(_layer(name, parts, batch) for name, parts in layers), _layer("fc", [_dense(2048, CLASSES)], batch))
