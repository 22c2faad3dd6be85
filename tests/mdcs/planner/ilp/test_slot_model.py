"""The slot model against what it must agree with: the simulator from above, and an exhaustive search over small jobs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from mdcs.plan.job import Job
from mdcs.plan.ledger import Ledger
from mdcs.plan.period import Op, Strategy, choices
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.budget_repair import repair
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.solver import solve
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.schedulers import Sequential, StrategyAssignment
from mdcs.profile.schema import Optimizer, Profile
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.profiles import ADAM, chain, link

FAST = sorted(set(SCHEDULERS) - {"memory_aware"})


def plans(seed: int, *, latencies: bool = False) -> Iterator[tuple[PlanningProblem, Plan]]:
    """Random mixes under every scheduler, within budgets that bind and without one."""
    rng = random.Random(seed)
    profile = dataclasses.replace(job(seed), interference=rng.choice([0.0, 0.3]))
    if not latencies:  # of several messages in flight none is priced
        profile = dataclasses.replace(profile, link=dataclasses.replace(profile.link, depth=2))
    problem = PlanningProblem(Job(profile, rng.choice([1, 1, 2, 3]), rng.random() < 0.6), None)
    for name in FAST:
        plan = SCHEDULERS[name]().schedule(problem.mix([rng.choice(choices(profile)) for _ in profile.units]))
        budget = rng.choice([None, int(problem.peak(plan.strategies) * rng.uniform(1.0, 1.2))])
        if budget is not None:
            try:
                plan = repair(plan, budget)
            except PlanError:
                continue
        yield dataclasses.replace(problem, budget=budget), plan


def rows_hold(problem: PlanningProblem, plan: Plan, width: int, tight: Collection[int] | None = None) -> StrategyDecision:
    """Return what the model decides where its columns are the plan's, whose rows hold and whose cost is no more than its step."""
    model = SlotModel(problem, fixed=plan.strategies, width=width, tight=tight)
    values = model.values_of(plan)
    assert values is not None, plan.scheduler
    cost = sum(c * x for c, x in zip(model.program.costs, values, strict=True))
    assert model.step_bound(cost) <= replay(plan).period_s * (1 + 1e-9)
    return model.decide(values)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_simulator_does_satisfies_the_rows_and_costs_no_less(seed: int) -> None:
    """So the optimum of the model, and of every coarser one, is a lower bound of the step time of any plan."""
    for problem, plan in plans(seed):
        tight = set(random.Random(seed).sample(range(plan.period.length), 2))
        for width in (1, 3):
            rows_hold(problem, plan, width)
            rows_hold(problem, plan, 1 + width, tight)


def test_behind_a_barrier_an_all_reduce_may_be_faster_than_its_halves() -> None:
    """It is complete before the barrier, under backward; the gather of zero2 waits for the barrier."""
    profile = chain(1024, 1024, 1024, link=link(1 / 2048, depth=2), forward_s=0.1, optimizer=ADAM)
    problem = PlanningProblem(Job(profile, cross_iteration=False), None)
    answer = solve((model := SlotModel(problem)).program)
    whole, parted = (replay(SCHEDULERS["wfbp"]().schedule(problem.mix([k] * 3))).period_s for k in (Strategy.dp, Strategy.zero2))
    assert answer.bound is not None and model.step_bound(answer.bound) <= whole * (1 + 1e-9) < parted


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    """Also of the strategies it chooses and the latencies it prices (of one message at a time)."""
    for problem, plan in plans(seed + 100, latencies=True):
        if problem.budget is None:
            continue
        for width, tight in ((1, None), (2, None), (3, {0}), (3, ())):
            model = SlotModel(problem, width=width, tight=tight)
            answer = solve(model.program, seconds=20)
            assert answer.status == "optimal" and answer.bound is not None
            assert model.step_bound(answer.bound) <= replay(plan).period_s * (1 + 1e-6)
        break


# ---- exhaustive search over the same model, with neither a solver nor the code that builds its rows


def small_job(seed: int, units: int) -> Profile:
    rng = random.Random(seed)
    profile = chain(*(rng.randint(20, 400) for _ in range(units)), link=link(seconds_per_byte=rng.choice([5e-4, 1e-3, 2e-3])))
    slots, live = [], 0
    for s in profile.slots:
        slots.append(dataclasses.replace(s, seconds=rng.uniform(0.2, 1.0), live=live, peak=live + rng.randint(0, 1500)))
        live = max(0, live + (1 if s.phase == "F" else -1) * rng.randint(0, 800))
    return dataclasses.replace(profile, slots=tuple(slots), optimizer=Optimizer("sgd", state_tensors=1))


