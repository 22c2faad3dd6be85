"""The byte account, booked by hand."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.worst_case import most_in_flight
from mdcs.runtime.account import Account, InFlight


def account(cap: int | None = None) -> Account:
    return Account(threading.RLock(), cap, {"parameters": 100, "optimizer": 200})


def test_what_is_live_and_the_highest_it_was():
    a = account()
    a.book("staging", 30)
    a.book("gradients", 50)
    a.book("staging", -30)
    a.book("staging", 10)
    assert (a.peak["staging"], a.peak["gradients"], a.peak["parameters"]) == (30, 50, 100)
    assert a.peak["total"] == 100 + 200 + 30 + 50  # the one instant, not the sum of the peaks
    assert a.live["staging"] == 10


def test_activations_are_those_of_the_slot():
    a = account()
    a.enter(70)
    a.book("staging", 5)
    a.enter(20)
    assert (a.peak["activations"], a.peak["total"]) == (70, 375)
    a.reset()
    assert (a.peak["activations"], a.peak["total"]) == (20, 325)


def test_a_window_begins_with_what_is_live():
    a = account()
    a.book("gradients", 40)
    assert a.window()["gradients"] == 40
    a.book("gradients", -40)
    a.book("gradients", 15)
    assert a.window()["gradients"] == 40  # it was live when the window began
    assert a.window()["gradients"] == 15


def test_admission_counts_what_is_promised():
    a = account(cap=400)
    assert a.fits(100, 0) and not a.fits(101, 0) and not a.fits(60, 41)
    a.reserve([60, 30])
    assert a.fits(10, 0) and not a.fits(11, 0)
    a.release([60])
    assert a.fits(70, 0)
    assert account().fits(1 << 60, 0)  # no budget


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_what_is_in_flight_is_kept_up_as_the_ledger_counts_it(depth: int, events: list[tuple[bool, int]]):
    """Messages are issued (True) and end, in any order of the two."""
    kept, waiting = InFlight(depth), []
    for issued, size in events:
        if issued:
            kept.add(size)
            waiting.append(size)
        elif waiting:
            kept.remove()
            del waiting[0]
        assert kept.most() == most_in_flight(waiting, depth)
        assert kept.most(size) == most_in_flight([*waiting, size], depth)
