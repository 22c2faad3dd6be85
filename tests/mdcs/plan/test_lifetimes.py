"""The table of lifetimes: a new kind of buffer is one row, and every sum over the table has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mdcs.plan import ledger, lifetimes
from mdcs.plan.job import Job
from mdcs.plan.ledger import Ledger, worst_case_bytes_by_slot
from mdcs.plan.lifetimes import CATEGORIES, Row, unit_rows
from mdcs.plan.period import Period
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.candidates import Candidates
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp import slot_model
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.strategy_ilp import memory_rows
from mdcs.planner.schedulers import Wfbp
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
    of_message = lifetimes._message_rows
    with monkeypatch.context() as patched:

        def of_unit(period: Period, unit: int, strategy: Strategy) -> tuple[Row, ...]:
            return change(unit_rows(period, unit, strategy))

        for module in (ledger, slot_model, lifetimes):
            patched.setattr(module, "unit_rows", of_unit)
        patched.setattr(lifetimes, "_message_rows", lambda *sizes: change(of_message(*sizes)))
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
@pytest.mark.parametrize("like", [*UNIT, *MESSAGE])
def test_a_row_of_a_new_category_counts_everywhere(monkeypatch: pytest.MonkeyPatch, like: str, barrier: bool) -> None:
    """As much as if the buffers that live as long were larger."""

    def one_row_more(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return (*rows, *(row._replace(category=NEW, bytes=SIZE) for row in rows if row.category == like))

    def larger(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(row._replace(bytes=row.bytes + SIZE) if row.category == like else row for row in rows)

    before = sums(monkeypatch, lambda rows: rows, barrier)
    found, expected = sums(monkeypatch, one_row_more, barrier), sums(monkeypatch, larger, barrier)
    curve = found.pop("curve")
    assert max(slot.get(NEW, 0) for slot in curve) >= SIZE
    assert all(slot[c] == was[c] for slot, was in zip(curve, before["curve"], strict=True) for c in CATEGORIES)
    for name, value in found.items():
        assert value == expected[name], name
    everywhere = {"replay", "worst case", "candidates", "strategy program"}
    counted = {"parameters": {"at rest", "joint program"}, "full_parameters": {"joint program", "greedy"}}
    counted["gradients"] = {"joint program"}
    for name in everywhere | counted.get(like, set()):
        assert found[name] != before[name], f"{name} does not count it"
