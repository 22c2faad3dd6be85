"""The byte account, booked by hand."""

from __future__ import annotations

import threading

from mdcs.runtime.account import Account


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
