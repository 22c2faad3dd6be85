"""Recomputation in the integer programs against enumeration: the rows of slots, the optimum, and the bound of any plan."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest

from mdcs.plan.job import Job, recomputing
from mdcs.plan.period import choices
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.budget_repair import repair
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.slot_schedule import RecomputeColumns
from mdcs.planner.ilp.solver import IntegerProgram, solve
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.recompute import Random
from mdcs.profile.schema import Optimizer
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.ilp.test_slot_model import FAST, exhaustive, rows_hold
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.planner.test_recompute import deep, known_choices
from tests.mdcs.profiles import with_options

# ---- slots


@pytest.mark.parametrize("seed", range(8))
def test_the_rows_of_a_slot_are_what_the_choices_make_of_it(seed: int) -> None:
    profile = with_options(job(seed), random.Random(seed))
    problem, program = PlanningProblem(Job(profile), None, recomputes=True), IntegerProgram()
    columns, exact = RecomputeColumns(program, problem), 0
    for draw in range(20):
        chosen = Random(draw).choices(profile)
        values = [0.0] * len(program.costs)
        columns.set(values, chosen)
        assert columns.choices(values) == chosen and not program.broken(values)
        for place, (slot, before) in enumerate(zip(recomputing(profile, chosen).slots, profile.slots, strict=True)):

            def amount(terms: list[tuple[int, float]], values: list[float] = values) -> float:
                return sum(c * values[x] for x, c in terms)

            assert before.seconds + amount(columns.grown(place)) == pytest.approx(slot.seconds)
            terms, size = columns.live(place)
            live, peak = amount(terms) + size, max(amount(terms) + size for terms, size in columns.peaks(place))
            assert live <= slot.live and peak <= slot.peak  # activations are never negative
            exact += live < 0 or peak == slot.peak
        seconds = sum(c * x for c, x in zip(program.costs, values, strict=True))
        assert seconds == pytest.approx(sum(o.seconds for o in profile.recompute if chosen[o.unit] == o.choice))
    assert exact == 20 * len(profile.slots)


# ---- bounds


def plans(seed: int) -> Iterator[tuple[PlanningProblem, Plan]]:
    """Random mixes and choices under every scheduler, within budgets that bind."""
    rng = random.Random(seed)
    profile = dataclasses.replace(with_options(job(seed), rng), interference=rng.choice([0.0, 0.3]))
    profile = dataclasses.replace(profile, link=dataclasses.replace(profile.link, depth=2))
    micro, cross = rng.choice([1, 1, 2]), rng.random() < 0.6
    for name in FAST:
        asked = Job(profile, micro, cross, recompute=Random(rng.randrange(1000)).choices(profile))
        problem = PlanningProblem(asked, None)
        plan = SCHEDULERS[name]().schedule(problem.mix([rng.choice(choices(profile)) for _ in profile.units]))
        budget = int(problem.peak(plan.strategies) * rng.uniform(1.0, 1.2))
        try:
            yield PlanningProblem(asked, budget, recomputes=True), repair(plan, budget)
        except PlanError:
            continue


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_recomputed_satisfies_the_rows_and_costs_no_less(seed: int) -> None:
    """So the optimum of the model, and of every coarser one, is a lower bound of any plan with any recomputation."""
    for problem, plan in plans(seed):
        for width in (1, 3):
            assert rows_hold(problem, plan, width).recompute == (plan.recompute or ("none",) * len(plan.strategies))


def tight(seed: int, units: int, selective: bool = True) -> PlanningProblem:
    """A small job whose budget is halfway between the floors with and without recomputation."""
    rng = random.Random(seed)
    profile = deep(*(rng.randint(500, 4000) for _ in range(units)), size=rng.randint(200, 400), selective=selective)
    profile = dataclasses.replace(profile, optimizer=Optimizer("sgd", state_tensors=1))
    without, free = (PlanningProblem(Job(profile), None, recomputes=own) for own in (False, True))
    return dataclasses.replace(free, budget=(without.floor + free.floor) // 2)


@pytest.mark.parametrize("seed", range(2))
def test_the_optimum_is_that_of_the_best_choices_and_no_plan_is_faster(seed: int) -> None:
    """Three units, every choice, and plans of any choice and mix."""
    problem = tight(seed, 3, selective=False)
    free, best = SlotModel(problem), float("inf")
    for chosen in known_choices(problem.job.profile):
        fixed = problem.decided(chosen)
        model = SlotModel(fixed)
        answer = solve(model.program)
        if answer.bound is not None and answer.values is not None:
            best = min(best, model.step_bound(answer.bound))
    found = solve(free.program)
    assert found.bound is not None and free.step_bound(found.bound) == pytest.approx(best, rel=1e-5)
    every = list(itertools.product(known_choices(problem.job.profile), itertools.product(*free.choices)))
    for chosen, strategies in random.Random(seed).sample(every, 100):
        plan = SCHEDULERS["partitioning"]().schedule(problem.decided(chosen).mix(strategies))
        with contextlib.suppress(PlanError):
            assert replay(repair(plan, problem.budget or 0)).period_s >= best * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_the_optimum_is_that_of_an_exhaustive_search(seed: int) -> None:
    """Two units: every choice, every mix and all windows, without a solver."""
    problem = tight(seed, 2)
    free, best = SlotModel(problem), float("inf")
    for chosen in known_choices(problem.job.profile):
        fixed = problem.decided(chosen)
        compute_s = sum(slot.seconds for slot in fixed.profile.slots)
        for strategies in {fixed.mix(each).strategies for each in itertools.product(*free.choices)}:
            best = min(best, compute_s + exhaustive(fixed, strategies))
    found = solve(free.program)
    assert found.bound is not None and free.step_bound(found.bound) == pytest.approx(best, rel=1e-5)
