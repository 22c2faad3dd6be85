"""Plans that a solver decides: within the budget, no worse than what they start from, and always with their outcome."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

import mdcs
from mdcs.plan.job import Job
from mdcs.plan.ledger import check, min_feasible_budget
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.planner import search
from mdcs.planner.budget_repair import repair
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp import decode, joint
from mdcs.planner.ilp.decode import SearchRequest
from mdcs.planner.ilp.joint import Joint, MemoryAware, heuristics, issued_early
from mdcs.planner.ilp.slot_model import SlotDecision
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.link import Contention
from mdcs.simulator.simulate import replay
from tests.mdcs.planner.test_every_plan import job
from tests.mdcs.profiles import chain, few, link

HOWS = ((1, True), (2, True), (1, False))  # micro-steps, cross-iteration


def best_heuristic(profile: mdcs.Profile, budget: int, **options: object) -> float:
    plans = [
        mdcs.make_plan(Job(profile, **options), Greedy(), SCHEDULERS[name](), budget=budget, schedule_share=share)  # type: ignore[arg-type]
        for name in ("priority", "dear", "wfbp", "sequential")
        for share in (0.0, 0.5)
    ]
    return min(plan.prediction.step_s for plan in plans if plan.prediction)


@pytest.mark.parametrize(("seed", "micro_steps", "cross_iteration"), few((seed, *how) for seed, how in enumerate(HOWS)))
def test_joint_keeps_the_budget_and_beats_the_heuristics(seed: int, micro_steps: int, cross_iteration: bool) -> None:
    profile = job(seed)
    options = {"micro_steps": micro_steps, "cross_iteration": cross_iteration}
    budget = int(mdcs.floor_bytes(Job(profile, **options)) * 1.15) + 64
    plan = mdcs.make_plan(Job(profile, reserve=64, **options), Joint(seconds=10), budget=budget)
    assert plan.budget == budget and plan.prediction is not None and plan.prediction.peak_bytes <= budget
    check(plan)
    assert Plan.from_json(plan.to_json()) == plan and Plan.from_json(plan.to_json()).outcome == plan.outcome
    assert plan.prediction.step_s <= best_heuristic(profile, budget, reserve=64, **options) * (1 + 1e-9)
    assert (plan.strategy, plan.scheduler) == ("joint", "joint")
    assert plan.outcome.startswith(("optimal", "best heuristic"))
    assert plan.bound_s is not None and plan.bound_s <= plan.prediction.step_s * (1 + 1e-6)


@pytest.mark.parametrize("share", few([0.6, None, 0.0]))
def test_memory_aware_keeps_its_share_and_beats_the_heuristics(share: float | None) -> None:
    profile = job(4)
    budget = int(mdcs.floor_bytes(profile) * 1.2)
    plan = mdcs.make_plan(profile, Greedy(), MemoryAware(seconds=4), budget=budget, schedule_share=share)
    assert plan.prediction is not None and plan.prediction.peak_bytes <= (plan.budget or 0) <= budget
    if share is not None:
        alone = PlanningProblem(Job(profile), None).peak(plan.strategies)
        assert plan.prediction.peak_bytes - alone <= share * (budget - mdcs.floor_bytes(profile)) + 1
    for name in ("priority", "dear", "wfbp", "sequential"):
        other = mdcs.make_plan(profile, Greedy(), SCHEDULERS[name](), budget=budget, schedule_share=share)
        assert other.prediction is not None and plan.prediction.step_s <= other.prediction.step_s * (1 + 1e-9)
    assert plan.outcome.startswith("schedule ") and plan.scheduler == "memory_aware"


def test_without_a_budget_the_schedule_is_made_of_fused_or_partitioned_messages_of_real_blocks() -> None:
    profile = dataclasses.replace(job(3), link=dataclasses.replace(job(3).link, block=400))
    plan = mdcs.make_plan(profile, Uniform("zero2"), MemoryAware(seconds=4))
    assert plan.budget is None and plan.outcome.startswith(("schedule optimal", "schedule best heuristic"))
    assert max(len(blocks) for blocks in plan.blocks) > 1


def test_a_solver_that_gives_nothing_is_said_and_the_best_heuristic_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdcs.planner.ilp.solver.sys.executable", "/bin/false")
    profile = job(1)
    budget = int(mdcs.floor_bytes(profile) * 1.2)
    plan = mdcs.make_plan(profile, Joint(), budget=budget)
    assert plan.outcome.startswith("best heuristic (") and "the solver failed" in plan.outcome
    assert plan.bound_s is None


def test_the_bound_of_a_large_job_does_not_wait_for_heuristics(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take all of the time."""
    profile = chain(*[64] * 8, link=link(1 / 64, depth=2))
    profile = dataclasses.replace(profile, contention=Contention(message_seconds=1.0))  # no integer program gives a bound
    asked = threading.Event()

    def solve_bound(request: SearchRequest) -> decode.SolverResult:
        asked.set()
        return decode.solve_bound(request)

    def heuristics(*_: object) -> Iterator[Plan]:
        assert asked.wait(60)
        yield SCHEDULERS["wfbp"]().schedule(PlanningProblem(Job(profile), None).mix([Strategy.fsdp] * 8))

    monkeypatch.setattr(joint, "solve_bound", solve_bound)
    monkeypatch.setattr(joint, "heuristics", heuristics)
    mdcs.make_plan(profile, Joint(seconds=3))
    assert asked.is_set()


def test_joint_takes_no_scheduler_and_no_share() -> None:
    with pytest.raises(ValueError, match="strategy joint decides the schedule"):
        mdcs.make_plan(job(0), Joint(), SCHEDULERS["wfbp"]())
    with pytest.raises(ValueError, match="strategy greedy needs a scheduler"):
        mdcs.make_plan(job(0), Greedy())


