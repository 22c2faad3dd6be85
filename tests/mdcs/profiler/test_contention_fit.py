"""Contention of a CPU: the fit on replays and on noise, the measurement on two ranks."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mdcs.model.units import ByLeaf, partition
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import make_plan
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.contention import Contention
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile
from mdcs.profiler.consensus import merge_profiles
from mdcs.profiler.contention_fit import (
    CALIBRATION_PLANS,
    StepBreakdown,
    _nearest,
    _off_in_every_round,
    fit_contention,
    measure_contention,
)
from mdcs.profiler.model_profile import measure_profile
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB
from tests.mdcs.profiles import of_job

from ..profiles import chain


def calibration_plans(profile: Profile) -> list[Plan]:
    return [make_plan(profile, Uniform(kind), scheduler) for kind, scheduler in CALIBRATION_PLANS]


def times(plans: list[Plan], profile: Profile) -> list[StepBreakdown]:
    return [StepBreakdown.of(replay(of_job(plan, profile=profile)).times) for plan in plans]


def processor_of(plan: Plan, profile: Profile, alone_s: float) -> float:
    """Processor seconds of an iteration, where compute loses all that messages take."""
    seconds = of_job(plan, profile=profile).seconds
    return alone_s + sum(seconds.copy) + sum(seconds.update) + sum(seconds.lost)


def test_the_replays_of_the_fitted_profile_are_what_was_seen() -> None:
    slow = chain(*[10**6] * 8, link=Link.uniform(1, 50), forward_s=0.02, backward_s=0.04)
    contention = Contention(2e-3, 2e-9, 1.0, 3e-3, 1.5e-8, skew_seconds=5e-3, dispatch_seconds=1e-3, turn_seconds=0.02)
    true = replace(slow, contention=contention)
    plans, alone_s = calibration_plans(slow), sum(slot.seconds for slot in slow.slots)
    seen = [s._replace(processor=processor_of(p, true, alone_s)) for p, s in zip(plans, times(plans, true), strict=True)]
    before = times(plans, slow)
    faster = replace(slow, slots=tuple(replace(slot, seconds=slot.seconds / 2) for slot in slow.slots))
    # Slots are scaled to what compute takes now.
    profile = fit_contention(faster, plans, seen, StepBreakdown(alone_s, 0.0, 0.0, alone_s))
    assert profile.contention.skew_seconds == pytest.approx(5e-3, rel=0.1)
    assert [*profile.calibration_runs] == ["zero2 sequential", "zero2 dear", "fsdp wfbp", "dp wfbp"]
    assert all(predicted == pytest.approx(measured, rel=0.05) for predicted, measured in profile.calibration_runs.values())
    for want, got in zip(seen, times(plans, profile), strict=True):
        assert got.computing == pytest.approx(want.computing, rel=0.05)
        assert got.communicating == pytest.approx(want.communicating, rel=0.1)
    assert any(got.step < 0.9 * want.step for want, got in zip(seen, before, strict=True))


def test_nothing_is_fitted_to_compute_that_takes_no_core() -> None:
    profile = chain(*[10**6] * 4, link=Link.uniform(1, 50), forward_s=0.02, backward_s=0.04)
    plans, alone_s = calibration_plans(profile), sum(slot.seconds for slot in profile.slots)
    seen = [s._replace(processor=1.0) for s in times(plans, profile)]
    found = fit_contention(profile, plans, seen, StepBreakdown(alone_s, 0.0, 0.0, 0.0), lost=0.0).contention
    assert found.compute_per_message == found.compute_per_byte == found.compute_per_work == 0


@pytest.mark.parametrize("seed", range(4))
def test_no_prediction_runs_away_with_the_noise_of_what_is_seen(seed: int) -> None:
    """Each step took 0.7 to 2 times as long as in the replay, and a small delay of waits is hidden in all plans alike."""
    link = Link((0.011, 0.003, 0.0016, 0.0016), (5e-9,) * 4, 2, 4 * MIB, gap=(0.013,) * 4)
    slow = chain(60_000, 60_000, link=link, forward_s=0.0005, backward_s=0.0006, world=8)
    profile = replace(slow, contention=Contention(4e-3, 1e-10, 1.0, 0.0, 6e-9))
    plans, alone_s, noise = calibration_plans(profile), sum(slot.seconds for slot in slow.slots), random.Random(seed)
    seen = [s._replace(waiting=s.waiting * noise.uniform(0.7, 2), processor=s.step) for s in times(plans, profile)]
    found = fit_contention(slow, plans, seen, StepBreakdown(alone_s, 0.0, 0.0, alone_s)).calibration_runs
    assert all(0.5 < predicted / measured < 2 for predicted, measured in found.values()), found


def test_a_search_finds_a_minimum_unless_it_lies_far_from_the_guess() -> None:
    found = _nearest([1.0, 0.0], [1.0, 1.0], lambda v: 100 * ((v[0] - 2) ** 2 + (v[1] - 0.5) ** 2))
    assert found == pytest.approx([2, 0.5], abs=0.02)
    assert _nearest([1.0], [1.0], lambda v: (v[0] + 3) ** 2) == [0.0]  # never negative
    assert _nearest([1.0], [0.001], lambda v: 1e-3 * (v[0] - 2) ** 2) == pytest.approx([1.0], abs=0.01)


def test_a_profile_that_predicts_by_more_than_half_wrongly_says_so() -> None:
    off = replace(chain(3), calibration_runs={"zero2 dear": (0.16, 0.1), "dp wfbp": (0.04, 0.1), "fsdp wfbp": (0.14, 0.1)})
    assert [*off.unreliable_runs] == ["zero2 dear", "dp wfbp"]
    assert off.reliability_warning.endswith(
        "in calibration runs (zero2 dear 160.0 ms, measured 100.0; dp wfbp 40.0 ms, measured 100.0)"
    )
    assert replace(off, calibration_runs={}).reliability_warning == ""


@pytest.mark.parametrize(
    ("steps_s", "processor", "rounds", "cause"),
    [
        ((0.09, 0.03), 1.0, 2, ""),  # once as predicted: the rounds differ, the prediction is none the worse
        ((0.09, 0.10), 0.5, 2, "other programs had the processor for 50% of the time"),
        ((0.09, 0.10), 1.0, 2, "the model of costs does not describe these plans"),
        ((0.09,), 1.0, 1, "there was time for one round"),
    ],
)
def test_a_prediction_is_wrong_where_no_round_is_as_predicted_and_the_cause_is_said(steps_s, processor, rounds, cause) -> None:  # type: ignore[no-untyped-def]
    profile = replace(chain(3), calibration_runs={"dp wfbp": (0.03, 0.095), "fsdp wfbp": (0.1, 0.1)})
    seen = [[StepBreakdown(0.01, s - 0.01, 0.0), StepBreakdown(0.02, 0.08, 0.0)] for s in steps_s]
    alone = [StepBreakdown(0.01, 0.0, 0.0, 0.01 * processor)] * rounds
    said = _off_in_every_round(profile, seen, alone, shares_cores=True)
    assert cause in said and ("dp wfbp" in said and "fsdp" not in said) == bool(cause) == bool(said)


def measure() -> tuple[Profile, bool]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(), torch.nn.Linear(64, 8))
    state = copy.deepcopy(model.state_dict())
    random_state = torch.random.get_rng_state()
    optimizer = torch.optim.Adam(model.parameters())
    units = partition(model, ByLeaf())

    def step() -> torch.Tensor:
        return model(torch.ones(256, 64)).square().mean()

    link = Link.uniform(1, 50, emulated=True)
    profile = merge_profiles(measure_profile(model, units, step, optimizer, world=dist.get_world_size(), link=link))
    measured = measure_contention(profile, model, units, step, optimizer, seconds=0.0)
    same = all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    same = same and torch.equal(torch.random.get_rng_state(), random_state) and step().requires_grad
    return measured, same and all(p.grad is None for p in model.parameters())


def test_ranks_agree_on_what_they_measure_and_leave_the_model_alone(two) -> None:  # type: ignore[no-untyped-def]
    (first, untouched), (second, also_untouched) = two.run(measure)
    assert untouched and also_untouched
    assert first == second and first.contention != Contention() and first.interference == 0
    assert len(first.calibration_runs) == 4


def test_a_world_of_one_has_none() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = partition(model, ByLeaf())
    link = Link((0.0,) * 4, (0.0,) * 4)
    profile = measure_profile(model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer, world=1, link=link)
    assert measure_contention(profile, model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer) is profile
