"""The global norm of gradients, bit for bit independent of strategies, blocks and the number of ranks.

A sum of floats depends on the order of addition, and so on the plan. The squares are therefore summed in float64, in
any order, with a bound on the error, and the norm is rounded to float32. All sums within the bound round alike, except
in about one of 1000 steps. Then, and always for float64 gradients, the squares are summed exactly, as integers.

The host must read the bounds to know this. It does so on a CPU; elsewhere it would have to wait for the device. There
the norms of two plans may differ in the last bit of float32. An estimate (not measured): sums in other orders differ by
10⁻¹⁶ to 10⁻¹⁵ of the norm, so this is one step in 10⁷ to 10⁹.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mdcs.torch_compat import norms_in_float64

_ELEMENTS = 1 << 18
"""Elements squared at once on a CPU, whose cache has room for their copy in float64."""

_ROUNDING = 2.0**-53
"""Largest relative error of an addition in float64."""

_LOW = 27
"""Bits of the lower half of a square's 53 bits."""

_SHIFT = 1099
"""Added to the exponents of squares (-1073 to 1024) to count them from 0; odd, so that the root's exponent is whole."""


def workspace(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return scratch for the sums: [elements] in float64, no longer than the longest gradient; none on a GPU."""
    longest = max((gradient.numel() for gradient in gradients), default=0)
    return torch.empty(min(longest, _ELEMENTS) if device.type == "cpu" else 0, dtype=torch.float64, device=device)


def sum_squares(gradients: Sequence[Tensor], work: Tensor) -> Tensor:
    """Return [sum of squares, number of partial sums] in float64. Reduce with SUM over ranks.

    The squares themselves are exact, but for those of float64.
    """
    if not gradients:
        return work.new_zeros(2)
    if work.device.type == "cpu":
        pieces = [piece for gradient in gradients for piece in gradient.split(_ELEMENTS)]
        norms = [torch.linalg.vector_norm(work[: piece.numel()].copy_(piece)) for piece in pieces]
    else:
        norms = norms_in_float64(gradients)
    squares = torch.stack(norms).square()
    return torch.stack([squares.sum(), squares.new_full((), squares.numel())])


def with_bounds(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [least, nearest, largest] norm that these sums of all ranks allow, each rounded to ``dtype``.

    A sum has at most ``_ELEMENTS`` roundings; then the partial sums are added, and the root is taken.
    """
    squares, count = total
    error = (count + (_ELEMENTS + 16)) * _ROUNDING
    return (squares * torch.stack([1 - error, torch.ones_like(error), 1 + error])).sqrt().to(dtype)


def count_squares(gradients: Sequence[Tensor], work: Tensor) -> Tensor:
    """Return int64 [2, exponents]: by exponent the sums of the squares' upper and lower bits. Reduce with SUM over
    ranks.

    Frees ``work``, and takes no more memory than that.
    """
    counts = torch.zeros(2, 2 * _SHIFT, dtype=torch.int64, device=work.device)
    elements = work.numel() // 8 or _ELEMENTS // 8
    work.untyped_storage().resize_(0)
    for gradient in gradients:
        for piece in gradient.split(elements):
            mantissa, exponent = torch.frexp(piece.double().square())
            places, high = exponent.long() + _SHIFT, mantissa.mul_(2.0 ** (53 - _LOW)).floor()
            counts[0].index_add_(0, places, high.long())
            counts[1].index_add_(0, places, mantissa.sub_(high).mul_(2.0**_LOW).long())
    return counts


def exact_norm(counts: Tensor) -> float:
    """Return the root of the exact sum of squares. Its last bit is set where bits are cut off: rounded to float32, it
    is the rounded norm.
    """
    total = sum(((high << _LOW) + low) << place for place, (high, low) in enumerate(zip(*counts.tolist(), strict=True)))
    total <<= 128  # a root of at least 64 bits
    root = math.isqrt(total)
    cut = max(0, root.bit_length() - 53)
    is_inexact = root * root != total or root & ((1 << cut) - 1) != 0
    return math.ldexp(root >> cut | is_inexact, cut - (128 + 53 + _SHIFT) // 2)
