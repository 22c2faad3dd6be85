"""Making a schedule fit: gathers later, reductions earlier, fused messages split, blocks merged, in this order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdcs.plan.ledger import check, min_feasible_budget
from mdcs.plan.period import Op, Strategy
from mdcs.plan.plan import PlanError
from mdcs.planner.budget_repair import fastest_repair, repair
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.pipeline import Scheduler
from mdcs.planner.priority import Priority, nearest_deadline_first
from mdcs.planner.schedulers import Dear, Fusion, Partitioning, Sequential
from mdcs.planner.strategies import RandomMix
from mdcs.profile.link import Kind, Link
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from mdcs.simulator.simulate import replay, undelayed
from mdcs.sizes import MIB
from tests.mdcs.planner.test_schedulers import listed
from tests.mdcs.profiles import ADAM, Job, chain, examples, jobs, link, of_job, planned, schedulers, seeds

AR, RS, AG_F, AG_B, *_ = Kind


def busiest_in(profile: Profile, phase: str, unit: int, size: int) -> Profile:
    """Activations of ``size`` bytes in one slot."""
    slots = (replace(s, peak=size) if (s.phase, s.unit) == (phase, unit) else s for s in profile.slots)
    return replace(profile, slots=tuple(slots))


# ---- by hand: B:c B:b B:a F:a F:b F:c, units of 32 bytes on two ranks

THREE = chain(8, 8, 8)


@pytest.mark.parametrize(
    ("budget", "gathers"),
    [
        (48 + 500 + 96, [("AG_F a", 3), ("AG_F b", 3), ("AG_F c", 3)]),
        (48 + 500 + 95, [("AG_F a", 3), ("AG_F b", 3), ("AG_F c", 4)]),  # what is needed last waits first
        (48 + 500 + 64, [("AG_F a", 3), ("AG_F b", 3), ("AG_F c", 4)]),
        (48 + 500 + 63, [("AG_F a", 3), ("AG_F b", 4), ("AG_F c", 4)]),
        (48 + 500 + 32, [("AG_F a", 3), ("AG_F b", 4), ("AG_F c", 4)]),
    ],
)
def test_gathers_wait_until_the_slot_has_room(budget: int, gathers: list[tuple[str, int]]) -> None:
    plan = planned(busiest_in(THREE, "F", 0, 500), "sdp", Dear())
    fitted = repair(plan, budget)
    assert listed(fitted)[3:] == gathers
    assert fitted.budget == budget
    assert listed(fitted)[:3] == listed(plan)[:3]  # reductions stay


def test_reductions_go_first_where_gathers_take_the_room() -> None:
    # a is frozen, so nothing forbids to gather it, at the turn, ahead of b's reduction.
    plain = chain(8, 8, 8, frozen=[0])
    heavy = {("F", 0): (1000, 1000), ("B", 0): (0, 1000)}  # live and peak: most is held at the turn
    slots = []
    for s in plain.slots:
        live, high = heavy.get((s.phase, s.unit), (0, 0))
        slots.append(replace(s, live=live, peak=high))
    plan = planned(replace(plain, slots=tuple(slots)), "sdp")
    assert listed(plan) == [("RS c", 1), ("RS b", 2), ("AG_F a", 3), ("AG_F b", 4), ("AG_F c", 5)]
    c, b, a, *rest = plan.messages
    gather_first = replace(plan, messages=(c, a, replace(b, slot=3), *rest))
    assert min_feasible_budget(gather_first) == 48 + 1000 + 32 + (32 + 16 + 16)  # b: gradient, what it receives, what it sums
    fitted = repair(gather_first, 48 + 1000 + 32 + 32 + 16)
    assert listed(fitted)[:3] == [("RS c", 1), ("RS b", 2), ("AG_F a", 3)]


def test_reductions_go_earlier_to_free_their_gradients() -> None:
    plan = planned(busiest_in(THREE, "B", 0, 500), "dp", Fusion(1 / MIB))
    late = replace(plan, messages=tuple(replace(m, slot=3) for m in plan.messages))
    assert min_feasible_budget(late) == 96 + 3 * 32 + 500
    fitted = repair(late, 96 + 32 + 500)
    assert listed(fitted) == [("AR c", 1), ("AR b", 2), ("AR a", 3)]


def test_a_fused_message_is_split_when_it_holds_too_much() -> None:
    plan = planned(busiest_in(THREE, "B", 0, 500), "dp", Fusion(10**6))
    assert listed(plan) == [("AR c+b+a", 3)]
    fitted = repair(plan, 96 + 32 + 500)
    assert listed(fitted) == [("AR c", 1), ("AR b", 2), ("AR a", 3)]


def test_blocks_are_merged_when_their_state_does_not_fit() -> None:
    profile = chain(320, 320, 320, optimizer=replace(ADAM, state_fixed=10_000))
    plan = planned(profile, "zero2", Partitioning(256 / MIB))
    assert {len(b) for b in plan.blocks} == {5}
    smallest = min_feasible_budget(planned(profile, "zero2"))
    fitted = repair(plan, smallest)
    assert [len(b) for b in fitted.blocks] == [1, 1, 1]
    assert min_feasible_budget(fitted) <= smallest < min_feasible_budget(plan)


@pytest.mark.parametrize("scheduler", [Dear(), Fusion(64 / MIB), Partitioning(256 / MIB), Priority(256 / MIB)])
def test_below_the_sequential_peak_nothing_fits(scheduler: Scheduler) -> None:
    profile = busiest_in(chain(320, 320, 320), "B", 0, 5000)
    smallest = min_feasible_budget(planned(profile, "sdp"))
    repair(planned(profile, "sdp", scheduler), smallest)
    with pytest.raises(PlanError, match=r"slot 2 \(B:a\) needs \d+ bytes of \d+, with every gather as late and every"):
        repair(planned(profile, "sdp", scheduler), smallest - 1)


def test_the_prologue_issues_at_the_turn_what_later_periods_issue_before() -> None:
    """There what is held beside a gather differs: a fused one that fits in slot 3 may not fit at the turn."""
    spans = [("a", 1, (0, 3), (0, 3)), ("b", 1, (1, 1), (2, 2)), ("c", 511, (2, 2), (1, 1))]
    units = tuple(
        Unit(name, (elements,), True, forward, backward, grad_dtype="bfloat16") for name, elements, forward, backward in spans
    )
    forward = [(unit, "F", 5, 5) for unit in (0, 1, 2, 0)]
    backward = [(0, "B", 5, 5), (2, "B", 0, 1032), (1, "B", 0, 0), (0, "B", 0, 5)]
    slots = tuple(Slot(unit, phase, 0.0, live, top) for unit, phase, live, top in forward + backward)
    profile = Profile(units, slots, 2, Link((0.0,) * 4, (0.0,) * 4, 1, 400), Optimizer())
    mix = PlanningProblem(Job(profile), None).mix([Strategy.dp, Strategy.zero2, Strategy.sdp])
    plan = repair(Fusion().schedule(mix), min_feasible_budget(Sequential().schedule(mix)))
    assert [len(m.parts) for m in plan.messages if m.kind is AG_F] == [1, 1]
    assert replay(plan).period_s == 0


def test_the_reserve_is_part_of_the_budget() -> None:
    plan = of_job(planned(THREE, "sdp", Dear()), reserve=100)
    fitted = repair(plan, min_feasible_budget(planned(THREE, "sdp")) + 100)
    assert fitted.reserve == 100
    with pytest.raises(PlanError, match="as late and every reduction as early"):
        repair(plan, min_feasible_budget(planned(THREE, "sdp")) + 99)


# ---- for random jobs


@examples(100)
@given(jobs(), seeds, schedulers, st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_any_schedule_fits_from_the_sequential_peak_on(job: Job, seed: int, scheduler: Scheduler, share: float) -> None:
    mix = job.problem.mix(RandomMix(seed).choose(job.problem).strategies)
    plan = scheduler.schedule(mix)
    low, high = min_feasible_budget(Sequential().schedule(mix)), min_feasible_budget(plan)
    budget = low + int(share * max(0, high - low))
    fitted = repair(plan, budget)
    assert min_feasible_budget(fitted) <= fitted.budget == budget
    assert replay(fitted).peak["total"] <= budget
    if budget >= high:
        assert fitted.messages == plan.messages
    assert fitted.strategies == plan.strategies
    ops = {Op(m.kind, u, m.micro) for m in fitted.messages for u, _ in m.parts}
    assert ops == set(mix.ops)
    assert repair(fitted, budget) == fitted


# ---- the fastest of several ways


@examples(40)
@given(jobs(), seeds, schedulers)
def test_the_fastest_fit_fits_and_is_no_slower(job: Job, seed: int, scheduler: Scheduler) -> None:
    mix = job.problem.mix(RandomMix(seed).choose(job.problem).strategies)
    plan, budget = scheduler.schedule(mix), min_feasible_budget(Sequential().schedule(mix))
    found = fastest_repair(plan, budget)
    check(found)
    assert min_feasible_budget(found) <= budget == found.budget
    assert replay(found).period_s <= replay(repair(plan, budget)).period_s


def test_gathers_far_ahead_do_not_take_the_room_of_gradients() -> None:
    """Forward and backward have time for all messages, if the next gather and the last reduction are beside each slot."""
    profile = chain(*[1000] * 8, link=link(4e-4, depth=2, block=1 << 14), forward_s=2.0, backward_s=4.0)
    mix = PlanningProblem(Job(profile), None).mix([Strategy.fsdp] * 8)
    blocks, windows = Priority().partition(mix), {op: mix.period.window(op) for op in mix.ops}
    plan = mix.plan("eager", blocks, nearest_deadline_first(mix, blocks, windows, undelayed(mix.period)))
    hidden, sequential = replay(plan).period_s, planned(profile, "fsdp")
    budget = min_feasible_budget(sequential) + 3 * 4000  # a unit has 4,000 bytes
    assert min_feasible_budget(plan) > budget + 3 * 4000
    assert replay(repair(plan, budget)).period_s > 1.1 * hidden
    assert replay(fastest_repair(plan, budget)).period_s <= 1.001 * hidden
    assert fastest_repair(plan, min_feasible_budget(plan)).messages == plan.messages
