"""The strategy ILP: its memory rows are the ledger's, its answer is the optimum, and it says when it has none."""

from __future__ import annotations

import itertools
import random

import pytest

from mdcs.plan.cost import CostModel
from mdcs.plan.job import Job
from mdcs.plan.period import Strategy
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem
from mdcs.planner.ilp.slot_schedule import RecomputeColumns
from mdcs.planner.ilp.solver import IntegerProgram
from mdcs.planner.ilp.strategy_ilp import Ilp, memory_rows
from mdcs.planner.strategies import Greedy
from mdcs.profile.link import Link
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from tests.mdcs.planner.test_recompute import deep

KINDS = [k for k in Strategy if not k.in_node]


def chain(rng: random.Random, layers: int, world: int) -> Profile:
    """A chain of units with random sizes, times and activations; some are frozen."""
    units = tuple(
        Unit(f"u{i}", (rng.randint(10, 3000),), i == 0 or rng.random() < 0.8, (i, i), (layers - 1 - i,) * 2)
        for i in range(layers)
    )
    slots, live = [], 0
    for i in range(layers):
        slots.append(Slot(i, "F", rng.uniform(5e-4, 2e-3), live, live + rng.randint(100, 4000)))
        live += rng.randint(50, 2000)
    for i in reversed(range(layers)):
        slots.append(Slot(i, "B", rng.uniform(1e-3, 4e-3), live, live + rng.randint(100, 4000)))
        live = live * i // (i + 1)
    link = Link((2e-4, 1e-4, 1e-4, 1e-4), (2e-7,) * 4, 2, 4096)
    return Profile(units, tuple(slots), world, link, Optimizer("adam", 2, 4, 2, 1e-8, 1e-5))


def time(profile: Profile, mix: tuple[Strategy, ...]) -> float:
    return sum(CostModel(profile).unit_s(u, k) for u, k in enumerate(mix))


@pytest.mark.parametrize("seed", range(8))
def test_the_tightest_memory_row_of_any_mix_is_its_ledger_peak(seed: int) -> None:
    rng = random.Random(seed)
    profile = chain(rng, rng.randint(1, 5), rng.choice([2, 3]))
    problem = PlanningProblem(Job(profile, micro_steps=rng.choice([1, 2])), 10**9)
    rows = [(held, cap - needed) for held, cap, (_, needed) in memory_rows(problem, RecomputeColumns(IntegerProgram(), problem))]
    for _ in range(25):
        mix = [rng.choice(KINDS) for _ in profile.units]
        slack = min(left - sum(held[u][k] for u, k in enumerate(mix)) for held, left in rows)
        assert slack == 10**9 - problem.peak(mix)


@pytest.mark.parametrize("cross_iteration", [True, False])
def test_the_mix_is_the_best_of_all_that_fit(cross_iteration: bool) -> None:
    profile = chain(random.Random(11), 4, 2)
    floor = PlanningProblem(Job(profile, cross_iteration=cross_iteration), None).floor
    problem = PlanningProblem(Job(profile, cross_iteration=cross_iteration), int(floor * 1.06))
    mix, outcome, _ = Ilp().choose(problem)
    best = min(time(profile, m) for m in itertools.product(KINDS, repeat=4) if problem.fits(m))
    assert problem.fits(mix)
    assert time(profile, mix) == pytest.approx(best, rel=1e-9)
    assert outcome == "optimal" or outcome.startswith("greedy: ")


def test_it_beats_greedy_where_greedy_is_not_optimal() -> None:
    profile = chain(random.Random(1), 16, 2)
    problem = PlanningProblem(Job(profile), int(PlanningProblem(Job(profile), None).floor * 1.1))
    mix, *_ = Ilp().choose(problem)
    assert time(profile, mix) < time(profile, Greedy().choose(problem).strategies) * 0.999


def test_a_budget_below_the_floor_is_refused_with_the_floor() -> None:
    profile = chain(random.Random(3), 3, 2)
    floor = PlanningProblem(Job(profile), None).floor
    with pytest.raises(InfeasibleBudget, match=f"smallest budget is {floor} bytes"):
        Ilp().choose(PlanningProblem(Job(profile), floor - 1))


def test_a_solver_that_fails_is_said_and_greedy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdcs.planner.ilp.solver.sys.executable", "/bin/false")
    profile = chain(random.Random(5), 3, 2)
    problem = PlanningProblem(Job(profile), int(PlanningProblem(Job(profile), None).floor * 1.1))
    mix, outcome, _ = Ilp().choose(problem)
    assert mix == Greedy().choose(problem).strategies
    assert outcome.startswith("greedy: the solver failed")


def test_a_solver_that_overruns_is_killed() -> None:
    profile = chain(random.Random(5), 3, 2)
    problem = PlanningProblem(Job(profile), int(PlanningProblem(Job(profile), None).floor * 1.1))
    mix, outcome, _ = Ilp(seconds=0.001).choose(problem)
    assert mix == Greedy().choose(problem).strategies
    assert "no answer within" in outcome


@pytest.mark.parametrize("seed", range(2))
def test_mix_and_recomputation_are_the_best_of_all_that_fit(seed: int) -> None:
    """Whatever the recomputation that the problem starts from."""
    rng = random.Random(seed)
    profile = deep(*(rng.randint(500, 4000) for _ in range(3)), size=rng.randint(200, 400))
    low, high = (PlanningProblem(Job(profile), None, recomputes=free).floor for free in (True, False))
    problem = PlanningProblem(Job(profile, recompute=("full",) * 3), (low + high) // 2, recomputes=True)
    mix, outcome, recompute = Ilp().choose(problem)

    def step_s(recompute: tuple[str, ...], mix: tuple[Strategy, ...]) -> float:
        return time(profile, mix) + sum(problem.decided(recompute).job.period.seconds)

    assert outcome == "optimal" and recompute and problem.decided(recompute).fits(mix)
    known = itertools.product(("none", "selective", "full"), repeat=3)
    fitting = [(c, m) for c in known for m in itertools.product(KINDS, repeat=3) if problem.decided(c).fits(m)]
    assert step_s(recompute, mix) == pytest.approx(min(step_s(*each) for each in fitting), rel=1e-9)
