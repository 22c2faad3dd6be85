"""Parse budgets: `10%` over the floor, `300MiB` or `1.5GiB` per rank, or `none`. A number needs its unit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mdcs.sizes import GIB, MIB

_WORDS = re.compile(r"([\d.]+(?:e[+-]?\d+)?) ?(%|MiB|GiB)")


@dataclass(frozen=True)
class Budget:
    """A budget per rank in GiB, or as a share of the floor on top of the floor. Both None: no limit."""

    gib: float | None = None
    over_floor: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a budget. Raises ValueError."""
        if text == "none":
            return cls()
        if words := _WORDS.fullmatch(text):
            number, unit = words.groups()
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if unit == "%" and 0 <= value < math.inf:
                return cls(over_floor=value / 100)
            if unit != "%" and 0 < value < math.inf:
                return cls(gib=value * MIB / GIB if unit == "MiB" else value)
        raise ValueError(f"a budget is 10% (over the floor), 300MiB, 1.5GiB or none, with its unit; got {text}")

    def bytes(self, floor: int) -> int | None:
        """Bytes of the budget per rank, given the floor in bytes; None without a limit."""
        if self.gib is not None:
            return int(self.gib * GIB)
        return None if self.over_floor is None else int(floor * (1 + self.over_floor))

    def __str__(self) -> str:
        if self.gib is not None:
            return f"{self.gib:g} GiB" if self.gib >= 0.1 else f"{self.gib * GIB / MIB:.4g} MiB"
        return "none" if self.over_floor is None else f"{self.over_floor * 100:g}%"

    @property
    def overrides(self) -> list[str]:
        """The config overrides that set this budget."""
        values = {"budget.gib": self.gib, "budget.over_floor": self.over_floor}
        return [f"{key}={value}" for key, value in values.items() if value is not None]
