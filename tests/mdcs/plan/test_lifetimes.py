"""The table of lifetimes: a new kind of buffer is one row, and every sum over the table has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan import ledger, lifetimes
from mdcs.plan.job import Job
from mdcs.plan.ledger import Ledger, worst_case_bytes_by_slot
from mdcs.plan.lifetimes import CATEGORIES, Admission, InFlightBytes, Row, max_in_flight_bytes, unit_rows
from mdcs.plan.period import Period, Strategy
from mdcs.planner.candidates import Candidates
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp import slot_model
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.strategy_ilp import memory_rows
from mdcs.planner.schedulers import StrategyAssignment, Wfbp
from mdcs.simulator import simulate
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import ADAM, chain, link

NEW, SIZE = "copies", 1000
UNIT = "parameters", "full_parameters", "gradients"
MESSAGE = "staging", "gradient_shards", "update_scratch"
STRATEGIES = Strategy.fsdp, Strategy.sdp, Strategy.zero2, Strategy.dp

Change = Callable[[tuple[Row, ...]], tuple[Row, ...]]


def sums(monkeypatch: pytest.MonkeyPatch, change: Change, barrier: bool) -> dict[str, Any]:
    """Everything that counts bytes, with a changed table."""
    with monkeypatch.context() as patched:

        def of_unit(period: Period, unit: int, strategy: Strategy) -> tuple[Row, ...]:
            return change(unit_rows(period, unit, strategy))

        for module in (ledger, slot_model, lifetimes):
            patched.setattr(module, "unit_rows", of_unit)
        patched.setattr(ledger, "message_rows", lambda *sizes: change(lifetimes.message_rows(*sizes)))
        patched.setattr(simulate, "CATEGORIES", (*CATEGORIES, NEW))
        profile = chain(64, 32, 96, 48, world=2, optimizer=ADAM, link=link(1e-3, 1e-2, depth=2))
        job = Job(profile, 2, cross_iteration=not barrier)
        plan = Wfbp().schedule(StrategyAssignment(job, STRATEGIES))
        all_of, own, found = Candidates(job, 10**6), Ledger(plan), replay(plan)
        candidate = all_of.of(plan)
        score = all_of.score(candidate, float("inf"))
        assert score is not None
        problem = PlanningProblem(job, 10**6)
        model = SlotModel(problem)
        return {
            "curve": found.curve,
            "replay": [slot["total"] for slot in found.curve],
            "worst case": worst_case_bytes_by_slot(plan),
            "admission of messages": [(e.held, e.transient, e.freed, e.own_bytes) for e in own.messages],
            "admission of slots": [(s.allocated, s.freed) for s in own.slots],
            "at rest": own.rest_bytes,
            "candidates": ([*map(int, all_of._arrival), *map(int, all_of._running)], score.energy),
            "joint program": [sorted(terms) for terms, _, _ in model.program.rows],
            "strategy program": memory_rows(problem, model.recompute),
            "greedy": [lifetimes.extra_bytes_vs_fsdp(job.period, u, k) for u, k in enumerate(STRATEGIES)],
        }


@pytest.mark.parametrize("barrier", [False, True])
def test_a_row_of_a_new_category_counts_everywhere(monkeypatch: pytest.MonkeyPatch, barrier: bool) -> None:
    """As much as if the buffers that live as long were larger."""
    before = sums(monkeypatch, lambda rows: rows, barrier)
    everywhere = {"replay", "worst case", "candidates", "strategy program"}
    counted = {"parameters": {"at rest", "joint program"}, "full_parameters": {"joint program", "greedy"}}
    counted["gradients"] = {"joint program"}
    for like in (*UNIT, *MESSAGE):

        def one_row_more(rows: tuple[Row, ...], like: str = like) -> tuple[Row, ...]:
            return (*rows, *(row._replace(category=NEW, bytes=SIZE) for row in rows if row.category == like))

        def larger(rows: tuple[Row, ...], like: str = like) -> tuple[Row, ...]:
            return tuple(row._replace(bytes=row.bytes + SIZE) if row.category == like else row for row in rows)

        found, expected = sums(monkeypatch, one_row_more, barrier), sums(monkeypatch, larger, barrier)
        curve = found.pop("curve")
        assert max(slot.get(NEW, 0) for slot in curve) >= SIZE
        assert all(slot[c] == was[c] for slot, was in zip(curve, before["curve"], strict=True) for c in CATEGORIES)
        for name, value in found.items():
            assert value == expected[name], f"{name}, {like}"
        for name in everywhere | counted.get(like, set()):
            assert found[name] != before[name], f"{name} does not count {like}"


# ---- admission


def test_excess_counts_as_far_as_waiting_makes_room_for_it() -> None:
    admission = Admission(100, 40, depth=1)
    admission.issue(held=0, transient=10, freed=0)
    assert admission.admits(50) and not admission.admits(51)
    admission.excess = 20
    assert admission.admits(30)  # all fits
    assert not admission.admits(40)  # the message's 10 bytes come back: it waits for them
    assert admission.admits(50)  # nothing that ends makes room: it goes on as the plan does
    assert not admission.admits(51)  # but never beyond the plan


def test_a_message_that_is_done_gives_back_what_it_frees() -> None:
    admission = Admission(100, 40, depth=2)
    admission.reserve(30)
    admission.issue(held=5, transient=20, freed=30)
    assert admission.reserved == 75 and not admission.has_room(6, 0) and admission.fits(25)
    admission.update()
    assert admission.reserved == 75 and admission.has_room(25, 0)
    admission.finish(freed=30)
    assert admission.reserved == 45 and admission.has_room(55, 0)
    admission.restart()
    assert admission.reserved == 40
    assert Admission(None, 40, depth=2).admits(1 << 60)  # no limit


def test_a_soft_cap_is_waited_for_and_refuses_nothing() -> None:
    admission = Admission(None, 10, depth=1, soft_cap=15)
    assert admission.admits(5) and not admission.admits(6) and not admission.has_room(2, 4)
    assert admission.fits(1 << 60)


def summed(sizes: list[int], depth: int) -> int:
    return max(sum(sizes[i : i + depth]) for i in range(max(1, len(sizes) - depth + 1)))


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_only_neighbours_are_in_flight_together(depth: int, events: list[tuple[bool, int]]) -> None:
    """Messages are issued (True) and end, in any order of the two."""
    in_flight, waiting = InFlightBytes(depth), list[int]()
    for issued, size in events:
        if issued:
            in_flight.add(size)
            waiting.append(size)
        elif waiting:
            in_flight.remove()
            del waiting[0]
        assert in_flight.most() == max_in_flight_bytes(waiting, depth) == summed(waiting, depth)
        assert in_flight.most(size) == summed([*waiting, size], depth)
