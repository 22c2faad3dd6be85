"""Recomputation: what a profile knows of units that free their activations and compute them again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE, FULL, SELECTIVE = "none", "full", "selective"
CHOICES = NONE, FULL, SELECTIVE
"""Choices of activations that a unit keeps between forward and backward: all, its inputs only, or its inputs and the
outputs of matrix products and attention."""
REASONS = "recompute"
"""Key of ``Profile.about``: units that keep their activations, each with the reason."""


@dataclass(frozen=True)
class RecomputeUse:
    """One forward use of a unit whose activations are computed again, and the backward of this use.

    - ``forward``, ``backward``: indices into the forward and backward slots of a micro-step.
    - ``freed``: bytes less from the end of the forward slot to the start of the backward slot.
    - ``seconds``: growth of the backward slot.
    - ``peak``: the most bytes of activations and workspace during the backward slot, above its new ``live``.
    - ``forward_peak``: growth of the forward slot's peak; usually negative.

    Raises ValueError for another number that is negative.
    """

    forward: int
    backward: int
    freed: int
    seconds: float
    peak: int
    forward_peak: int = 0

    def __post_init__(self) -> None:
        if min(self.forward, self.backward, self.freed, self.seconds, self.peak) < 0:
            raise ValueError(f"recomputation has slots, bytes and seconds >= 0, got {self}")


@dataclass(frozen=True)
class RecomputeOption:
    """An alternative to keeping all activations of a unit: ``choice`` is full or selective; ``uses`` are computed
    again.

    Raises ValueError for another choice, and without uses.
    """

    unit: int
    choice: str
    uses: tuple[RecomputeUse, ...]

    def __post_init__(self) -> None:
        if self.choice not in (FULL, SELECTIVE):
            raise ValueError(f"recomputation is {FULL} or {SELECTIVE}, got {self.choice!r}")
        if not self.uses:
            raise ValueError(f"unit {self.unit}: recomputation {self.choice} has no uses")

    @property
    def seconds(self) -> float:
        """Seconds that a micro-step grows by."""
        return sum(use.seconds for use in self.uses)

    @property
    def freed(self) -> int:
        """Bytes freed between forward and backward, of all uses together."""
        return sum(use.freed for use in self.uses)


def uniform(options: Sequence[RecomputeOption], units: int, choice: str) -> tuple[str, ...]:
    """Return this choice for every unit that has an option for it, and none for the others."""
    having = {option.unit for option in options if option.choice == choice}
    return tuple(choice if u in having else NONE for u in range(units))
