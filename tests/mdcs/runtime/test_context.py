"""Names in traces of torch's profiler; records made of stamps, of which each is the second itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mdcs.plan.job import Job
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.schedulers import StrategyAssignment, Wfbp
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile, Slot, Unit
from mdcs.runtime.context import UNTIMED, StepRecorder
from mdcs.runtime.executor import Executor
from mdcs.telemetry.timeline import Interval
from mdcs.torch_compat import named_range
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, parallel_for, train
from tests.mdcs.runtime.training import Job as Training


class Unread:
    def __str__(self) -> str:
        raise AssertionError("a name is not made without a profiler")


def test_without_a_profiler_no_name_is_made() -> None:
    with named_range("wait", Unread()):
        pass


def names() -> set[str]:
    """The ranges of a step, an evaluation and a whole state dict."""
    with parallel_for(Training("tied", steps=1), How("fsdp", "sequential")) as (made, parallel, optimizer):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            train(Training("tied", steps=1), made, parallel, optimizer)
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
    job = Training("tied", steps=1)
    for _ in range(20):
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with parallel_for(job, How("fsdp", "wfbp")) as (made, parallel, optimizer), profiler:
            train(job, made, parallel, optimizer)


def test_a_profiler_may_stop_while_messages_are_in_flight(two: Ranks) -> None:
    two.run(profiled_in_flight)


# ---- records


def plan() -> Plan:
    unit = Unit("u", (8,), True, (0, 0), (0, 0))
    slots = (Slot(0, "F", 1.0, 0, 0), Slot(0, "B", 1.0, 0, 0))
    link = Link((0.0,) * 4, (0.0,) * 4)
    return Wfbp().schedule(StrategyAssignment(Job(Profile((unit,), slots, 2, link)), (Strategy.zero2,)))


def recorder() -> StepRecorder:
    """Its period: slot 0 is backward, slot 1 forward. Messages: RS and AG_F of 8 numbers, 16 bytes on the wire."""
    r = StepRecorder(plan(), Executor())
    r.last_period()  # asked for
    return r


def iteration(r: StepRecorder, step: int, begin: float) -> None:
    """Forward 0 … 1 s, backward 1 … 3 s, reduce-scatter 2.5 … 3.5, update until 3.6, gather 3.6 … 4; 4 s in all."""
    r.ran("compute", 1, begin, begin + 1)
    r.period(begin + 1)
    r.ran("compute", 0, begin + 1, begin + 3)
    r.ran("message", 0, begin + 2.5, begin + 3.5, step)
    r.ran("update", 0, begin + 3.5, begin + 3.6, step)
    r.ran("message", 1, begin + 3.6, begin + 4, step)
    r.step(step, begin + 4)


def test_a_step_adds_up():
    r = recorder()
    r.step(0, 100.0)
    iteration(r, 1, 100.0)
    [record] = r.finished(1)
    assert (record.step, record.messages, record.bytes) == (1, {"RS": 1, "AG_F": 1}, {"RS": 16, "AG_F": 16})
    times = record.times
    assert times.step_s == pytest.approx(4) and times.compute_s == pytest.approx(3)
    assert times.communication_s == pytest.approx(1.4) and times.overlap_s == pytest.approx(0.5)
    assert times.overlap_ratio == pytest.approx(0.5 / 1.4) and times.stalled_s == pytest.approx(1)


def test_a_trace_has_the_times_of_a_whole_period():
    r = recorder()
    r.step(0, 0.0)
    for step in (1, 2, 3):
        iteration(r, step, 4.0 * (step - 1))
    r.finished(3)
    traces = r.traces()
    assert [*traces] == [1, 2]  # the third period has no forward yet
    assert traces[2].period_s == 4 and traces[2].slots == ((0, 2), (3, 4)) and traces[2].done == pytest.approx((2.6, 3))
    assert traces[2].messages == (pytest.approx((1.5, 2.5)), pytest.approx((2.6, 3)))


def test_the_last_period_begins_at_its_first_backward_slot():
    r = recorder()
    r.step(0, 0.0)
    iteration(r, 1, 0.0)
    iteration(r, 2, 4.0)
    begin, end, intervals = r.last_period()
    assert (begin, end) == (1.0, 5.0)
    assert sum(i.duration_s for i in intervals if i.lane == "compute") == pytest.approx(3)


class Clock(Executor):
    """Stands where a test sets it."""

    now = 0.0

    def record_timestamp(self) -> float:
        return self.now


def test_seconds_of_a_pause_are_in_no_step_and_in_no_period():
    """Steps of 4 s. Between them 10 s pass, into which a gather of the first reaches by 1 s."""
    clock, r = Clock(), recorder()
    r.executor = clock
    r.step(0, 0.0)
    iteration(r, 1, 0.0)
    r.ran("message", 1, 3.8, 5.0, 1)
    clock.now = 4.0
    with r.pause():
        clock.now = 14.0
    iteration(r, 2, 14.0)
    begin, end, intervals = r.last_period()
    assert end - begin == pytest.approx(4) and max(i.end for i in intervals) <= end
    assert sum(i.duration_s for i in intervals if i.lane == "compute") == pytest.approx(3)
    first, second = r.finished(2)
    for times in (first.times, second.times):
        assert [times.step_s, times.compute_s, times.communication_s] == pytest.approx([4, 3, 1.4])


class Impatient(Executor):
    """Fails when it is asked for a stamp that has not come, as a CUDA event would block."""

    now = 0.0

    def seconds(self, stamp: float) -> float:
        assert stamp <= self.now, "this would have waited for the device"
        return stamp


def test_records_do_not_wait_for_compute_that_is_under_way():
    executor = Impatient()
    r = StepRecorder(plan(), executor)
    r.last_period()
    r.step(0, 0.0)
    iteration(r, 1, 0.0)
    iteration(r, 2, 4.0)
    r.ran("compute", 1, 8.0, 9.0)  # queued, not run
    executor.now = 8.0
    assert [x.step for x in r.finished(1)] == [1]


class Counting(StepRecorder):
    """Counts the intervals that it makes."""

    made = 0

    def _interval(self, lane: str, index: int, begin: float, end: float) -> Interval:
        self.made += 1
        return super()._interval(lane, index, begin, end)


def counting() -> Counting:
    return Counting(plan(), Executor())


def test_nothing_is_stamped_before_somebody_asks():
    r = StepRecorder(plan(), Executor())
    r.step(0, 0.0)
    for step in range(1, 6):
        begin, stamp = 4.0 * (step - 1), r.stamp()
        if stamp is not UNTIMED:
            iteration(r, step, begin)
            continue
        r.ran("compute", 1, stamp, stamp)
        r.period(stamp)
        r.ran("message", 0, stamp, stamp, step)
        r.ran("message", 1, stamp, stamp, step)
        r.step(step, begin + 4)
        if step == 2:
            assert [x.step for x in r.finished(1)] == [1]
    records = r.finished(5)
    assert [(x.step, x.times.step_s, x.messages["RS"]) for x in records] == [(step, 4.0, 1) for step in range(2, 6)]
    assert [x.times.compute_s for x in records] == [None, None, 3.0, 3.0], "a message may last into the step after the call"


def test_a_loop_that_no_more_asks_neither_fills_memory_nor_makes_intervals():
    r = counting()
    r.last_period()
    r.step(0, 0.0)
    for step in range(1, 1001):
        iteration(r, step, 4.0 * (step - 1))
    assert len(r._steps) < 200 and len(r._raw) + len(r._intervals) < 1500 and len(r._sent) < 200
    assert r.made == 0, "a step() would have stalled for them"
    records = r.finished(1000)
    assert len(records) > 100 and records[-1].step == 1000 and records[-1].times.compute_s == pytest.approx(3)


def test_records_asked_for_late_are_those_asked_for_at_once():
    often, late = recorder(), recorder()
    records = []
    for r in (often, late):
        r.step(0, 0.0)
    for step in range(1, 301):
        for r in (often, late):
            iteration(r, step, 4.0 * (step - 1))
        records += often.finished(step)
    asked_late = late.finished(300)
    assert len(asked_late) > 100 and asked_late == records[-len(asked_late) :]
    assert late.last_period() == often.last_period()


def test_a_loop_that_asks_only_for_the_last_period_gets_it_without_older_intervals():
    r, often = counting(), recorder()
    for each in (r, often):
        each.step(0, 0.0)
    for step in range(1, 401):
        for each in (r, often):
            iteration(each, step, 4.0 * (step - 1))
        often.finished(step)
        made = r.made
        found = r.last_period()
        assert found == often.last_period() and r.made - made <= 15
    assert len(r._raw) + len(r._intervals) < 1500
