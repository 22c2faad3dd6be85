"""Messages over the wire: the plan's, in the plan's order, each one collective."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import mdcs
from mdcs.plan.schedule import Message
from mdcs.runtime.communicator import Communicator
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, parallel_for, train

STEPS = 3
SCHEDULERS = ("sequential", "wfbp", "fusion", "mg_wfbp", "partitioning", "priority", "dear", "random")


def listen(job: Job, how: How) -> dict[str, Any]:
    """Every message as it is launched, the collectives torch was asked for, and the records of all steps."""
    launched: list[Message] = []
    calls, tags = Counter[str](), list[int]()

    class Gloo:
        """The backend's own methods, counted, and the tag of what is sent."""

        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            calls[name] += 1
            return getattr(self.real, name)

        def send(self, tensors: Any, to: int, tag: int) -> Any:
            calls["send"] += 1
            tags.append(tag)
            return self.real.send(tensors, to, tag)

    with parallel_for(job, how) as (made, parallel, optimizer):
        communicator = parallel._engine.wire.messages._communicators[False]
        assert isinstance(communicator, Communicator)
        communicator._backend = Gloo(communicator._backend)
        launch = parallel._engine.wire.messages.launch

        def launching(transfer: Any) -> None:
            launched.append(transfer.message)
            launch(transfer)

        parallel._engine.wire.messages.launch = launching  # type: ignore[method-assign]
        with (
            patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
            patch.object(dist, "reduce_scatter_tensor", wraps=dist.reduce_scatter_tensor) as scattered,
        ):
            train(job, made, parallel, optimizer)
        calls.update(all_reduce=reduced.call_count, reduce_scatter_tensor=scattered.call_count)
        so_far = len(launched)
        parallel.drain()
        records = parallel.records(flush=True)
        plan = parallel.plan
    return {"plan": plan, "launched": launched, "so far": so_far, "calls": calls, "tags": tags, "records": records}


def expected(plan: mdcs.Plan) -> list[Message]:
    """The prologue, then whole periods."""
    prologue = [m for m, sent in zip(plan.messages, plan.schedule.in_prologue, strict=True) if sent]
    return prologue + list(plan.messages) * STEPS


@pytest.mark.parametrize("cross", [True, False], ids=["cross", "barrier"])
@pytest.mark.parametrize("scheduler", few(reversed(SCHEDULERS), 4))
def test_messages_are_launched_in_the_plans_order(two: Ranks, scheduler, cross):
    job = Job("tied", micro_steps=2, steps=STEPS)
    first, second = two.run(listen, job, How("random", scheduler, cross, seed=3, bytes=150))
    assert first["plan"].hash == second["plan"].hash
    assert first["launched"] == second["launched"]
    plan, launched = first["plan"], first["launched"]
    whole = expected(plan)
    # Until the drain it is a beginning of the plan's order; the drain adds reductions whose turn would come, in order.
    assert launched[: first["so far"]] == whole[: first["so far"]]
    late = [m for m in whole[first["so far"] :] if not m.kind.is_gather]
    drained = launched[first["so far"] :]
    assert [m for m in drained if not m.kind.is_gather] == late
    assert len(whole) - first["so far"] < 2 * len(plan.messages)
    size = Counter[str]()
    for m in plan.messages:
        size[str(m.kind)] += plan.wire(m)
    for record in first["records"][:2]:
        assert record.messages == Counter(str(m.kind) for m in plan.messages) and record.bytes == size


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_message_is_one_collective(two: Ranks, strategy):
    """On two ranks one send for each half of a ring; the last step's messages are counted."""
    job = Job("tied", steps=STEPS)
    for found in two.run(listen, job, How(strategy, "sequential")):
        sent = Counter(str(m.kind) for m in found["launched"][: found["so far"]])
        calls = found["calls"]
        assert calls["send"] == calls["recv"] == 2 * sent["AR"] + sent["RS"] + sent["AG_F"] + sent["AG_B"]
        assert calls["all_reduce"] == calls["reduce_scatter_tensor"] == 0


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_message_begins_when_all_steps_of_the_one_before_have(three: Ranks, strategy):
    for found in three.run(listen, Job("tied", steps=STEPS), How(strategy, "partitioning", bytes=256)):
        assert len(found["tags"]) > len(found["launched"]) and found["tags"] == sorted(found["tags"])


def sent(two: Ranks, strategy: str, scheduler: str, size: int) -> dict[str, Any]:
    found = two.run(listen, Job("tied", steps=STEPS), How(strategy, scheduler, bytes=size))[0]
    record = found["records"][1]
    return {"plan": found["plan"], "messages": record.messages, "bytes": record.bytes}


def test_partitioning_and_fusion_change_the_messages_and_not_the_bytes(two: Ranks):
    """tied has 5 trainable units of 66, 123, 69, 123 and 12 numbers, and one frozen one of 54."""
    whole = sent(two, "zero2", "wfbp", 0)
    cut = sent(two, "zero2", "partitioning", 256)
    fused = sent(two, "zero2", "fusion", 1 << 20)
    assert whole["messages"] == {"RS": 5, "AG_F": 5}
    # Blocks of 64 numbers: 66 -> 1, 124 -> 2, 70 -> 1, 124 -> 2, 12 -> 1.
    assert cut["messages"] == {"RS": 7, "AG_F": 7}
    assert fused["messages"]["RS"] == 1 and fused["messages"]["AG_F"] < 5
    sizes = [layout.elements for layout in whole["plan"].profile.layouts]
    half = sum(n for n, unit in zip(sizes, whole["plan"].profile.units, strict=True) if unit.trainable) * 4 // 2
    assert whole["bytes"] == cut["bytes"] == fused["bytes"] == {"RS": half, "AG_F": half}


# ---- overlap


def overlaps(how: How) -> list[tuple[float, float]]:
    job = Job("tied", steps=6)
    with parallel_for(job, how) as (made, parallel, optimizer):
        parallel.records()  # from here on they have times
        train(job, made, parallel, optimizer)
        parallel.drain()
        return [(r.times.communication_s, r.times.overlap_s) for r in parallel.records(flush=True)]


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_sequential_overlaps_nothing(two: Ranks, strategy):
    for times in two.run(overlaps, How(strategy, "sequential", emulated=True)):
        assert len(times) == 6
        assert all(communication > 0 and overlap == 0 for communication, overlap in times[1:])


def test_wait_free_schedules_overlap(two: Ranks):
    for times in two.run(overlaps, How("dp", "wfbp", emulated=True)):
        assert sum(overlap for _, overlap in times) > 0
