"""The schedule of a plan: what is issued, what waits for what, by hand."""

from __future__ import annotations

from dataclasses import replace

from mdcs.planner.schedulers import Wfbp
from mdcs.profile.link import Kind
from tests.mdcs.profiles import chain, planned


def test_what_is_issued_and_what_is_done_at_each_slot() -> None:
    sequential = planned(chain(8, 4), "zero2").schedule  # RS b, RS a, AG_F a, AG_F b at slots 1, 2, 2, 3
    assert (sequential.issued, sequential.required) == ([0, 1, 3, 4], [0, 1, 3, 4])
    ahead = planned(chain(8, 4), "zero2", Wfbp()).schedule  # RS b, AG_F b, RS a, AG_F a at slots 1, 1, 2, 2
    assert (ahead.issued, ahead.required) == ([0, 2, 4, 4], [0, 0, 4, 4])


def test_a_slot_can_wait_for_messages_of_the_period_before() -> None:
    plan = planned(chain(8, 4, 4), "fsdp", Wfbp())  # B:c B:b B:a F:a F:b F:c
    order = [(str(m.kind), "abc"[m.parts[0][0]], m.slot) for m in plan.messages]
    assert order[:2] == [("AG_B", "b", 0), ("RS", "c", 1)]
    schedule = plan.schedule
    assert schedule.required[1] == 1  # B:b needs what was issued one slot ahead
    later = [m for m in plan.messages if m.kind is Kind.AG_B and m.parts[0][0] == 1]
    others = [m for m in plan.messages if m not in later]
    ahead = replace(plan, messages=(*others, replace(later[0], slot=5)))  # issued before the period ends
    assert ahead.schedule.required[1] == 0
    assert ahead.schedule.required[0] == -1 + 1 - (len(order) - ahead.schedule.required[5])
