"""The global norm of gradients, which no cut changes: neither strategies, nor blocks, nor the number of ranks.

A sum of floats depends on the order of adding, and so on the plan. Here squares are added as integers, which are exact in any
order. Relative to the largest element of all ranks a square has 52 bits, in two halves; what it loses is less than 2⁻⁵² of the
largest square. (torch's norm of float32 rounds every partial sum to 24 bits.)

The three steps leave the collectives to the caller: the largest element (MAX), the sums (SUM), and the norm, which every rank
computes from the same numbers. The host waits for no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_ELEMENTS = {"cpu": 1 << 14}
_MANY = 1 << 20
"""Elements that are squared at once, by device type: what a CPU's cache holds, and few kernels elsewhere."""

_HALF = 2.0**26
"""Half of a square. Each sum of halves is exact in float64: of at most 2²⁰ integers below 2²⁷."""

_ROOT = 2.0**13
_LARGEST = 2.0**1000
"""Elements beyond this count as infinite: only float64 has them, and no square of them."""


def workspace(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Scratch for :func:`squares`: [2, elements] in float64, for no more elements than the longest gradient has."""
    longest = max((gradient.numel() for gradient in gradients), default=0)
    return torch.empty(2, min(longest, _ELEMENTS.get(device.type, _MANY)), dtype=torch.float64, device=device)


def largest(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """[2] in float64: the largest absolute value (infinite where there is NaN), and 1 if there is NaN.

    The MAX over ranks is that of all their gradients.
    """
    ends = [end.double() for gradient in gradients for end in torch.aminmax(gradient)]
    top = torch.stack(ends).abs().max() if ends else torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([top.nan_to_num(nan=math.inf, posinf=math.inf), top.isnan().double()])


def squares(gradients: Iterable[Tensor], largest: Tensor, work: Tensor) -> Tensor:
    """[2] in int64: the sums of the upper and the lower halves of the squares, relative to the ``largest`` element.

    The SUM over ranks is that of all their gradients.
    """
    factor = _ROOT / _power(largest)
    total = torch.zeros(2, dtype=torch.int64, device=work.device)
    for gradient in gradients:
        for piece in gradient.split(work.shape[1]):
            low, high = halves = work[:, : piece.numel()]
            low.copy_(piece).mul_(factor).square_()  # below _HALF, and exact for elements of up to 26 bits
            torch.floor(low, out=high)
            low.sub_(high).mul_(_HALF).round_()
            total += halves.sum(1).long()
    return total.flip(0)


def norm(largest: Tensor, squares: Tensor) -> Tensor:
    """The 2-norm, in float64; as torch's, infinite or NaN if an element is."""
    high, low = squares.double()
    found = (high + low / _HALF).sqrt() * (_power(largest) / _ROOT)
    top, has_nan = largest
    return torch.where(top > _LARGEST, torch.where(has_nan > 0, math.nan, math.inf), found)


def _power(largest: Tensor) -> Tensor:
    """The least power of two above the largest element: exact, which exp2 need not be."""
    top = largest[0].clamp(1 / _LARGEST, _LARGEST)
    return top / torch.frexp(top).mantissa
