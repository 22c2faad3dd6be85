"""The global norm of gradients, bit for bit independent of strategies, blocks and the number of ranks.

A sum of floats depends on the order of addition, and so on the plan. Here squares are added as integers, exact in any
order. Relative to the largest element of all ranks a square has 52 bits, in two halves; the rounding error is below
2⁻⁵² of the largest square. (torch's norm of float32 rounds every partial sum to 24 bits.)

The caller runs the collectives between three steps: the largest element (MAX), the sums (SUM), and the norm, which
every rank computes from the same numbers. The host does not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_ELEMENTS = {"cpu": 1 << 14}
_MANY = 1 << 20
"""Elements squared at once, by device type: a CPU's cache holds them; elsewhere there are few kernels."""

_HALF = 2.0**26
"""Scale of half a square (26 bits). Each sum of halves is exact in float64: at most 2²⁰ integers below 2²⁷."""

_ROOT = 2.0**13
_LARGEST = 2.0**1000
"""Elements beyond this count as infinite: only float64 has them, and their squares overflow."""


def workspace(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return scratch for :func:`squares`: [2, elements] in float64, no longer than the longest gradient."""
    longest = max((gradient.numel() for gradient in gradients), default=0)
    return torch.empty(2, min(longest, _ELEMENTS.get(device.type, _MANY)), dtype=torch.float64, device=device)


def largest(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return [largest absolute value (infinite where there is NaN), 1 if there is NaN] in float64.

    Reduce with MAX over ranks.
    """
    ends = [end.double() for gradient in gradients for end in torch.aminmax(gradient)]
    top = torch.stack(ends).abs().max() if ends else torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([top.nan_to_num(nan=math.inf, posinf=math.inf), top.isnan().double()])


def squares(gradients: Iterable[Tensor], largest: Tensor, work: Tensor) -> Tensor:
    """Return [upper, lower] in int64: sums of the halves of the squares, relative to the ``largest`` element.

    Reduce with SUM over ranks.
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
    """Return the 2-norm in float64; infinite or NaN if an element is, as torch's."""
    high, low = squares.double()
    found = (high + low / _HALF).sqrt() * (_power(largest) / _ROOT)
    top, has_nan = largest
    return torch.where(top > _LARGEST, torch.where(has_nan > 0, math.nan, math.inf), found)


def _power(largest: Tensor) -> Tensor:
    """Return the least power of two above the largest element; exact, which exp2 need not be."""
    top = largest[0].clamp(1 / _LARGEST, _LARGEST)
    return top / torch.frexp(top).mantissa
