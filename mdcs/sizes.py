"""Names for sizes, budgets in words, and the padding of parameters. Every size in mdcs is in bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1, "kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_WORDS = re.compile(r"(floor ?\+)? ?([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?) ?(%|[a-z]*)( of ddp)?")


@dataclass(frozen=True)
class Budget:
    """A budget per rank as people type it: ``40GiB``, ``75% of ddp``, ``floor+10%``, or ``none``.

    One of these is given; all None: no limit. ``size``: bytes. ``of_ddp``: part of what data parallelism without
    sharding (DDP) needs, 0.75 for 75 %. ``over_floor``: part of the floor, the smallest feasible peak, that is added
    to it.
    """

    size: int | None = None
    of_ddp: float | None = None
    over_floor: float | None = None

    @classmethod
    def of(cls, given: Budget | int | str | None) -> Budget:
        """Return what is given in bytes or in words. None is no limit.

        Sizes are bytes, KiB, MiB, GiB, TiB, KB, MB, GB or TB. ``75%`` is ``75% of ddp``. Raises ValueError for other
        texts, and for a budget that is not above 0.
        """
        if isinstance(given, Budget):
            return given
        if given is None or isinstance(given, str) and given.strip().lower() == "none":
            return cls()
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return cls(given)
        words = _WORDS.fullmatch(" ".join(given.lower().split())) if isinstance(given, str) else None
        if words is not None and (number := float(words[2])) < math.inf:
            if words[1]:
                if words[3] == "%" and not words[4]:
                    return cls(over_floor=number / 100)
            elif words[3] == "%" and number > 0:
                return cls(of_ddp=number / 100)
            elif words[3] in _UNITS and not words[4] and (size := int(number * _UNITS[words[3]])) > 0:
                return cls(size)
        raise ValueError(
            "budget must be a size, such as 40GiB, a part of what DDP needs, such as 75% of ddp, a part above the "
            f"smallest possible, such as floor+10%, or none; got {given!r}"
        )

    @property
    def is_limit(self) -> bool:
        """Return whether there is a limit."""
        return self != Budget()

    def bytes(self, ddp: Callable[[], int], floor: Callable[[], int]) -> int | None:
        """Return the limit in bytes; None: no limit. ``ddp`` and ``floor`` return the bytes that DDP needs, and the
        floor; only what is needed is called.
        """
        if self.of_ddp is not None:
            return int(self.of_ddp * ddp())
        return self.size if self.over_floor is None else int((1 + self.over_floor) * floor())

    def __str__(self) -> str:
        if self.of_ddp is not None:
            return f"{100 * self.of_ddp:.12g}% of ddp"
        if self.over_floor is not None:
            return f"floor+{100 * self.over_floor:.12g}%"
        if self.size is None:
            return "none"
        exact = (f"{self.size / unit:.6g}{name}" for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")))
        return next((text for text in exact if Budget.of(text) == self), str(self.size))


_APART = 8  # elements, 16 bytes or more: what vector loads and fast kernels want a tensor to begin at


def aligned(numel: int) -> int:
    """Return the elements that a parameter takes in a flat buffer, with the padding up to the next parameter."""
    return -(-numel // _APART) * _APART
