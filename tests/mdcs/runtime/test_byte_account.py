"""The byte account, booked by hand."""

from __future__ import annotations

import threading

from mdcs.runtime.byte_account import ByteAccount


def account() -> ByteAccount:
    return ByteAccount(threading.RLock(), {"parameters": 100, "optimizer": 200})


def test_what_is_live_and_the_highest_it_was():
    a = account()
    a.record("staging", 30)
    a.record("gradients", 50)
    a.record("staging", -30)
    a.record("staging", 10)
    assert (a.peak["staging"], a.peak["gradients"], a.peak["parameters"]) == (30, 50, 100)
    assert a.peak["total"] == 100 + 200 + 30 + 50  # the one instant, not the sum of the peaks
    assert a.live["staging"] == 10


def test_activations_are_those_of_the_slot():
    a = account()
    a.set_activations(70)
    a.record("staging", 5)
    a.set_activations(20)
    assert (a.peak["activations"], a.peak["total"]) == (70, 375)
    a.reset()
    assert (a.peak["activations"], a.peak["total"]) == (20, 325)


def test_a_window_begins_with_what_is_live():
    a = account()
    a.record("gradients", 40)
    assert a.take_window_peak()["gradients"] == 40
    a.record("gradients", -40)
    a.record("gradients", 15)
    assert a.take_window_peak()["gradients"] == 40  # it was live when the window began
    assert a.take_window_peak()["gradients"] == 15
