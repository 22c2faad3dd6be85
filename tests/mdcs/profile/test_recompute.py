"""Options of recomputation: what a profile accepts, and that they survive JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mdcs.profile.recompute import RecomputeOption, RecomputeUse
from mdcs.profile.schema import Profile
from tests.mdcs.profiles import chain, recomputable

USE = RecomputeUse(forward=0, backward=1, freed=100, seconds=1.0, peak=40)


def test_json_gives_the_same_options_back() -> None:
    profile = recomputable(recomputable(chain(8, 8), freed=100), 1, freed=30, choice="selective")
    again = Profile.from_json(profile.to_json())
    assert again == profile and again.recompute[2] == RecomputeOption(1, "selective", (RecomputeUse(1, 0, 30, 1.0, 0),))


def test_an_option_has_the_seconds_and_bytes_of_all_its_uses() -> None:
    option = RecomputeOption(0, "full", (USE, replace(USE, freed=50, seconds=0.5)))
    assert (option.seconds, option.freed) == (1.5, 150)


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda: replace(USE, freed=-1), "recomputation has slots, bytes and seconds >= 0"),
        (lambda: RecomputeOption(0, "none", (USE,)), "recomputation is full or selective, got 'none'"),
        (lambda: RecomputeOption(0, "full", ()), "unit 0: recomputation full has no uses"),
    ],
)
def test_numbers_and_choices_out_of_range_are_refused(made: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        made()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([RecomputeOption(2, "full", (USE,))], "recompute option full: no unit 2 with a backward"),
        ([RecomputeOption(0, "full", (replace(USE, backward=2),))], "recompute option full of unit 0 is outside the slots"),
        ([RecomputeOption(0, "full", (USE,))] * 2, "a unit has several recompute options of one choice"),
    ],
)
def test_options_are_of_units_and_slots_that_exist(options: list[RecomputeOption], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(chain(8, 8), recompute=tuple(options))
