"""The search by replays: never slower, within the budget, the same for the same seed, as good as trying everything. Its moves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from dataclasses import replace

import pytest

from mdcs.plan.job import Job
from mdcs.plan.ledger import check, min_feasible_budget
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message
from mdcs.planner.budget_repair import repair
from mdcs.planner.candidates import Candidates
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.joint import merge_adjacent_blocks
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.schedulers import StrategyAssignment
from mdcs.planner.search import MOVES, Move, advance_blocking, anneal, change_recompute, change_strategy
from mdcs.profile.link import Kind
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.ilp.test_slot_model import plans, small_job
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.planner.test_recompute import deep
from tests.mdcs.profiles import chain, link


def start(seed: int, name: str = "wfbp") -> Plan:
    problem = PlanningProblem(Job(job(seed)), None)
    mix = problem.mix([Strategy.fsdp] * len(problem.profile.units))
    return repair(SCHEDULERS[name]().schedule(mix), int(problem.floor * 1.2))


@pytest.mark.parametrize("strategies", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_never_slower_keeps_the_budget_and_finds_what_there_is(seed: int, strategies: bool) -> None:
    """A plan that waits for every message can be made faster."""
    plan = start(seed, "sequential" if strategies else "wfbp")
    found = anneal(plan, math.inf, strategies=strategies)
    check(found)
    assert found.budget == plan.budget and min_feasible_budget(found) <= (plan.budget or 0)
    assert replay(found).period_s <= replay(plan).period_s * (0.99 if strategies else 1)
    assert strategies or found.strategies == plan.strategies


def test_the_same_seed_gives_the_same_plan() -> None:
    assert anneal(start(1), math.inf, seed=3) == anneal(start(1), math.inf, seed=3)


def test_it_ends_at_the_bound_when_told_to_and_when_there_is_no_time() -> None:
    plan = start(0)
    assert anneal(plan, math.inf, bound=replay(plan).period_s) is plan
    assert anneal(plan, math.inf, stop=lambda: True) is plan
    assert anneal(plan, 0.0) is plan


def test_what_is_recomputed_changes_only_if_it_may() -> None:
    """Everything is recomputed at first, under a budget that needs half of it."""
    profile = deep(9000, 7000, 8000, 9000)
    asked = Job(profile, recompute=("full",) * 4)
    problem = PlanningProblem(asked, None)
    need = PlanningProblem(Job(profile, recompute=("full", "full", "none", "none")), None).peak((Strategy.fsdp,) * 4)
    plan = repair(SCHEDULERS["wfbp"]().schedule(problem.mix((Strategy.fsdp,) * 4)), need)
    kept, changed = anneal(plan, math.inf), anneal(plan, math.inf, recompute=True)
    check(changed)
    assert kept.recompute == plan.recompute != changed.recompute
    assert replay(changed).period_s < replay(kept).period_s - 1


def every(mix: StrategyAssignment) -> list[Plan]:
    """Every order and every issue slot of whole units."""
    out = []
    windows = [range(mix.period.window(op)[0], mix.period.window(op)[1] + 1) for op in mix.ops]
    for order in itertools.permutations(range(len(mix.ops))):
        for slots in itertools.product(*windows):
            drafts = [Message(mix.ops[i].kind, ((mix.ops[i].unit, 0),), slots[i], micro=mix.ops[i].micro) for i in order]
            try:
                out.append(mix.plan("every", mix.unpartitioned_blocks(), drafts))
            except PlanError:
                continue
    return out


def test_from_the_worst_plan_it_mostly_finds_the_best_of_all_orders_and_slots() -> None:
    found = []
    for seed in range(4):
        problem = PlanningProblem(Job(small_job(seed, 2)), None)
        mix = problem.mix([Strategy.zero2, Strategy.zero2])
        budget = int(1.1 * problem.peak(mix.strategies))
        fitting = [p for p in every(mix) if min_feasible_budget(p) <= budget]
        worst = max(fitting, key=lambda p: replay(p).period_s)
        step_s = replay(anneal(repair(worst, budget), math.inf, strategies=False)).period_s
        found.append(step_s <= min(replay(p).period_s for p in fitting) * (1 + 1e-9))
    assert sum(found) >= 3


def moved(move: Move, plan: Plan, rng: random.Random) -> Plan | None:
    """Return the plan after a move; None where there is none, or where it cannot be run."""
    with contextlib.suppress(PlanError):
        among = Candidates(plan.job, None)
        now = among.of(plan)
        score = among.score(now, math.inf)
        assert score is not None
        found = move(among, now, score, rng)
        return None if found is None else among.plan(found, plan)
    return None


@functools.cache
def scheduled() -> list[Plan]:
    """Plans of six random jobs, under every scheduler."""
    return [plan for seed in range(6) for _, plan in plans(seed)]


@pytest.mark.parametrize("move", [m for m in MOVES if m is not change_recompute], ids=lambda move: move.__name__)
def test_a_move_gives_another_plan_of_the_same_job_or_none(move: Move) -> None:
    rng, made = random.Random(0), 0
    for plan in scheduled():
        for found in (moved(move, plan, rng) for _ in range(4)):
            if found is not None:
                made += 1
                assert (found.job, found.budget) == (plan.job, plan.budget)
                assert found.strategies == plan.strategies or move is change_strategy
                assert replay(found).period_s > 0 if found.budget is None else True
    assert made > 20


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_are_joined_into_fewer_messages_of_the_same_bytes(apart: bool) -> None:
    made = 0
    for plan in scheduled():
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


def test_what_compute_waits_for_is_sent_earlier() -> None:
    profile = chain(64, 64, 64, link=link(1 / 64))
    plan = SCHEDULERS["wfbp"]().schedule(PlanningProblem(Job(profile), None).mix([Strategy.fsdp] * 3))
    faster = [other for seed in range(40) if (other := moved(advance_blocking, plan, random.Random(seed))) is not None]
    assert min(replay(other).period_s for other in faster) <= replay(plan).period_s
