"""The groups of a run, and how their threads are scheduled."""

from __future__ import annotations

import os

import pytest
import torch

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
