"""Departures of a run in words, and what they cost."""

import pytest

from experiments.job.departed import Departed


def test_departing_steps_are_counted_by_what_they_did():
    seen = Departed()
    for what in ({}, {"left out layers.3": 2}, {}, {"left out layers.3": 1, "ran head once more": 1}):
        seen.add(1.0, what)
    assert seen.words() == ["2 of 4 steps left out layers.3", "1 of 4 steps ran head once more"]
    assert seen.line() == "2 of 4 steps left out layers.3 and 1 more (+0.00 s in all)"


def test_their_cost_is_what_they_took_beyond_the_median_of_the_others():
    seen = Departed()
    for seconds, what in ((1.0, {}), (1.2, {}), (9.0, {}), (2.0, {"left out a": 1}), (0.7, {"left out a": 1})):
        seen.add(seconds, what)
    assert seen.cost_s == pytest.approx(2.7 - 2 * 1.2)
    assert seen.summary() == {"departures": ["2 of 5 steps left out a"], "departures_cost_s": seen.cost_s}


def test_where_all_or_none_departed_nothing_is_compared():
    seen = Departed()
    seen.add(1.0, {})
    assert seen.cost_s is None and seen.line() == "" and seen.summary() == {}
    seen = Departed()
    seen.add(1.0, {"left out a": 1})
    assert seen.cost_s is None and seen.line() == "1 of 1 steps left out a"
