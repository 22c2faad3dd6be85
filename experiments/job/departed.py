"""Departures of a run's steps from its plan, and their costs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any


class Departed:
    """Counts steps by their departures, and compares their times with those of the other steps."""

    def __init__(self) -> None:
        self.steps = 0
        self._counts: Counter[str] = Counter()  # steps, by what they did
        self._departing: list[float] = []
        self._others: list[float] = []

    def add(self, step_s: float, departures: Mapping[str, int]) -> None:
        """Count a step."""
        self.steps += 1
        self._counts.update(list(departures))
        (self._departing if departures else self._others).append(step_s)

    @property
    def cost_s(self) -> float | None:
        """Seconds that departing steps took beyond the median of the others; None if all or none departed."""
        if not self._departing or not self._others:
            return None
        return sum(self._departing) - len(self._departing) * statistics.median(self._others)

    def words(self) -> list[str]:
        """The departures in words, the most frequent first: "2 of 100 steps left out layers.3"."""
        return [f"{count} of {self.steps} steps {what}" for what, count in self._counts.most_common()]

    def summary(self) -> dict[str, Any]:
        """Values for the summary; empty if no step departed."""
        words = self.words()
        return {"departures": words, "departures_cost_s": self.cost_s} if words else {}

    def line(self) -> str:
        """The most frequent departure, the number of other ones, and the seconds; empty if there is none."""
        words, cost = self.words(), self.cost_s
        if not words:
            return ""
        others = f" and {len(words) - 1} more" if len(words) > 1 else ""
        return f"{words[0]}{others}" + ("" if cost is None else f" ({cost:+.2f} s in all)")
