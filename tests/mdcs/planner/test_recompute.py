"""Recomputation and the planners: rules, the ladder, the floor, and what a plan does with its budget."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.layers import Decoder, Precision
from benchmarks.rings import Cluster, cluster_profile
from experiments.curve import front
from mdcs.plan.job import Job
from mdcs.plan.period import choices
from mdcs.plan.plan import Plan
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem
from mdcs.planner.ilp import joint
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.pipeline import floor_bytes, make_plan, unsharded_bytes
from mdcs.planner.priority import Priority
from mdcs.planner.recompute import Planned, Random, Uniform, in_words, ladder, recompute_named, refined
from mdcs.planner.schedulers import Sequential, Solving, StrategyAssignment, Wfbp
from mdcs.planner.strategies import Greedy
from mdcs.planner.strategies import Uniform as Alike
from mdcs.profile.recompute import RecomputeOption, RecomputeUse
from mdcs.profile.schema import Profile, Slot, Unit
from mdcs.simulator.simulate import replay
from mdcs.sizes import Budget
from tests.mdcs.profiles import ADAM, chain, link


def deep(*saved: int, size: int = 500, seconds_per_byte: float = 4e-4, selective: bool = True) -> Profile:
    """Units that save so many bytes; ``full`` keeps a tenth of it for a forward's second, ``selective`` half for a tenth."""
    count, live, slots, options = len(saved), 0, list[Slot](), list[RecomputeOption]()
    for u, own in enumerate(saved):
        slots.append(Slot(u, "F", 1.0, live, live + 2 * own))
        live += own
    for u, own in reversed(list(enumerate(saved))):
        slots.append(Slot(u, "B", 2.0, live, live + own))
        live -= own
    for u, own in enumerate(saved):
        back = count - 1 - u
        options.append(RecomputeOption(u, "full", (RecomputeUse(u, back, own * 9 // 10, 1.0, own * 19 // 10),)))
        if selective:
            options.append(RecomputeOption(u, "selective", (RecomputeUse(u, back, own // 2, 0.1, own * 3 // 2),)))
    units = tuple(Unit("abcdefgh"[u], (size,), True, (u, u), (count - 1 - u,) * 2) for u in range(count))
    return Profile(units, tuple(slots), 2, link(seconds_per_byte), ADAM, recompute=tuple(options))


def known_choices(profile: Profile) -> list[tuple[str, ...]]:
    """Every choice per unit that the profile has."""
    own = [["none", *(o.choice for o in profile.recompute if o.unit == u)] for u in range(len(profile.units))]
    return list(itertools.product(*own))


DEEP = deep(9000, 7000, 8000, 9000)


# ---- rules


def test_a_rule_for_all_units_takes_those_that_have_the_option() -> None:
    profile = replace(DEEP, recompute=DEEP.recompute[:3])  # a: full and selective; b: full
    assert Uniform("full").choices(profile) == ("full", "full", "none", "none")
    assert Uniform("selective").choices(profile) == ("selective", "none", "none", "none")
    assert Uniform().choices(profile) == ("none",) * 4 and Uniform("full").name == "all"


def test_a_draw_is_of_what_units_can_do_and_repeats() -> None:
    drawn = {Random(seed).choices(DEEP) for seed in range(40)}
    assert len(drawn) > 20 and Random(3).choices(DEEP) == Random(3).choices(DEEP)
    assert Random(3).choices(chain(8, 8)) == ("none", "none")


def test_a_rule_that_no_unit_can_follow_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute all: the profile has no unit that can recompute its activations so"):
        make_plan(chain(8, 8), Alike("dp"), Wfbp(), recompute=Uniform("full"))


def test_rules_are_found_by_name() -> None:
    assert recompute_named("selective") == Uniform("selective") and recompute_named("planned") == Planned()
    with pytest.raises(ValueError, match="unknown recompute 'some': none, all, selective, random, planned"):
        recompute_named("some")


def test_a_rule_becomes_the_plans() -> None:
    plan = make_plan(DEEP, Alike("dp"), Wfbp(), recompute=Uniform("full"))
    assert plan.recompute == ("full",) * 4 and plan.prediction is not None
    assert plan.prediction.compute_s == pytest.approx(16)


# ---- the ladder and the floor


def test_the_ladder_goes_from_nothing_to_the_floor_and_needs_ever_less() -> None:
    steps = ladder(Job(DEEP))
    needs = [PlanningProblem(step, None).floor for step in steps]
    assert steps[0].recompute == () and needs == sorted(needs, reverse=True)
    assert needs[-1] == floor_bytes(DEEP, Planned()) < needs[0] * 2 // 3


def test_without_options_there_is_one_step_and_the_floor_stays() -> None:
    profile = replace(DEEP, recompute=())
    assert ladder(Job(profile)) == [Job(profile)]
    assert floor_bytes(profile, Planned()) == floor_bytes(profile) == floor_bytes(DEEP)


@pytest.mark.parametrize("profile", [deep(900, 4000, selective=True), deep(5000, 100, 3000, size=900, selective=False)])
def test_no_choice_and_no_mix_needs_less_than_the_floor(profile: Profile) -> None:
    jobs = [Job(profile, recompute=each) for each in known_choices(profile)]
    mixes = list(itertools.product(choices(profile), repeat=len(profile.units)))
    assert floor_bytes(profile, Planned()) == min(PlanningProblem(job, None).peak(mix) for job in jobs for mix in mixes)


# ---- plans


def test_a_plan_fits_every_budget_from_the_lower_floor_on() -> None:
    low, high = floor_bytes(DEEP, Planned()), floor_bytes(DEEP)
    for budget in (low, (low + high) // 2, high):
        plan = make_plan(DEEP, Greedy(), Priority(), budget=budget, recompute=Planned())
        assert plan.prediction is not None and plan.prediction.peak_bytes <= budget
        assert plan.recompute or budget == high
    with pytest.raises(InfeasibleBudget) as refused:
        make_plan(DEEP, Greedy(), Priority(), budget=low - 1, recompute=Planned())
    assert refused.value.smallest == low


def test_a_budget_that_only_recomputation_keeps_is_refused_with_both_floors() -> None:
    low, high = floor_bytes(DEEP, Planned()), floor_bytes(DEEP)
    with pytest.raises(InfeasibleBudget, match=f"the smallest budget is {high} bytes .*, with recomputation {low}"):
        make_plan(DEEP, Greedy(), Priority(), budget=high - 1)


def test_nothing_is_recomputed_where_a_plan_fits_without_and_else_what_is_planned() -> None:
    low, high = floor_bytes(DEEP, Planned()), floor_bytes(DEEP)
    assert floor_bytes(DEEP, "auto") == high
    kept = make_plan(DEEP, Greedy(), Priority(), budget=high, recompute="auto")
    assert not kept.recompute and in_words(kept) == ""
    for budget in (high - 1, low):
        plan = make_plan(DEEP, Greedy(), Priority(), budget=budget, recompute="auto")
        assert plan.recompute and plan == make_plan(DEEP, Greedy(), Priority(), budget=budget, recompute="planned")
        assert f"{sum(choice != 'none' for choice in plan.recompute)} of {len(DEEP.units)} units recompute" in in_words(plan)
    with pytest.raises(InfeasibleBudget) as refused:
        make_plan(DEEP, Greedy(), Priority(), budget=low - 1, recompute="auto")
    assert (refused.value.smallest, refused.value.recomputed) == (high, low)


def test_a_refusal_is_said_in_the_unit_of_the_budget() -> None:
    error = InfeasibleBudget(105 << 20, 160 << 20, "the model", recomputed=102 << 20)
    share, size = Budget.of("60%"), Budget.of(105 << 20)
    said = str(error.in_words_of(share, lambda: 175 << 20))
    assert said == "60 % of DDP's 175.0 MiB is 105.0 MiB; the smallest budget is 92 %, with recomputation 59 %"
    said = str(error.in_words_of(size, lambda: 175 << 20, "budget: "))
    assert said == "budget: the model does not fit 105.0 MiB; the smallest budget is 160.0 MiB, with recomputation 102.0 MiB"


def step_s(budget: int, name: str, profile: Profile = DEEP) -> float:
    try:
        plan = make_plan(profile, Greedy(), Priority(), budget=budget, recompute=recompute_named(name))
    except InfeasibleBudget:
        return float("inf")
    assert plan.prediction is not None
    return plan.prediction.step_s


def test_a_planned_mix_is_never_slower_than_a_rule_for_all() -> None:
    low, high = floor_bytes(DEEP, Planned()), unsharded_bytes(DEEP)
    for budget in range(low, high, (high - low) // 6):
        planned = step_s(budget, "planned")
        assert planned <= min(step_s(budget, name) for name in ("none", "all", "selective")) * 1.001
    budget = floor_bytes(DEEP)
    assert step_s(budget, "planned") < step_s(budget, "none")  # bytes that are freed buy strategies that send less


def test_nothing_is_recomputed_where_it_buys_nothing() -> None:
    free = replace(DEEP, link=link())
    assert make_plan(free, Greedy(), Priority(), budget=unsharded_bytes(free), recompute=Planned()).recompute == ()
    assert make_plan(DEEP, Greedy(), Priority(), recompute="planned").recompute == ()  # no budget


def test_single_choices_change_as_long_as_a_plan_gets_faster_within_its_budget() -> None:
    leanest = make_plan(DEEP, Alike("dp"), Wfbp(), recompute=Uniform("full"))
    assert refined(leanest).recompute == ()  # no budget
    budget = PlanningProblem(replace(Job(DEEP), recompute=("full", "none", "none", "none")), None).peak(leanest.strategies)
    tight = make_plan(DEEP, Alike("dp"), Sequential(), recompute=Uniform("full"), budget=budget)
    found = refined(tight)
    assert replay(found).period_s < replay(tight).period_s and replay(found).peak["total"] <= budget
    assert found.messages == tight.messages and found.recompute


def test_a_share_divides_what_is_above_the_lower_floor() -> None:
    low = floor_bytes(DEEP, Planned())
    plan = make_plan(DEEP, Greedy(), Priority(), budget=2 * low, schedule_share=1.0, recompute=Planned())
    assert PlanningProblem(plan.job, None).peak(plan.strategies) <= low


def test_a_second_share_divides_what_the_schedule_leaves() -> None:
    floor = floor_bytes(DEEP, Planned())
    slack = unsharded_bytes(DEEP) - floor
    budget = floor + slack
    plans = {
        a: make_plan(DEEP, Greedy(), Priority(), budget=budget, schedule_share=0.25, activation_share=a, recompute="planned")
        for a in (0.0, 0.5, 1.0)
    }
    for a, plan in plans.items():
        least = PlanningProblem(plan.job, None).floor
        assert least <= floor + int(a * 0.75 * slack)
        steps = [step for step in ladder(Job(DEEP)) if PlanningProblem(step, None).floor <= floor + int(a * 0.75 * slack)]
        assert steps[0] == plan.job  # as little is recomputed as fits
        assert plan.prediction is not None and plan.prediction.peak_bytes <= budget
    recomputed = [sum(choice != "none" for choice in plan.recompute) for plan in plans.values()]
    assert recomputed[0] > recomputed[-1]


@pytest.mark.parametrize(
    ("shares", "complaint"),
    [
        ({"schedule_share": 0.5, "activation_share": 1.5}, r"activation_share must be in \[0, 1\], got 1.5"),
        ({"activation_share": 0.5}, "activation_share divides what schedule_share leaves: set both"),
        ({"schedule_share": 0.5, "activation_share": 0.5, "recompute": "all"}, "activation_share needs recompute=planned"),
    ],
)
def test_a_second_share_that_divides_nothing_is_refused(shares, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_plan(DEEP, Greedy(), Priority(), budget=10**6, **{"recompute": "planned"} | shares)


def test_joint_goes_on_from_its_plan_without_recomputation_and_is_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solver gives nothing and searches find nothing, too."""
    monkeypatch.setattr("mdcs.planner.ilp.solver.sys.executable", "/bin/false")
    budget = floor_bytes(DEEP) + 2000
    two = make_plan(DEEP, Greedy(), Priority(), budget=budget)
    monkeypatch.setattr(joint, "race", lambda *_, **__: [])
    seconds, solved = list[float](), Joint.solved

    def recorded(planner: Joint, problem: PlanningProblem, *arguments: Any, **more: Any) -> Plan:
        seconds.append(planner.seconds)
        return solved(planner, problem, *arguments, **more) if problem.recomputes else two

    monkeypatch.setattr(Joint, "solved", recorded)
    three = make_plan(DEEP, Joint(seconds=2), budget=budget, recompute=Planned())
    assert two.prediction is not None and three.prediction is not None
    assert three.prediction.step_s <= two.prediction.step_s * (1 + 1e-6)
    assert seconds == [2, 1]


def test_joint_proves_a_bound_over_all_choices_and_says_the_gap() -> None:
    budget = (floor_bytes(DEEP, Planned()) + floor_bytes(DEEP)) // 2
    plan = make_plan(DEEP, Joint(seconds=120), budget=budget, recompute=Planned())
    assert plan.prediction is not None and plan.bound_s is not None and ", gap " in plan.outcome
    assert sum(slot.seconds for slot in DEEP.slots) < plan.bound_s <= plan.prediction.step_s
    assert plan.recompute and plan.prediction.peak_bytes <= budget
    assert plan.prediction.step_s <= step_s(budget, "planned") * (1 + 1e-9)
    fixed = make_plan(Job(DEEP, recompute=plan.recompute), Joint(seconds=120), budget=budget)
    assert plan.bound_s <= (fixed.bound_s or 0) * (1 + 1e-6)  # of these choices alone


@pytest.mark.parametrize("share", [None, 0.5])
def test_the_strategy_ilp_decides_recomputation_and_is_never_slower_than_with_the_ladders(share: float | None) -> None:
    low, high = floor_bytes(DEEP, Planned()), unsharded_bytes(DEEP)
    for budget in (low, (low + high) // 2)[share is not None :]:
        known = {"schedule_share": share, "budget": budget, "recompute": Planned()}
        plan, ladders = (make_plan(DEEP, each, Priority(), **known) for each in (Ilp(), Greedy()))
        assert plan.prediction is not None and ladders.prediction is not None
        assert plan.prediction.peak_bytes <= budget
        assert plan.prediction.step_s <= ladders.prediction.step_s * 1.001


def test_two_solutions_take_the_seconds_of_one() -> None:
    seconds: list[float] = []

    @dataclass(frozen=True)
    class Timed(Solving):
        name = "timed"

        def schedule(self, mix: StrategyAssignment) -> Plan:
            seconds.append(self.seconds)
            return Priority().schedule(mix)

    budget = (floor_bytes(DEEP, Planned()) + floor_bytes(DEEP)) // 2
    for strategy, wanted in ((Ilp(seconds=8), [3, 3]), (Greedy(), [6])):
        seconds.clear()
        make_plan(DEEP, strategy, Timed(seconds=6), budget=budget, recompute=Planned())
        assert seconds == wanted


TRANSFORMER = cluster_profile(
    Decoder(4, 768, 12, 12, 3072, 8192, gated=False, tied=True).of_batch(2, 1024), 156e12, Cluster(2, 4, 250e9, 6e9),
    precision=Precision(2, 2, 4), memory_rate=1.6e12,
)  # fmt: skip


@pytest.mark.parametrize(("profile", "count"), [(DEEP, 50), (deep(4000, 2000, 3000, size=2000), 50), (TRANSFORMER, 12)])
def test_more_bytes_are_never_slower(profile: Profile, count: int) -> None:
    low, high = floor_bytes(profile, Planned()), unsharded_bytes(profile)
    budgets = [low + i * (high - low) // (count - 1) for i in range(count)]
    points = front(lambda budget, *_: make_plan(profile, Greedy(), Sequential(), budget=budget, recompute=Planned()), budgets)
    steps = [point.step_s for point in points]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    assert all(p.plan and p.plan.prediction and p.plan.prediction.peak_bytes <= p.budget for p in points)
