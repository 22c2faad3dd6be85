"""Moves: whatever they make is a plan of the same job, or is refused; those that look at stalls go where the stall is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.planner.candidates import Candidates
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.neighborhood import MOVES, PLAN_MOVES, Move, PlanMove, advance_blocking, change_strategy, merge_adjacent_blocks
from mdcs.planner.registry import SCHEDULERS
from mdcs.profile.link import Kind
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.ilp.test_slot_model import plans
from tests.mdcs.profiles import chain, link


def moved(move: Move | PlanMove, plan: Plan, rng: random.Random) -> Plan | None:
    """Return the plan after a move. Raises PlanError where that cannot be run."""
    if move in PLAN_MOVES:
        return move(plan, rng)
    among = Candidates(plan.job, None)
    now = among.of(plan)
    score = among.score(now, math.inf)
    assert score is not None
    found = move(among, now, score, rng)  # type: ignore[call-arg, arg-type]
    return None if found is None else among.plan(found, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("move", [*MOVES, *PLAN_MOVES], ids=lambda move: move.__name__)
def test_a_move_gives_another_plan_of_the_same_job_or_none(move: Move | PlanMove) -> None:
    rng, made = random.Random(0), 0
    for seed in range(6):
        for _, plan in plans(seed):
            for _ in range(4):
                try:
                    found = moved(move, plan, rng)
                except PlanError:
                    continue
                if found is not None:
                    made += 1
                    assert (found.job, found.budget) == (plan.job, plan.budget)
                    assert found.strategies == plan.strategies or move is change_strategy
                    assert replay(found).period_s > 0 if found.budget is None else True
    assert made > 20


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_are_joined_into_fewer_messages_of_the_same_bytes(apart: bool) -> None:
    made = 0
    for seed in range(6):
        for _, plan in plans(seed):
            for unit in range(len(plan.blocks)):
                found = merge_adjacent_blocks(plan, unit, apart=apart)
                if found is not None:
                    made += 1
                    assert len(found.messages) < len(plan.messages)
                    assert found.sent_bytes() == plan.sent_bytes()
                    assert [sum(sizes) for sizes in found.blocks] == [sum(sizes) for sizes in plan.blocks]
    assert made > 5


def test_only_blocks_that_follow_each_other_are_joined() -> None:
    """The last two of four blocks have their gradients early; the second of the pairs is torn apart on the way back."""
    profile = chain(128)
    profile = replace(profile, units=(replace(profile.units[0], gradients=((64, 1.0), (64, 0.5))),))
    mix = PlanningProblem(Job(profile), None).mix([Strategy.zero2])
    drafts = [Message(Kind.RS, ((0, b),), 1) for b in (3, 2, 1, 0)]
    gathers = [Message(Kind.AG_F, ((0, b),), 1) for b in (2, 0, 1, 3)]
    plan = mix.plan("test", ((32,) * 4,), [*drafts, *gathers])
    found = merge_adjacent_blocks(plan, 0, apart=False)
    assert found is not None and found.blocks == ((64, 32, 32),)
    assert [(m.kind, m.parts) for m in found.messages] == [
        (Kind.RS, ((0, 2),)), (Kind.RS, ((0, 1),)), (Kind.RS, ((0, 0),)),
        (Kind.AG_F, ((0, 1),)), (Kind.AG_F, ((0, 0),)), (Kind.AG_F, ((0, 2),)),
    ]  # fmt: skip
    assert merge_adjacent_blocks(found, 0, apart=False) is None  # the first's come at another time
    both = merge_adjacent_blocks(found, 0, apart=True)
    assert both is not None and both.blocks == ((96, 32),)


def zero2(*drafts: Message) -> Plan:
    problem = PlanningProblem(Job(chain(64, 64, link=link(1 / 64))), None)
    mix = problem.mix([Strategy.zero2] * 2)
    return mix.plan("test", mix.unpartitioned_blocks(), drafts)


def test_what_compute_waits_for_is_sent_earlier() -> None:
    profile = chain(64, 64, 64, link=link(1 / 64))
    plan = SCHEDULERS["wfbp"]().schedule(PlanningProblem(Job(profile), None).mix([Strategy.fsdp] * 3))
    faster = [other for seed in range(40) if (other := safely(advance_blocking, plan, seed)) is not None]
    assert min(replay(other).period_s for other in faster) <= replay(plan).period_s


def safely(move: Move, plan: Plan, seed: int) -> Plan | None:
    try:
        return moved(move, plan, random.Random(seed))
    except PlanError:
        return None
