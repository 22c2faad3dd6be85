"""A trace of torch's profiler names what the runtime does."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mdcs.runtime.trace_ranges import named_range
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, parallel_for, train


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
