"""Candidates of a search: what is worked out of numbers is what a plan, its ledger and its replay say."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from mdcs.plan.job import Job
from mdcs.plan.ledger import min_feasible_budget, worst_case_bytes_by_slot
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.budget_repair import repair
from mdcs.planner.candidates import Candidate, Candidates
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.search import MOVES
from mdcs.profile.link import Contention
from mdcs.profile.schema import Unit
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.ilp.test_slot_model import plans
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.profiles import with_options

CHOICES = (Strategy.dp, Strategy.zero2, Strategy.sdp, Strategy.fsdp)
NAMES = ("wfbp", "partitioning", "fusion", "dear", "priority", "sequential")


def walked(among: Candidates, plan: Plan, steps: int, rng: random.Random) -> list[Candidate]:
    """Candidates that random moves come by, whatever they are worth."""
    out, now = [], among.of(plan)
    for _ in range(steps):
        score = among.score(now, math.inf)
        move = rng.choice([*MOVES])
        try:
            found = None if score is None else move(among, now, score, rng)
        except PlanError:
            continue
        if found is not None and among.score(found, math.inf) is not None:
            now = found
        out += [] if found is None else [found]
    return out


def asked_of(which: int) -> Job:
    """Jobs with and without contention, gradients that come early, several micro-steps, a barrier, and recomputation."""
    profile = with_options(job(which), random.Random(which))
    if which % 2:
        contention = Contention(1e-4, 1e-11, 0.1, 1e-4, 1e-10, skew_seconds=1e-4, dispatch_seconds=1e-4, turn_seconds=1e-3)
        units = tuple(replace(u, gradients=_early(u) if u.trainable else ()) for u in profile.units)
        profile = replace(profile, units=units, contention=contention, interference=0.2)
    return Job(profile, micro_steps=1 + which // 4, cross_iteration=which % 3 != 1)


def _early(unit: Unit) -> tuple[tuple[int, float], ...]:
    return tuple((n, round(1 / (i + 1), 3)) for i, n in enumerate(unit.segments))


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("tight", [True, False])
def test_a_candidate_is_worth_what_the_replay_of_its_plan_says(which: int, tight: bool) -> None:
    asked = asked_of(which)
    rng, problem, seen = random.Random(which), PlanningProblem(asked, None), 0
    for _ in range(2):
        mix = problem.mix([rng.choice(CHOICES) for _ in asked.profile.units])
        plan = SCHEDULERS[NAMES[which]]().schedule(mix)
        if tight:
            plan = repair(plan, int(1.1 * problem.peak(mix.strategies)))
        among = Candidates(asked, plan.budget)
        for candidate in walked(among, plan, 60, rng):
            score = among.score(candidate, math.inf)
            try:
                made = among.plan(candidate, plan)
                expected = None if tight and min_feasible_budget(made) > (plan.budget or 0) else replay(made)
            except PlanError:
                expected = None
            assert (score is None) == (expected is None)
            if score is not None and expected is not None:
                seen += 1
                assert score.step_s == pytest.approx(expected.period_s, rel=1e-9)
                assert not tight or list(map(max, among._arrival, among._running)) == worst_case_bytes_by_slot(made)
    assert seen > 30


def test_a_plan_is_its_own_candidate() -> None:
    for _, plan in plans(3):
        among = Candidates(plan.job, plan.budget)
        assert among.plan(among.of(plan), plan) == plan


def test_without_numba_the_same_loops_run_as_python() -> None:
    script = """
import math, sys
sys.modules["numba"] = None  # an import of it fails
from mdcs.planner.candidates import Candidates
from mdcs.simulator.simulate import compiled_loops
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.ilp.test_slot_model import plans
assert not hasattr(compiled_loops().run, "py_func")
for _, plan in plans(0):
    among = Candidates(plan.job, None)
    score = among.score(among.of(plan), math.inf)
    assert abs(score.step_s - replay(plan).period_s) < 1e-12
"""
    subprocess.run([sys.executable, "-c", script], check=True)
