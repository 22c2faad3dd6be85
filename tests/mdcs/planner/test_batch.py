"""Batches under a budget: scaled profiles by hand, the largest batch that fits, the fastest, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.plan import Plan
from mdcs.planner.batch import BatchScaling, Make, batches_that_fit, fastest_batch, largest_batch
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import floor_bytes, make_plan
from mdcs.planner.recompute import Planned, RecomputeRule
from mdcs.planner.schedulers import Sequential
from mdcs.planner.strategies import Greedy
from mdcs.profile.layout import WholeParameter
from mdcs.profile.schema import Profile, Slot, Unit
from tests.mdcs.profiles import FREE, chain, recomputable


def of_batch(batch: int) -> Profile:
    """Two units: a sample takes 0.1 s more per slot beside 1 s, and saves 100 bytes beside 50."""
    units = tuple(Unit(name, (10,), True, (i, i), (1 - i,) * 2) for i, name in enumerate("ab"))
    saved, seconds = 50 + 100 * batch, 1 + 0.1 * batch
    forward = [Slot(u, "F", seconds, saved * u, saved * (u + 1)) for u in (0, 1)]
    backward = [Slot(u, "B", seconds, saved * (u + 1), saved * (u + 1)) for u in (1, 0)]
    profile = Profile(units, (*forward, *backward), 2, FREE)
    profile = recomputable(profile, 0, freed=saved, seconds=seconds, peak=saved)
    [option] = profile.recompute
    [use] = option.uses
    lower = 20 - 60 * batch  # of the forward slot's peak
    return replace(profile, recompute=(replace(option, uses=(replace(use, forward_peak=lower),)),))


SCALING = BatchScaling({2: of_batch(2), 6: of_batch(6)})
PROFILE_OF = SCALING.profile


def made(budget: int, rule: RecomputeRule | None = None) -> Make:
    def make(profile: Profile) -> Plan:
        return make_plan(profile, Greedy(), Sequential(), budget=budget, recompute=rule)

    return make


@pytest.mark.parametrize("batch", [1, 2, 4, 6, 40])
def test_slots_and_recomputation_are_linear_in_the_batch(batch: int) -> None:
    found, wanted = SCALING.profile(batch), of_batch(batch)
    assert [(s.live, s.peak) for s in found.slots] == [(s.live, s.peak) for s in wanted.slots]
    assert [s.seconds for s in found.slots] == pytest.approx([s.seconds for s in wanted.slots])
    [a], [b] = found.recompute[0].uses, wanted.recompute[0].uses
    assert (a.freed, a.peak, a.forward_peak) == (b.freed, b.peak, b.forward_peak) and a.seconds == pytest.approx(b.seconds)


@pytest.mark.parametrize("batch", [1, 5, 37])
def test_the_largest_batch_fits_and_one_more_does_not(batch: int) -> None:
    budget = floor_bytes(of_batch(batch)) + 50  # less than a sample needs
    found = largest_batch(PROFILE_OF, made(budget))
    assert found.batch == batch and found.plan.prediction is not None
    assert found.plan.prediction.peak_bytes <= budget < floor_bytes(of_batch(batch + 1))


def test_recomputation_makes_room_for_a_larger_batch() -> None:
    budget = floor_bytes(of_batch(10))
    kept, planned = (largest_batch(PROFILE_OF, made(budget, rule)) for rule in (None, Planned()))
    assert kept.batch == 10 and planned.batch > 10 and planned.plan.recompute


def test_a_limit_ends_the_search() -> None:
    assert largest_batch(PROFILE_OF, made(10**9), at_most=24).batch == 24


def test_the_fastest_batch_has_most_samples_per_second() -> None:
    found = fastest_batch(PROFILE_OF, made(10**9), at_most=64)
    assert found.batch == 64 and found.samples_per_s == pytest.approx(64 * 2 / (4 * 7.4))


def test_a_batch_of_one_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InfeasibleBudget):
        largest_batch(PROFILE_OF, made(100))


def test_profiles_of_other_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"profiles of batches >= 1 are needed, got \[\]"):
        BatchScaling({})
    with pytest.raises(ValueError, match="the profiles of batches 2 and 6 have other units or slots"):
        BatchScaling({2: chain(10, 20), 6: of_batch(6)})


def test_one_profile_counts_as_proportional() -> None:
    found = BatchScaling({6: of_batch(6)}).profile(12)
    assert [s.peak for s in found.slots] == [2 * s.peak for s in of_batch(6).slots]
    assert found.slots[0].seconds == pytest.approx(3.2) and found.recompute[0].freed == 1300
    assert found.recompute[0].uses[0].forward_peak == 2 * (20 - 60 * 6)


def test_a_slot_never_peaks_below_the_bytes_that_it_begins_with() -> None:
    """By the two lines alone it would: 50 bytes at its start, and a peak of 30."""

    def of(live: int, peak: int) -> Profile:
        profile = of_batch(1)
        return replace(profile, slots=(*profile.slots[:1], replace(profile.slots[1], live=live, peak=peak), *profile.slots[2:]))

    slot = BatchScaling({2: of(60, 60), 6: of(100, 180)}).profile(1).slots[1]
    assert (slot.live, slot.peak) == (50, 50)


def test_profiles_may_differ_in_what_is_measured_of_updates_of_whole_parameters() -> None:
    def of(batch: int, numel: int = 10) -> Profile:
        units = [
            replace(unit, segments=(numel,), whole=(WholeParameter(numel, seconds=batch),))
            for unit in of_batch(batch).units
        ]
        return replace(of_batch(batch), units=tuple(units))

    assert BatchScaling({2: of(2), 6: of(6)}).profile(4).units == of(6).units
    with pytest.raises(ValueError, match="have other units or slots"):
        BatchScaling({2: of(2, numel=12), 6: of(6)})


def test_recomputation_that_frees_nothing_of_a_small_batch_is_left_out() -> None:
    scaling = BatchScaling({2: replace(of_batch(2), recompute=()), 6: of_batch(6)})
    assert scaling.profile(4).recompute == ()


def test_batches_near_the_fastest_are_planned_too() -> None:
    def jagged(batch: int) -> Profile:
        """Beyond 20 samples a slot takes five times as long."""
        profile = of_batch(batch)
        return profile if batch <= 20 else replace(profile, slots=tuple(replace(s, seconds=5 * s.seconds) for s in profile.slots))

    found = batches_that_fit(jagged, made(10**9), at_most=32)
    assert [each.batch for each in found] == [1, 2, 4, 8, 12, 14, 16, 20, 24, 32]
    assert fastest_batch(jagged, made(10**9), at_most=32).batch == 20


def test_a_half_without_a_plan_is_left_out() -> None:
    def make(profile: Profile) -> Plan:
        if profile == SCALING.profile(6):
            raise InfeasibleBudget(10**9, None, "a batch of 6")
        return made(10**9)(profile)

    found = batches_that_fit(PROFILE_OF, make, at_most=12)
    assert 6 not in (batches := [each.batch for each in found]) and batches[-1] == 12
