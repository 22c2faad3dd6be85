"""Batches under a budget: the largest that fits, and the one of most samples per second.

Profiles of two batches give that of any batch: seconds and bytes of slots, and of recomputation, are taken to be linear in
the batch (a fixed part and a part per sample). All else is that of the larger batch. A third batch that is profiled
shows how far that holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.profile.recompute import RecomputeUse
from mdcs.profile.schema import Profile, Slot

Make = Callable[[Profile], Plan]
"""Profile -> plan with its prediction (:func:`mdcs.planner.pipeline.make_plan` with a budget). Raises InfeasibleBudget."""


@dataclass(frozen=True)
class PlannedBatch:
    """A batch per rank and micro-step, and its plan."""

    batch: int
    plan: Plan

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second of all ranks."""
        assert self.plan.prediction is not None
        return self.batch * self.plan.micro_steps * self.plan.world / self.plan.prediction.step_s


@dataclass(frozen=True)
class BatchScaling:
    """Profiles of one job with two batches. Raises ValueError unless they differ in the batch alone."""

    small: Profile
    small_batch: int
    large: Profile
    large_batch: int

    def __post_init__(self) -> None:
        if not 0 < self.small_batch < self.large_batch:
            raise ValueError(f"two batches are needed, the smaller first, got {self.small_batch} and {self.large_batch}")
        if _shape(self.small) != _shape(self.large):
            raise ValueError("the profiles of the two batches have other units, slots or options of recomputation")

    def profile(self, batch: int) -> Profile:
        """Return the profile of a batch."""
        part = (batch - self.small_batch) / (self.large_batch - self.small_batch)

        def at(small: float, large: float) -> float:
            return max(0.0, small + part * (large - small))

        def slot(a: Slot, b: Slot) -> Slot:
            live, peak = round(at(a.live, b.live)), round(at(a.peak, b.peak))
            return dataclasses.replace(b, seconds=at(a.seconds, b.seconds), live=live, peak=peak)

        def use(a: RecomputeUse, b: RecomputeUse) -> RecomputeUse:
            freed, peak = round(at(a.freed, b.freed)), round(at(a.peak, b.peak))
            return dataclasses.replace(b, seconds=at(a.seconds, b.seconds), freed=freed, peak=peak)

        options = tuple(
            dataclasses.replace(b, uses=tuple(map(use, a.uses, b.uses)))
            for a, b in zip(self.small.recompute, self.large.recompute, strict=True)
        )
        slots = tuple(map(slot, self.small.slots, self.large.slots))
        return dataclasses.replace(self.large, slots=slots, recompute=options)


def _shape(profile: Profile) -> object:
    options = [(o.unit, o.choice, [(use.forward, use.backward) for use in o.uses]) for o in profile.recompute]
    units = [(unit.name, unit.segments, unit.sections) for unit in profile.units]
    return units, [(slot.unit, slot.phase) for slot in profile.slots], options, profile.world


def largest_batch(scaling: BatchScaling, make: Make, *, at_most: int = 1 << 16) -> PlannedBatch:
    """Return the largest batch that ``make`` has a plan for, up to ``at_most``. Larger batches are taken not to fit either.

    Raises InfeasibleBudget if a batch of one does not fit.
    """
    best, too_large = PlannedBatch(1, make(scaling.profile(1))), at_most + 1
    ask = 2
    while best.batch + 1 < too_large:
        batch = min(ask, (best.batch + too_large) // 2)
        try:
            best, ask = PlannedBatch(batch, make(scaling.profile(batch))), 2 * batch
        except InfeasibleBudget:
            too_large = batch
    return best


def fastest_batch(scaling: BatchScaling, make: Make, *, at_most: int = 1 << 16) -> PlannedBatch:
    """Return the batch of most predicted samples per second: of the largest that fits, and halves of it.

    Raises InfeasibleBudget as :func:`largest_batch` does.
    """
    found = [largest_batch(scaling, make, at_most=at_most)]
    while found[-1].batch > 1:
        batch = found[-1].batch // 2
        found.append(PlannedBatch(batch, make(scaling.profile(batch))))
    return max(found, key=lambda each: each.samples_per_s)
