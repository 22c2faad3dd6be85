"""The byte account, booked by hand; and the names that a trace of torch's profiler has for what the runtime does."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from mdcs.runtime.context import ByteAccount
from mdcs.torch_compat import named_range
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, parallel_for, train


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


# ---- names in traces


class Unread:
    def __str__(self) -> str:
        raise AssertionError("a name is not made without a profiler")


def test_without_a_profiler_no_name_is_made() -> None:
    with named_range("wait", Unread()):
        pass


def names() -> set[str]:
    """The ranges of a step, an evaluation and a whole state dict."""
    with parallel_for(Job("tied", steps=1), How("fsdp", "sequential")) as (made, parallel, optimizer):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            train(Job("tied", steps=1), made, parallel, optimizer)
            with parallel.evaluate():
                made.loss(made.model, made.batch(0, 0, dist.get_rank()))
            parallel.state_dict()
            parallel.optimizer_state_dict()
        return {event.name for event in profiled.events() if event.name.startswith("mdcs::")}


def test_waits_gathers_and_evaluations_have_names(two: Ranks) -> None:
    for found in two.run(names):
        assert any(name.startswith("mdcs::wait ") for name in found)
        assert "mdcs::evaluation" in found
        assert any(name.startswith("mdcs::gather of ") for name in found)
        assert any(name.endswith("'s optimizer state") for name in found)


def profiled_in_flight() -> None:
    """The last messages of a step are in flight when the profiler stops."""
    job = Job("tied", steps=1)
    for _ in range(20):
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with parallel_for(job, How("fsdp", "wfbp")) as (made, parallel, optimizer), profiler:
            train(job, made, parallel, optimizer)


def test_a_profiler_may_stop_while_messages_are_in_flight(two: Ranks) -> None:
    two.run(profiled_in_flight)
