"""The groups of a run, and how their threads are scheduled."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mdcs.runtime import groups
from mdcs.runtime.groups import Groups, _loops
from tests.mdcs.runtime.ranks import Ranks


def policies(per_node: int) -> tuple[list[int], list[int]]:
    """How the loops that were there before a run's groups are scheduled, and those of its groups."""
    before = _loops()
    groups = Groups(None, torch.device("cpu"), 20.0, needs_control=True, per_node=per_node)
    try:
        there = _loops()
        return tuple(sorted(os.sched_getscheduler(t) for t in some) for some in (before & there, there - before))
    finally:
        groups.destroy()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_loops_of_messages_take_no_core_from_others(two: Ranks):
    for before, own in two.run(policies, 0):
        assert before  # of the test's own group
        assert set(before) == {os.SCHED_OTHER}
        assert own == [os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_BATCH]  # control, talk, messages


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has it")
def test_so_do_those_of_messages_within_and_across_nodes(four: Ranks):
    for _, own in four.run(policies, 2):
        assert own == [os.SCHED_OTHER] * 2 + [os.SCHED_BATCH] * 3


@pytest.mark.parametrize("aborts", [True, False])
def test_a_run_that_has_failed_waits_for_none_of_nccl_s_groups(monkeypatch: pytest.MonkeyPatch, aborts: bool):
    """To destroy one waits for the messages that are in flight, in which ranks may be missing."""
    released, aborted = threading.Event(), []

    def destroy(group: str) -> None:
        assert released.wait(60)

    def abort(group: str) -> None:
        aborted.append(group)
        assert aborts or released.wait(60)

    for owner, name, value in (
        (dist, "is_initialized", lambda: True),
        (dist, "get_backend", str),
        (dist, "destroy_process_group", destroy),
        (dist.distributed_c10d, "_abort_process_group", abort),
        (groups, "_ABORT_SECONDS", 60.0 if aborts else 0.01),
    ):
        monkeypatch.setattr(owner, name, value)
    own = Groups.__new__(Groups)
    own._own = ["nccl", "nccl"]  # type: ignore[list-item]
    own.destroy(failed=True)
    released.set()
    assert aborted == ["nccl", "nccl"]

    own._own = ["nccl", "gloo"]  # type: ignore[list-item]
    own.destroy()
    assert len(aborted) == 2


def test_nccl_s_groups_are_connected_when_they_are_made_and_outlast_the_wait_for_messages(monkeypatch: pytest.MonkeyPatch):
    """Else it connects them inside of a forward pass, and its watchdog ends the process before the error that names the step."""
    made: list[tuple[str, float]] = []
    connected: list[int] = []

    def new_group(ranks: object = None, *, timeout: timedelta, backend: str, **options: bool) -> int:
        made.append((backend, timeout.total_seconds()))
        return len(made)

    for owner, name, value in (
        (dist, "is_initialized", lambda: True),
        (dist, "get_world_size", lambda group=None: 4),
        (dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3]),
        (dist, "get_rank", lambda group: 1),
        (dist, "new_group", new_group),
        (dist, "all_reduce", lambda tensor, group: connected.append(group)),
        (groups, "backend_of", lambda group, device: "nccl"),
    ):
        monkeypatch.setattr(owner, name, value)
    own = Groups(None, torch.device("cpu"), 20.0, needs_control=True, per_node=2)
    assert made[:2] == [("nccl", 80.0), ("gloo", 20.0)] and set(made[2:]) == {("nccl", 80.0)}
    assert connected == [own.messages, own.node, own.across] == [1, 3, 6]