def test_without_a_limit_nothing_is_gathered_again_for_backward() -> None:
    plan = mdcs.make_plan(job(0), Joint(seconds=2))
    assert not any(strategy.regathers for strategy in plan.strategies)


def test_without_a_limit_messages_are_issued_as_early_as_their_order_allows() -> None:
    moved = 0
    for seed in range(4):
        problem = PlanningProblem(Job(job(seed)), None)
        plan = SCHEDULERS["priority"]().schedule(problem.mix([Strategy.fsdp] * len(problem.profile.units)))
        late = dataclasses.replace(repair(plan, (problem.floor + min_feasible_budget(plan)) // 2), budget=None)
        early = issued_early(search.evaluate(late))
        assert early.step_s <= replay(late).period_s * 1.001
        assert [(m.kind, m.parts) for m in early.plan.messages] == [(m.kind, m.parts) for m in late.messages]
        assert all(a.slot <= b.slot for a, b in zip(early.plan.messages, late.messages, strict=True))
        moved += early.plan.messages != late.messages
    assert moved


@functools.cache
def started() -> tuple[PlanningProblem, list[search.EvaluatedPlan]]:
    """A tight job, and heuristics' plans for it."""
    sizes = 40_000, 10_000, 40_000, 20_000, 60_000, 30_000
    profile = chain(*sizes, link=link(8e-6, depth=2, block=1 << 14), live=1000)
    problem = PlanningProblem(Job(profile), int(1.25 * mdcs.floor_bytes(profile)))
    coarse = itertools.islice(heuristics(problem, None), 24)
    return problem, list(map(search.evaluate, coarse))


@pytest.mark.parametrize(
    ("thousands", "factor"), [((30, 10, 20, 40, 10, 20, 30, 30), 1.1), ((80, 10, 10, 80, 10, 10, 80, 10), 1.25)]
)
def test_joint_starts_from_plans_as_good_as_those_of_the_heuristic_alone(thousands: Sequence[int], factor: float) -> None:
    profile = chain(*[1000 * each for each in thousands], link=link(8e-6, depth=2, block=1 << 13), live=1000)
    problem = PlanningProblem(Job(profile), int(factor * mdcs.floor_bytes(profile)))
    alone = mdcs.make_plan(profile, Greedy(), SCHEDULERS["priority"](), budget=problem.budget)
    assert alone.prediction is not None
    assert min(replay(plan).period_s for plan in heuristics(problem, None)) <= alone.prediction.step_s * (1 + 1e-9)


def request(problem: PlanningProblem, seconds: float, block: int = 1 << 14) -> SearchRequest:
    return SearchRequest(problem, "joint", None, seconds, block, True, time.monotonic())


def test_a_race_starts_from_several_plans_and_ends_with_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_FEWEST", 300)
    monkeypatch.setattr(search, "_TRIES", 0)  # the number of candidates ends the searches, not the time
    problem, known = started()
    found = search.race(known, time.monotonic() + 120, strategies=True)
    racing = search.most_promising(known, search.RACING)
    assert len(racing) > 2 and len({(p.strategies, p.scheduler) for _, p in racing}) == len(racing)
    rounds = [found[: len(racing)], found[len(racing) :][: len(racing) // 2]]
    for (before, _), (after, plan) in zip(racing, rounds[0], strict=True):
        assert after <= before * (1 + 1e-9) and min_feasible_budget(plan) <= (problem.budget or 0)
    assert min(step_s for step_s, _ in rounds[1]) <= min(step_s for step_s, _ in rounds[0])
    assert min(step_s for step_s, _ in found) < min(step_s for step_s, _ in known)


def test_models_get_finer_until_the_whole_or_the_time_ends() -> None:
    problem, _ = started()
    length = problem.job.period.length
    models = list(decode._finer(request(problem, 100.0), problem))
    assert len(models[0][1]) == 1 and models[-1] == (1, set(range(length)))
    assert all(wide >= narrow and len(few) <= len(many) for (wide, few), (narrow, many) in itertools.pairwise(models))
    assert len(list(decode._finer(request(problem, 1e-9), problem))) <= 2


def test_the_room_for_messages_is_that_of_half_blocks_and_at_most_half_of_the_slack() -> None:
    problem, _ = started()
    floor = problem.floor

    def room(budget: int, block: int) -> int:
        return budget - (request(dataclasses.replace(problem, budget=budget), 1.0, block).realistic().budget or 0)

    assert room(floor, 1 << 14) == 0
    assert room(floor + 1000, 1 << 14) == 500
    small, large = room(2 * floor, 1 << 13), room(2 * floor, 1 << 14)
    assert 2 * 2**12 <= small < large < 3 * small  # two in flight, of at least their payload


def test_the_decision_of_the_best_plan_is_tried_in_finer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, known = started()
    (slow_s, slow), *_, (fast_s, fast) = sorted(known, key=lambda timed: -timed[0])
    assert fast_s < slow_s
    decisions = [SlotDecision(plan.strategies) for plan in (slow, fast, slow)]
    tried: list[Sequence[int]] = []

    def messages_of(_: SearchRequest, decision: SlotDecision, sizes: Sequence[int]) -> Iterator[Plan]:
        tried.append(sizes)
        return iter([fast if decision is decisions[1] else slow])

    monkeypatch.setattr(decode, "messages_of", messages_of)
    found = decode.decode(request(problem, 600.0, 1600), decisions)
    assert min(found) == (fast_s, fast)
    assert tried == [[1600]] * 3 + [[800, 400, 200, 100, 12800, 0]] and found[-1].plan is fast
