"""Names for sizes, budgets in words, and the padding of parameters. Every size in mdcs is in bytes."""

import re
from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": 1, "kib": 1 << 10, "mib": MIB, "gib": GIB, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True)
class Share:
    """A budget relative to what data parallelism without sharding needs: 0.7 for 70 %."""

    fraction: float

    def of(self, whole: int) -> int:
        """Return the budget in bytes where data parallelism needs ``whole`` bytes."""
        return int(self.fraction * whole)


def budget_of(budget: int | str | None) -> int | Share | None:
    """Return a budget that is given in bytes, as ``"40 GiB"`` (also KiB, MiB, TiB, KB, MB, GB, TB), or as ``"70%"``.

    A percentage is relative to what data parallelism without sharding (DDP) needs. None is no budget. Raises ValueError
    for other texts, and for a budget that is not above 0.
    """
    if budget is None or isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[a-z]*)\s*", budget.lower()) if isinstance(budget, str) else None
    if found is not None and float(found[1]) > 0:
        if found[2] == "%":
            return Share(float(found[1]) / 100)
        if found[2] in _UNITS:
            return int(float(found[1]) * _UNITS[found[2]])
    raise ValueError(
        "budget must be bytes, such as 6 * 2**20, a size, such as '40 GiB', or a part of what DDP needs, such as '70%'; "
        f"got {budget!r}"
    )


_APART = 8
"""Elements, 16 bytes or more: what vector loads and fast kernels want a tensor to begin at."""


def aligned(numel: int) -> int:
    """Return the elements that a parameter takes in a flat buffer, with the padding up to the next parameter."""
    return -(-numel // _APART) * _APART
