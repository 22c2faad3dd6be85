"""One profile of several batches: the memory of the largest, the time of the mix."""

from __future__ import annotations

import dataclasses

import pytest

from mdcs.api.offline import steps_of
from mdcs.profile.schema import INPUTS, Profile, Slot
from mdcs.profiler.merging import mix, total_s, typical, with_slots_of
from tests.mdcs.profiles import chain, recomputable


def of(*slots: tuple[int, str, float, int, int], inputs: str) -> Profile:
    return dataclasses.replace(chain(8, 8), slots=tuple(Slot(*slot) for slot in slots), about={INPUTS: inputs, "model": "chain"})


SHORT = of((0, "F", 1.0, 0, 10), (1, "F", 1.0, 10, 30), (1, "B", 2.0, 30, 40), (0, "B", 2.0, 10, 20), inputs="4 x 8")
LONG = of((0, "F", 3.0, 0, 90), (1, "F", 5.0, 5, 95), (1, "B", 8.0, 80, 99), (0, "B", 8.0, 70, 75), inputs="4 x 32")


def test_a_mix_has_the_mean_seconds_and_the_most_bytes_of_every_slot() -> None:
    mixed = mix([SHORT, LONG])
    assert [slot.seconds for slot in mixed.slots] == [2.0, 3.0, 5.0, 5.0]
    assert [(slot.live, slot.peak) for slot in mixed.slots] == [(0, 90), (10, 95), (80, 99), (70, 75)]
    assert mixed.about == {INPUTS: "4 x 32", "model": "chain"} and mix([SHORT]) == SHORT


def test_what_a_batch_leaves_out_takes_no_time_in_it() -> None:
    without = of((1, "F", 1.0, 10, 30), (0, "F", 0.0, 30, 30), (1, "B", 2.0, 30, 40), (0, "B", 0.0, 0, 0), inputs="4 x 8")
    mixed = mix([without, LONG])
    assert [(slot.unit, slot.phase) for slot in mixed.slots] == [(0, "F"), (1, "F"), (1, "B"), (0, "B")]
    assert [slot.seconds for slot in mixed.slots] == [1.5, 3.0, 5.0, 4.0]


def test_what_messages_cost_is_measured_with_the_batch_next_to_the_mean() -> None:
    profiles = [SHORT, LONG, of(*((s.unit, s.phase, 2 * s.seconds, 0, 0) for s in SHORT.slots), inputs="4 x 16")]
    assert typical(profiles) == 2
    slower = tuple(dataclasses.replace(s, seconds=1.5 * s.seconds) for s in profiles[2].slots)
    measured = dataclasses.replace(profiles[2], slots=slower, copy_seconds_per_byte=1e-9)
    found, mixed = with_slots_of(measured, profiles[2], mix(profiles)), mix(profiles)
    assert total_s(found) == pytest.approx(1.5 * total_s(mixed)) and found.copy_seconds_per_byte == 1e-9
    assert [s.peak for s in found.slots] == [s.peak for s in mixed.slots] and found.about[INPUTS] == "4 x 32"


def test_recomputation_of_the_largest_batch_counts_with_the_seconds_of_the_mix() -> None:
    long = recomputable(LONG, 1, freed=60, seconds=4.0, peak=20)
    mixed = mix([SHORT, long])
    [use] = mixed.recompute[0].uses
    assert (use.freed, use.peak, use.seconds) == (60, 20, 2.5)  # its backward takes 5 seconds of 8 in the mean
    slots = tuple(dataclasses.replace(s, seconds=2 * s.seconds) for s in SHORT.slots)
    found = with_slots_of(dataclasses.replace(SHORT, slots=slots), SHORT, mixed)
    assert found.recompute[0].seconds == 5.0 and mix([long]) == long


def test_a_step_is_given_each_batch_and_none_is_refused() -> None:
    seen: list[str] = []
    for step in steps_of(seen.append, ["short", "long"]):  # type: ignore[arg-type]  # no losses here
        step()
    assert seen == ["short", "long"]
    with pytest.raises(ValueError, match="at least one batch"):
        steps_of(seen.append, [])  # type: ignore[arg-type]