def smallest_wait(mix: StrategyAssignment, windows: dict[Op, tuple[int, int]]) -> float:
    """Seconds that compute waits per period when work is sent in any fractions, earliest deadline first."""
    period, profile = mix.period, mix.profile
    pending: list[list[Any]] = []  # deadline, whether a gather, unit, opening, seconds left
    waited = 0.0
    for q in range(6 * period.length):
        p, slot = divmod(q, period.length)
        if slot == 0:
            waited = 0.0
            for op in mix.ops:
                wire = profile.wire(op.kind, mix.payload(op))
                first, last = (w + q for w in windows[op])
                pending.append([last, op.kind.is_gather, op.unit, first, profile.link.beta_of(op.kind) * wire])
            pending.sort(key=lambda x: x[:3])
        due = [x for x in pending if x[0] <= q]
        waited += sum(x[-1] for x in due)
        pending = pending[len(due) :]
        room = profile.slots[period.slots[slot].place].seconds
        for x in pending:
            if x[3] <= q:
                sent = min(room, x[-1])
                x[-1] -= sent
                room -= sent
    return waited


def largest_bytes(mix: StrategyAssignment, rest: int, windows: dict[Op, tuple[int, int]]) -> int:
    """The most that any slot holds when buffers live as the windows say."""
    period, length = mix.period, mix.period.length
    held = [rest + mix.profile.slots[s.place].peak for s in period.slots]
    for op in mix.ops:
        if op.kind.is_gather and mix.strategies[op.unit].sharded:
            for q in range(windows[op][0], period.release(op, mix.strategies[op.unit]) + 1):
                held[q % length] += mix.payload(op)
        if not op.kind.is_gather:
            span = period.backward(op.unit, 0)
            assert span is not None
            for q in range(span[0] % length, windows[op][1]):
                held[q] += mix.payload(op)
    return max(held)


def exhaustive(problem: PlanningProblem, strategies: tuple[Strategy, ...]) -> float:
    """The smallest wait over all windows that fit the budget; infinite if none does."""
    mix = problem.mix(strategies)
    choices = []
    for op in mix.ops:
        first, last = mix.period.window(op)
        if not op.kind.is_gather:
            choices.append([(first, q) for q in range(first, last + 1)])
        elif mix.strategies[op.unit].sharded:
            choices.append([(q, last) for q in range(first, last + 1)])
        else:
            choices.append([(first, last)])
    best, rest = float("inf"), Ledger(Sequential().schedule(mix)).rest_bytes
    for windows in map(dict, (zip(mix.ops, choice, strict=True) for choice in itertools.product(*choices))):
        if largest_bytes(mix, rest, windows) <= (problem.budget or 10**12):
            best = min(best, smallest_wait(mix, windows))
    return best


CASES = [(0, 2, 0.25), (1, 2, 0.0), (2, 2, 0.1), (3, 2, None), (4, 2, 0.0), (0, 2, 0.1), (1, 2, 0.25), (5, 3, 0.1), (6, 3, 0.2)]
CASES = [pytest.param(*case, marks=[pytest.mark.slow] if n else []) for n, case in enumerate(CASES)]


@pytest.mark.parametrize(("seed", "units", "over"), CASES)
def test_the_solver_equals_exhaustive_search(seed: int, units: int, over: float | None) -> None:
    profile = small_job(seed, units)
    floor = PlanningProblem(Job(profile), None).floor
    problem = PlanningProblem(Job(profile), None if over is None else int(floor * (1 + over)))
    free = SlotModel(problem)
    mixes = {problem.mix(mix).strategies for mix in itertools.product(*free.choices)}
    best = {mix: exhaustive(problem, mix) for mix in mixes}
    assert solve(free.program).bound == pytest.approx(min(best.values()), rel=1e-5, abs=1e-9)
    for mix, wait in random.Random(seed).sample(sorted(best.items()), min(4, len(best))):
        answer = solve(SlotModel(problem, fixed=mix).program)
        if wait == float("inf"):
            assert answer.values is None
        else:
            assert answer.bound == pytest.approx(wait, rel=1e-5, abs=1e-9)
