"""Batches under a budget: the largest that fits, and the one of most samples per second.

Profiles of a smaller and a larger batch give that of any: seconds and bytes of slots, and of recomputation, are taken
to be linear in the batch. All else is that of the larger batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.profile.recompute import RecomputeOption, RecomputeUse
from mdcs.profile.schema import Profile, Slot

ProfileOf = Callable[[int], Profile]
"""Batch -> profile, such as :meth:`BatchScaling.profile`."""
Make = Callable[[Profile], Plan]
"""Profile -> plan with its prediction, within a budget. Raises InfeasibleBudget."""

_ROUNDS = 2  # of batches between the fastest and its neighbours


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
    """The profile of any batch, from profiles of one job by batch. Raises ValueError for those of several jobs.

    The smallest and the largest batch give the others. Of one profile all seconds and bytes count as proportional to
    the batch, which is too much for larger batches, and too little for smaller ones.
    """

    profiles: Mapping[int, Profile]

    def __post_init__(self) -> None:
        if not self.profiles or min(self.profiles) < 1:
            raise ValueError(f"profiles of batches >= 1 are needed, got {[*self.profiles]}")
        largest = max(self.profiles)
        for batch, profile in self.profiles.items():
            if _shape(profile) != _shape(self.profiles[largest]):
                raise ValueError(f"the profiles of batches {batch} and {largest} have other units or slots")

    def profile(self, batch: int) -> Profile:
        """Return the profile of a batch."""
        less, more = min(self.profiles), max(self.profiles)
        small, large = self.profiles[less], self.profiles[more]
        is_proportional = less == more
        part = batch / more if is_proportional else (batch - less) / (more - less)

        def linear(small: float, large: float) -> float:
            return part * large if is_proportional else small + part * (large - small)

        def at(small: float, large: float) -> float:
            return max(0.0, linear(small, large))

        def slot(a: Slot, b: Slot) -> Slot:
            live, peak = round(at(a.live, b.live)), round(at(a.peak, b.peak))
            return dataclasses.replace(b, seconds=at(a.seconds, b.seconds), live=live, peak=max(live, peak))

        def use(a: RecomputeUse, b: RecomputeUse) -> RecomputeUse:
            freed, peak = round(at(a.freed, b.freed)), round(at(a.peak, b.peak))
            forward_peak = round(linear(a.forward_peak, b.forward_peak))  # usually negative
            return dataclasses.replace(
                b, seconds=at(a.seconds, b.seconds), freed=freed, peak=peak, forward_peak=forward_peak
            )

        # one may free too little of a small batch to be there
        known = {_uses(option): option for option in small.recompute}
        options = tuple(
            dataclasses.replace(b, uses=tuple(map(use, a.uses, b.uses)))
            for b in large.recompute
            if (a := known.get(_uses(b))) is not None
        )
        return dataclasses.replace(large, slots=tuple(map(slot, small.slots, large.slots)), recompute=options)


def _shape(profile: Profile) -> object:
    """Return what profiles of one job have in common: no number that is measured."""
    units = [
        (u.name, u.segments, u.dtype, u.grad_dtype, u.master_dtype, u.optimizer, [p.numel for p in u.whole])
        for u in profile.units
    ]
    return units, [(slot.unit, slot.phase) for slot in profile.slots], profile.world


def _uses(option: RecomputeOption) -> object:
    return option.unit, option.choice, tuple((use.forward, use.backward) for use in option.uses)


def largest_batch(profile_of: ProfileOf, make: Make, *, at_most: int = 1 << 16) -> PlannedBatch:
    """Return the largest batch that ``make`` has a plan for, up to ``at_most``; larger ones are taken not to fit
    either. Raises InfeasibleBudget if a batch of one does not fit.
    """
    best, too_large = PlannedBatch(1, make(profile_of(1))), at_most + 1
    ask = 2
    while best.batch + 1 < too_large:
        batch = min(ask, (best.batch + too_large) // 2)
        try:
            best, ask = PlannedBatch(batch, make(profile_of(batch))), 2 * batch
        except InfeasibleBudget:
            too_large = batch
    return best


def batches_that_fit(profile_of: ProfileOf, make: Make, *, at_most: int = 1 << 16) -> tuple[PlannedBatch, ...]:
    """Return batches with their plans, smallest first: the largest that fits, halves of it, and more near the fastest.
    Raises InfeasibleBudget as :func:`largest_batch` does.
    """
    largest = largest_batch(profile_of, make, at_most=at_most)
    found = {largest.batch: largest}

    def ask(batch: int) -> None:
        if batch not in found:
            with contextlib.suppress(InfeasibleBudget):  # planners may fail on a batch although a larger one fits
                found[batch] = PlannedBatch(batch, make(profile_of(batch)))

    for halved in range(1, largest.batch.bit_length()):
        ask(largest.batch >> halved)
    for _ in range(_ROUNDS):
        known, best = sorted(found), fastest_of(found.values()).batch
        at = known.index(best)
        for other in known[max(0, at - 1) : at + 2]:
            ask((best + other) // 2)
    return tuple(found[batch] for batch in sorted(found))


def fastest_batch(profile_of: ProfileOf, make: Make, *, at_most: int = 1 << 16) -> PlannedBatch:
    """Return the batch of most predicted samples per second, of :func:`batches_that_fit`, with its InfeasibleBudget."""
    return fastest_of(batches_that_fit(profile_of, make, at_most=at_most))


def fastest_of(batches: Iterable[PlannedBatch]) -> PlannedBatch:
    """Return the batch of most predicted samples per second."""
    return max(batches, key=lambda each: each.samples_per_s)
