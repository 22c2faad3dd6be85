"""Recomputation in the integer programs: one binary column per unit and option, and what follows from them.

Of the units' choices (:func:`mdcs.plan.job.recomputing`) the bytes of a slot are linear, except that a slot's peak
is the largest of several terms: then there are several rows. For w[u,c], Σ_c w[u,c] <= 1::

    live'    = live - Σ freed·w                                    options whose uses span the slot
    live' + (peak - live)·(1 - Σ w of options that recompute in the slot) + Σ growth·w of options of a forward use
          + Σ_c peak[u,c]·w[u,c]                                    for every unit u that recomputes in the slot

No row asks for more bytes than the slots of the choices have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.solver import IntegerProgram, Terms
from mdcs.profile.recompute import NONE, RecomputeOption

Need = tuple[Terms, int]
"""Terms and a constant whose sum is at most the bytes of activations and workspace."""


class RecomputeColumns:
    """The columns of a problem's options. There are none unless the problem decides what is recomputed.

    - ``second``: cost of a second in the program.
    """

    def __init__(self, program: IntegerProgram, problem: PlanningProblem, second: float = 1.0) -> None:
        profile = self._profile = problem.job.profile if problem.recomputes else problem.profile
        options = profile.recompute if problem.recomputes else ()
        costs = [second * problem.job.micro_steps * option.seconds for option in options]
        self.columns = {o: program.column(cost, integer=True) for o, cost in zip(options, costs, strict=True)}
        by_unit: dict[int, Terms] = defaultdict(list)
        self._freed, self._grown, self._higher = (defaultdict[int, Terms](list) for _ in range(3))
        self._peaks: dict[int, dict[int, Terms]] = defaultdict(lambda: defaultdict(list))  # slot -> unit -> terms
        for option, x in self.columns.items():
            by_unit[option.unit].append((x, 1.0))
            self._add(option, x)
        for terms in by_unit.values():
            program.at_most(terms, 1.0)

    def _add(self, option: RecomputeOption, x: int) -> None:
        first, peaks = self._profile.forward_slots, dict[int, int]()
        for use in option.uses:
            backward = first + use.backward
            for s in range(use.forward + 1, backward + 1):
                self._freed[s].append((x, -float(use.freed)))
            self._grown[backward].append((x, use.seconds))
            self._higher[use.forward].append((x, float(use.forward_peak)))
            peaks[backward] = max(peaks.get(backward, 0), use.peak)
        for s, peak in peaks.items():
            self._peaks[s][option.unit].append((x, float(peak)))

    def grown(self, place: int) -> Terms:
        """Return the seconds by which a slot of the profile grows."""
        return self._grown.get(place, [])

    def freed(self, place: int) -> float:
        """Return the most bytes that choices can free in a slot of the profile."""
        return -sum(c for _, c in self._freed.get(place, ()))

    def live(self, place: int) -> Need:
        """Return the bytes when a slot of the profile begins."""
        return self._freed.get(place, []), self._profile.slots[place].live

    def peaks(self, place: int) -> list[Need]:
        """Return terms of which the largest is the peak of a slot of the profile."""
        freed, slot = self._freed.get(place, []), self._profile.slots[place]
        recomputed = self._peaks.get(place, {})
        more = float(slot.peak - slot.live)
        without = [*freed, *self._higher.get(place, []), *((x, -more) for own in recomputed.values() for x, _ in own)]
        needs = [([*without, *own], slot.peak) for own in recomputed.values()] or [(without, slot.peak)]
        return needs if all(c >= 0 for _, c in self._higher.get(place, [])) else [*needs, self.live(place)]

    def choices(self, values: Sequence[float]) -> tuple[str, ...]:
        """Return the choice of every unit in a solution. Empty: no unit has a choice."""
        chosen = {option.unit: option.choice for option, x in self.columns.items() if values[x] > 0.5}
        return tuple(chosen.get(u, NONE) for u in range(len(self._profile.units))) if self.columns else ()

    def set(self, values: list[float], choices: Sequence[str]) -> None:
        """Set the columns of these choices."""
        for option, x in self.columns.items():
            values[x] = float(bool(choices) and choices[option.unit] == option.choice)
