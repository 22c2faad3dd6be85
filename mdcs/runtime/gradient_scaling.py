"""The factor on reduced gradients before their update: dynamic loss scaling, and clipping of the global norm.

Loss scaling is for float16, which would lose small gradients. As torch.amp.GradScaler: if any gradient of any rank
overflows, the scale is halved and the update skipped; after many updates without overflow it is doubled (Micikevicius
et al., "Mixed Precision Training", 2018).

The norm is bit for bit independent of strategies, blocks and the number of ranks. A sum of floats depends on the order
of addition, and so on the plan. The squares are therefore summed in float64, in any order, with a bound on the error,
and the norm is rounded to float32. All sums within the bound round alike, except in about one of 1000 steps. Then, and
always for float64 gradients, the squares are summed exactly, as integers. The host must read the bounds to know this.
It does so on a CPU; elsewhere it would have to wait for the device. There the norms of two plans may differ in the last
bit of float32: sums in other orders differ by 10⁻¹⁶ to 10⁻¹⁵ of the norm, so in one step of 10⁷ to 10⁹ (an estimate).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.runtime.storage import UnitStorage
from mdcs.torch_compat import norms_in_float64

_FACTOR = 2.0


@dataclass
class LossScale:
    """``value``: factor on the loss; it doubles after ``growth_interval`` updates in a row without overflow.
    ``skipped``: number of updates left out. Raises ValueError unless positive and finite, and for an interval below 1.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    skipped: int = 0  # updates
    growth_tracker: int = 0  # updates in a row without overflow

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise ValueError(f"a loss scale must be > 0 and finite, got {self.value}")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval must be >= 1, got {self.growth_interval}")

    def update(self, is_finite: bool) -> None:
        """Adapt the scale to an iteration whose gradients are finite, or not."""
        self.growth_tracker = self.growth_tracker + 1 if is_finite else 0
        if not is_finite:
            self.skipped += 1
            self.value /= _FACTOR
        elif self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            self.value *= _FACTOR


