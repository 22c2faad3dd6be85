"""Dynamic loss scaling for float16, which would lose small gradients.

As torch.amp.GradScaler: if any gradient of any rank overflows, the scale is halved and the update skipped; after many
updates without overflow it is doubled (Micikevicius et al., "Mixed Precision Training", 2018).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """``value``: factor on the loss; it doubles after ``growth_interval`` updates in a row without overflow.

    ``skipped``: number of updates left out. Raises ValueError for a scale that is not positive and finite, and for an
    interval below 1.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    skipped: int = 0  # updates
    _good: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise ValueError(f"a loss scale must be > 0 and finite, got {self.value}")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval must be >= 1, got {self.growth_interval}")

    def update(self, is_finite: bool) -> None:
        """Adapt the scale to an iteration whose gradients are finite, or not."""
        self._good = self._good + 1 if is_finite else 0
        if not is_finite:
            self.skipped += 1
            self.value /= 2
        elif self._good == self.growth_interval:
            self._good = 0
            self.value *= 2
