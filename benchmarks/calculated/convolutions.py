"""Convolutional networks as layers, from their tables: VGG-16, ResNet-50, 101 and 152, Inception V3.

A convolution of k × l from c to d channels on an output of s × s has k · l · c · d parameters and as many multiply-adds
for each of the s² places; batch normalization adds 2 d parameters. What backward needs is its input and output, in
fp32. Layers are the units that a training loop reduces together: convolutions of VGG, bottlenecks of ResNet, blocks of
Inception.

Tables: Simonyan and Zisserman 2014 (https://arxiv.org/abs/1409.1556), He et al. 2015
(https://arxiv.org/abs/1512.03385), Szegedy et al. 2015 (https://arxiv.org/abs/1512.00567), without its auxiliary head.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.calculated.layers import Layer

_WIDTH = 4  # bytes of an element
CLASSES = 1000


def _layer(name: str, parts: Sequence[tuple[int, int, int]], batch: int) -> Layer:
    """Return a layer of (parameters, multiply-adds per sample, elements of output per sample) of each of its parts."""
    outputs = [_WIDTH * batch * elements for _, _, elements in parts]
    return Layer(
        name,
        sum(parameters for parameters, _, _ in parts),
        2.0 * batch * sum(products for _, products, _ in parts),
        kept=sum(outputs),
        output=outputs[-1],
    )


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
    """Return the layers of a ResNet of 50, 101 or 152 layers on images of 224 × 224. Raises ValueError for another
    depth."""
    if depth not in _REPEATS:
        raise ValueError(f"ResNet has a depth of {', '.join(map(str, _REPEATS))}, got {depth}")
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


def _square(outputs: int, k: int = 1) -> tuple[int, tuple[int, int]]:
    return outputs, (k, k)


def _factored(*outputs: int) -> _Branch:
    """Convolutions of 1 × 7 and 7 × 1 in turns."""
    return tuple((width, (1, 7) if i % 2 == 0 else (7, 1)) for i, width in enumerate(outputs))


def _split(width: int) -> list[tuple[int, int, int]]:
    """Two convolutions of 1 × 3 and 3 × 1 side by side, on 8 × 8."""
    return [_conv(width, 384, 8, (1, 3)), _conv(width, 384, 8, (3, 1))]


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

    s = _square
    stem = [(3, 32, 149, 3), (32, 32, 147, 3), (32, 64, 147, 3), (64, 80, 73, 1), (80, 192, 71, 3)]
    layers = [(f"stem_{i}", [_conv(a, b, size, (k, k))]) for i, (a, b, size, k) in enumerate(stem, 1)]
    for i, (inputs, pool) in enumerate(((192, 32), (256, 64), (288, 64))):
        branches = ((s(64),), (s(48), s(64, 5)), (s(64), s(96, 3), s(96, 3)), (s(pool),))
        layers.append((f"mixed_5{'bcd'[i]}", block(inputs, 35, *branches)))
    layers.append(
        ("mixed_6a", block(288, 17, (s(384, 3),)) + block(288, 35, (s(64), s(96, 3))) + block(96, 17, (s(96, 3),)))
    )
    for i, c in enumerate((128, 160, 160, 192)):
        parts = block(768, 17, (s(192),), (s(c), *_factored(c, 192)), (s(c), *_factored(c, c, c, 192)), (s(192),))
        layers.append((f"mixed_6{'bcde'[i]}", parts))
    reduced = block(768, 17, (s(192),), (s(192), *_factored(192, 192)))
    layers.append(("mixed_7a", reduced + block(192, 8, (s(320, 3),), (s(192, 3),))))
    for i, inputs in enumerate((1280, 2048)):
        parts = block(inputs, 8, (s(320),), (s(384),), (s(448), s(384, 3)), (s(192),)) + _split(384) + _split(384)
        layers.append((f"mixed_7{'bc'[i]}", parts))
    return (*(_layer(name, parts, batch) for name, parts in layers), _layer("fc", [_dense(2048, CLASSES)], batch))
