"""Plans that a run tries: that they differ and keep the budget, and that the fastest by measured steps goes on."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from mdcs.plan.job import Job
from mdcs.planner.pipeline import floor_bytes, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.recompute import Planned
from mdcs.planner.schedulers import Sequential
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.planner.trials import SuccessiveHalving, proposals

from ..profiles import chain, link, recomputable

PROFILE = chain(*[640] * 6, link=link(1e-3, depth=2, block=400, gap=0.01))


def test_proposals_differ_and_keep_the_budget_and_the_job() -> None:
    job = Job(PROFILE, micro_steps=2)
    budget = int(1.3 * floor_bytes(job))
    plan = make_plan(job, Greedy(), Priority(), budget=budget)
    found = proposals(plan, 6, seconds=0)
    assert found[0] is plan and len(found) == 6
    assert {(each.budget, each.job) for each in found} == {(budget, job)}
    assert all(each.prediction is not None and each.prediction.peak_bytes <= budget for each in found)
    for one, other in itertools.combinations(found, 2):
        assert (one.strategies, one.messages) != (other.strategies, other.messages)
    assert len({len(each.messages) for each in found}) >= 4  # of several sizes


def test_a_plan_that_is_predicted_far_slower_is_not_tried() -> None:
    fast = make_plan(PROFILE, Greedy(), Priority())
    assert fast.prediction is not None
    for each in proposals(fast, 8, seconds=0)[1:]:
        assert each.prediction is not None and each.prediction.step_s < 1.5 * fast.prediction.step_s
    slow = make_plan(PROFILE, Uniform("fsdp"), Sequential())
    assert proposals(slow, 3, seconds=0)[0] is slow
    assert proposals(slow, 1) == [slow]


def test_where_predictions_are_good_the_others_are_about_as_fast() -> None:
    """The next best plan is tried in any case: its prediction may be the one that is wrong."""
    plan = make_plan(PROFILE, Greedy(), Priority(), budget=int(1.3 * floor_bytes(PROFILE)))

    def slower(calibration_runs: dict[str, tuple[float, float]]) -> list[float]:
        job = replace(plan.job, profile=replace(PROFILE, calibration_runs=calibration_runs))
        found = [each.prediction for each in proposals(replace(plan, job=job), 12, seconds=0)]
        seconds = [each.step_s for each in found if each is not None]
        return [s / min(seconds) - 1 for s in seconds]

    assert max(slower({"dp wfbp": (1.001, 1.0)})[2:], default=0.0) <= 0.03 < max(slower({}))
    assert len(slower({"dp wfbp": (1.1, 1.0)})) > len(slower({"dp wfbp": (1.001, 1.0)})) >= 2


def test_an_integer_program_is_asked_for_a_plan_too() -> None:
    plan = make_plan(PROFILE, Greedy(), Priority(), budget=int(1.3 * floor_bytes(PROFILE)))
    assert "joint" in {each.strategy for each in proposals(plan, 8, seconds=2)}


def test_recomputation_goes_a_step_up_and_down_only_where_the_plan_decides_it() -> None:
    plain, kept = chain(*[640] * 8, link=link(1e-3)), 5_000  # bytes of activations of each unit
    lives = [*range(0, 8 * kept, kept), *range(8 * kept, 0, -kept)]
    slots = tuple(replace(slot, live=live, peak=live) for slot, live in zip(plain.slots, lives, strict=True))
    profile = recomputable(replace(plain, slots=slots), freed=kept, seconds=0.1, peak=kept)
    budget = int(1.3 * floor_bytes(profile, Planned()))
    plan = make_plan(profile, Greedy(), Priority(), budget=budget, recompute="planned")
    assert plan.recompute
    assert {each.recompute for each in proposals(plan, 12, seconds=0)} == {plan.recompute}
    open_ = proposals(plan, 12, recompute="planned", seconds=0)
    assert len({each.recompute for each in open_}) > 1
    assert all(each.prediction is not None and each.prediction.peak_bytes <= budget for each in open_)


# ---- successive halving


def halved(
    means: list[float], noise: float, seed: int, drift: float = 0.0, steps: int = 22, first: float | None = None
) -> tuple[SuccessiveHalving, int]:
    """The end of a run whose steps take these seconds, the first after a switch ``first`` or 5 % more, and its number of
    steps.
    """
    rng, halving, before, count = random.Random(seed), SuccessiveHalving(len(means), steps=steps), -1, 0
    while halving.winner is None:
        now = halving.current
        usual = means[now] * (1 + drift * count / steps)
        if now != before:
            usual = first or 1.05 * usual
        halving.add(usual * (1 + rng.gauss(0, noise)))
        before, count = now, count + 1
    return halving, count


@pytest.mark.parametrize("first", [None, 0.7])  # it changes the plan, but waits for no step before it
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_best_is_found_within_a_percent(count: int, first: float | None) -> None:
    good = 0
    for seed in range(100):
        rng = random.Random(seed)
        means = [1 + rng.uniform(0, 0.15) for _ in range(count)]
        halving, taken = halved(means, 0.005, seed, drift=0.01, first=first)
        assert taken <= 22 and halving.winner is not None
        good += means[halving.winner] <= 1.01 * min(means)
    assert good >= 95


def test_the_first_goes_on_where_all_are_equal() -> None:
    assert halved([1.0] * 4, 0.0, 0)[0].winner == 0


def test_the_winner_was_measured_fastest() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        count = rng.randint(2, 6)
        halving, _ = halved([1 + rng.uniform(0, 0.1) for _ in range(count)], rng.choice([0.001, 0.01, 0.05]), seed)
        table = halving.table()
        assert all(row.slower_s >= 0 or row.dropped is not None for row in table)
        assert halving.winner is not None and table[halving.winner].slower_s == 0


def test_turns_rounds_and_what_is_counted() -> None:
    halving, ran = SuccessiveHalving(4, steps=22), []
    while halving.winner is None:
        now = halving.current
        halving.add((1.0, 1.2, 0.9, 1.3)[now] + (5 if not ran or ran[-1] != now else 0))
        ran.append(now)
    assert halving.winner == halving.current == 2
    table = halving.table()
    assert [row.median_s for row in table] == [1.0, 1.2, 0.9, 1.3]  # no first step after a switch
    assert [row.dropped is None for row in table] == [False, False, True, False]
    assert table[2].rounds >= table[1].rounds == 1
    assert Counter(ran)[2] > Counter(ran)[3]
    halving.add(9.0)
    assert halving.table() == table


def test_a_step_that_something_disturbed_decides_nothing() -> None:
    halving, count = SuccessiveHalving(3, steps=26), 0
    while halving.winner is None:
        now = halving.current
        halving.add((1.0, 1.1, 0.95)[now] * (3 if count == 4 else 1))
        count += 1
    assert halving.winner == 2


def test_one_candidate_has_won() -> None:
    halving = SuccessiveHalving(1, steps=0)
    assert (halving.winner, halving.current, halving.table()[0].steps) == (0, 0, 0)


@pytest.mark.parametrize(("count", "steps"), [(0, 20), (4, 7)])
def test_too_few_candidates_or_steps_are_refused(count: int, steps: int) -> None:
    with pytest.raises(ValueError):
        SuccessiveHalving(count, steps=steps)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_are_above_0(seconds: float) -> None:
    with pytest.raises(ValueError):
        SuccessiveHalving(2).add(seconds)
