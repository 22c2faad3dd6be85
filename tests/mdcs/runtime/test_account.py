"""The byte account, booked by hand."""

from __future__ import annotations

import threading

from mdcs.runtime.account import Account


def account() -> Account:
    return Account(threading.RLock(), {"parameters": 100, "optimizer": 200})


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