class Scaler:
    """torch.amp.GradScaler's calls, with its state, for a loop that keeps its lines. ``scale``: None: not enabled."""

    def __init__(self, scale: LossScale | None, step: Callable[[torch.optim.Optimizer], object]) -> None:
        self._scale, self._step = scale, step

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss [scalar] to call ``backward`` on; ``loss`` itself where there is no ``loss_scale``."""
        return loss if self._scale is None else loss * self._scale.value

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients are unscaled before they are clipped."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """End an iteration, as ``optimizer.step()``. It updates nothing if a gradient overflowed on any rank."""
        self._step(optimizer)

    def update(self) -> None:
        """Do nothing: the scale adapts when the gradients are reduced."""

    def is_enabled(self) -> bool:
        """Return whether the run has a ``loss_scale``."""
        return self._scale is not None

    def get_scale(self) -> float:
        """Return the factor on the loss: of the next backward pass once updates are done."""
        return 1.0 if self._scale is None else self._scale.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's."""
        scale = self._scale
        return {} if scale is None else {
            "scale": scale.value, "growth_factor": _FACTOR, "backoff_factor": 1 / _FACTOR,
            "growth_interval": scale.growth_interval, "_growth_tracker": scale.growth_tracker,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of this one or of torch's. Raises ValueError for other factors than 2 and 1/2."""
        if self._scale is None:
            return
        if (state["growth_factor"], state["backoff_factor"]) != (_FACTOR, 1 / _FACTOR):
            raise ValueError("a loss scale is doubled and halved: growth_factor must be 2, backoff_factor 0.5")
        self._scale.value, self._scale.growth_interval = state["scale"], state["growth_interval"]
        self._scale.growth_tracker = state["_growth_tracker"]


class UpdateScale:
    """Undoes the loss scale of reduced gradients and clips their global norm, as torch's clip_grad_norm_ does.

    - ``control``: the process group of the norm's all-reduces; None for one rank.
    - ``runs_ahead``: whether the host would wait for the device if it read the norm.
    - ``norm``: the last global norm, in the gradients' precision, but at least float32; None before the first.
    """

    def __init__(
        self, storages: Sequence[UnitStorage], control: dist.ProcessGroup | None, clip_norm: float | None,
        loss_scale: LossScale | None, runs_ahead: bool,
    ) -> None:  # fmt: skip
        self._storages, self._control = storages, control
        self._clip_norm, self._loss_scale = clip_norm, loss_scale
        self.is_needed = clip_norm is not None or loss_scale is not None
        self.norm: Tensor | None = None
        wide = any(s.gradient_dtype == torch.float64 for s in storages if s.trainable)
        self._dtype = torch.float64 if wide else torch.float32
        self._may_read = wide or not runs_ahead

    def workspace(self, gradients: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """Return the scratch memory [elements] of :meth:`factor`, in float64."""
        return workspace(self._counted(gradients), self._storages[0].device)

    def factor(self, gradients: Mapping[tuple[int, int], Tensor], work: Tensor) -> tuple[bool, Tensor | None]:
        """Return (all gradients are finite, factor on the gradients). A GPU's norm is read only for a loss scale.

        ``gradients``: (unit, block) -> this rank's part, flat; of the ranks that have the same part only the first
        counts it. ``work``: of :meth:`workspace`.
        """
        counted = self._counted(gradients)
        least, total, largest = with_bounds(self._reduced(sum_squares(counted, work)), self._dtype)
        if self._may_read and bool(least < largest):
            total.fill_(exact_norm(self._reduced(count_squares(counted, work))))
        undo, is_finite = 1.0, True
        if self._loss_scale is not None:
            is_finite, undo = math.isfinite(float(total)), 1 / self._loss_scale.value
            self._loss_scale.update(is_finite)
        self.norm = total * undo
        if not is_finite:
            return False, None
        if self._clip_norm is None:
            return True, torch.full_like(total, undo)
        return True, (self._clip_norm / (self.norm + 1e-6)).clamp(max=1.0) * undo

    def _counted(self, gradients: Mapping[tuple[int, int], Tensor]) -> list[Tensor]:
        return [g for (u, _), g in gradients.items() if self._storages[u].replica[0] == 0]

    def _reduced(self, value: Tensor) -> Tensor:
        if self._control is not None:
            dist.all_reduce(value, group=self._control)
        return value


# ---- the norm

_ELEMENTS = 1 << 18  # squared at once on a CPU, whose cache has room for their copy in float64
_ROUNDING = 2.0**-53  # largest relative error of an addition in float64
_LOW = 27  # bits of the lower half of a square's 53 bits
_SHIFT = 1099
"""Added to the exponents of squares (-1073 to 1024) to count them from 0; odd, so that the root's exponent is whole."""


def workspace(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return scratch for the sums: [elements] in float64, no longer than the longest gradient; none on a GPU."""
    longest = max((gradient.numel() for gradient in gradients), default=0)
    return torch.empty(min(longest, _ELEMENTS) if device.type == "cpu" else 0, dtype=torch.float64, device=device)


def sum_squares(gradients: Sequence[Tensor], work: Tensor) -> Tensor:
    """Return [sum of squares, number of partial sums] in float64; squares are exact, but for float64's. Reduce: SUM."""
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
    """Return int64 [2, exponents]: by exponent the sums of the squares' upper and lower bits. Reduce with SUM. Frees
    ``work``, and takes no more memory than that.
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
    """Return the root of the exact sum of squares, its last bit set where bits are cut off: float32 rounds it right."""
    total = sum(((high << _LOW) + low) << place for place, (high, low) in enumerate(zip(*counts.tolist(), strict=True)))
    total <<= 128  # a root of at least 64 bits
    root = math.isqrt(total)
    cut = max(0, root.bit_length() - 53)
    is_inexact = root * root != total or root & ((1 << cut) - 1) != 0
    return math.ldexp(root >> cut | is_inexact, cut - (128 + 53 + _SHIFT) // 2)
