"""Costs that the data determine: the fit on replays of known costs, with noise and without."""

from __future__ import annotations

import random
from dataclasses import replace
from operator import add

import pytest

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import floor_bytes, make_plan
from mdcs.planner.schedulers import Partitioning, Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile.link import Contention, ExecutionModel, Link
from mdcs.profile.schema import Profile
from mdcs.profiler.cost_fit import Run, calibration_plans, fit_costs
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import PeriodTrace
from tests.mdcs.profiles import of_job

from ..profiles import chain

TRUE_LINK = Link((2e-4, 1e-4, 1e-4, 1e-4), (1.6e-8, 1.5e-8, 1.4e-8, 1.4e-8), gap=(3e-4, 2e-4, 1e-4, 1e-4))
GUESS = Link.uniform(1.0, 100.0)
PROFILE = chain(*[3 * MIB // 2] * 8, link=GUESS, forward_s=0.03, backward_s=0.06)


def trace(plan: Plan, profile: Profile) -> PeriodTrace:
    """The last period of a replay."""
    seen, n = replay(of_job(plan, profile=profile)), len(plan.messages)
    return PeriodTrace(
        seen.period_s,
        tuple(seen.compute()),
        tuple((start - seen.began, end - seen.began) for start, end in seen.spans[-n:]),
        tuple(at - seen.began for at in seen.processed[-n:]),
    )


def runs(plans: list[Plan], true: Profile, noise: float = 0.0, count: int = 4) -> list[Run]:
    """Periods in which the seconds of each slot are off by this fraction, and the end of each message by 10 ms of it."""
    random_ = random.Random(0)

    def disturbed(plan: Plan) -> PeriodTrace:
        slots = tuple(replace(s, seconds=s.seconds * random_.gauss(1, noise)) for s in true.slots)
        seen = trace(plan, replace(true, slots=slots))
        off = [0.01 * random_.gauss(0, noise) for _ in seen.done]
        messages = tuple((start, end + late) for (start, end), late in zip(seen.messages, off, strict=True))
        return seen._replace(messages=messages, done=tuple(map(add, seen.done, off)))

    return [Run(plan, [disturbed(plan) for _ in range(count)]) for plan in plans]


def costs(profile: Profile) -> dict[str, float]:
    """The costs by the names of :attr:`Profile.errors`."""
    named = dict(zip(("all_reduce", "reduce_scatter", "all_gather"), range(3), strict=True))
    link = profile.link
    return (
        vars(profile.contention)
        | {"interference": profile.interference / (1 + profile.interference)}
        | {f"{what} of {name}": getattr(link, what)[i] for what in ("alpha", "gap", "beta") for name, i in named.items()}
    )


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_known_costs_are_found_within_their_standard_errors(noise: float) -> None:
    contention = Contention(2e-4, 4e-10, dispatch_seconds=1e-4)
    true = replace(PROFILE, link=TRUE_LINK, contention=contention)
    found = fit_costs(PROFILE, runs(calibration_plans(Job(PROFILE)), true, noise, count=8))
    wanted, got = costs(true), costs(found)
    for name in ("compute_per_message", "compute_per_byte", "dispatch_seconds", "beta of all_gather"):
        assert name in found.errors
    for name, error in found.errors.items():
        is_rate = "byte" in name or "beta" in name
        assert abs(got[name] - wanted[name]) <= 3 * error + 0.02 * wanted[name] + (0 if is_rate else 3e-6), name
    for strategy, scheduler in (("zero2", Partitioning(block_mib=0.5)), ("dp", Wfbp()), ("fsdp", Wfbp())):
        unseen = make_plan(PROFILE, Uniform(strategy), scheduler)
        predicted, took = (replay(of_job(unseen, profile=p)).period_s for p in (found, true))
        assert predicted == pytest.approx(took, rel=0.002)
    assert found.prediction_error is not None and found.prediction_error < 0.04


@pytest.mark.parametrize("share", [1.1, 1.3])
def test_waiting_for_memory_is_no_part_of_a_slot(share: float) -> None:
    """Near the floor, compute waits for messages to free gradients more often than for their contents."""
    true, job = replace(PROFILE, link=replace(TRUE_LINK, beta=tuple(2 * beta for beta in TRUE_LINK.beta))), Job(PROFILE)
    found = fit_costs(PROFILE, runs(calibration_plans(job, int(share * floor_bytes(job))), true))
    assert [s.seconds for s in found.slots] == pytest.approx([s.seconds for s in true.slots], rel=0.02)


def test_messages_that_cost_compute_nothing_are_free() -> None:
    found = fit_costs(PROFILE, runs(calibration_plans(Job(PROFILE)), replace(PROFILE, link=TRUE_LINK), noise=0.01))
    assert found.contention.compute_per_message == found.contention.compute_per_byte == 0
    assert 0 < found.errors["compute_per_message"] < 1e-3  # known to be nothing
    unseen = make_plan(PROFILE, Uniform("zero2"), Partitioning(block_mib=0.5))
    predicted, took = (replay(of_job(unseen, profile=p)).period_s for p in (found, replace(PROFILE, link=TRUE_LINK)))
    assert predicted == pytest.approx(took, rel=0.02)


def test_a_cost_per_message_stays_at_its_prior_where_the_number_of_messages_does_not_vary() -> None:
    """All messages have one size, so that the number and the bytes of messages cannot be told apart."""
    prior = replace(PROFILE, contention=Contention(compute_per_message=5e-4), link=replace(GUESS, gap=(7e-4,) * 4))
    true = replace(PROFILE, contention=Contention(compute_per_byte=1e-9), link=TRUE_LINK)
    plans = [make_plan(PROFILE, Uniform(kind), Wfbp()) for kind in ("zero2", "fsdp")]
    found = fit_costs(prior, runs(plans, true))
    assert found.contention.compute_per_message == 5e-4 and "compute_per_message" not in found.errors
    assert set(found.link.gap) == {7e-4} and not any(name.startswith("gap") for name in found.errors)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_what_slots_do_not_show_is_its_messages_as_far_as_their_error_allows(noise: float) -> None:
    """The plan of most messages takes 10 % longer, and no slot shows why."""
    profile = chain(*[3 * MIB // 2] * 8, link=GUESS, forward_s=0.1, backward_s=0.2)
    took = runs(calibration_plans(Job(profile)), replace(profile, link=TRUE_LINK), noise=noise)
    many = max(took, key=lambda run: len(run.plan.messages))
    slower = Run(many.plan, [each._replace(period_s=1.1 * each.period_s) for each in many.periods])
    longer = [slower if run is many else run for run in took]
    before, found = (fit_costs(profile, each).contention.compute_per_message for each in (took, longer))
    missing_s = 0.1 * many.step_s / len(many.plan.messages)
    assert 0.1 * missing_s <= found - before < missing_s and found <= before + 5e-4


def test_operations_that_no_plan_has_are_as_far_off_as_the_others() -> None:
    plans = [make_plan(PROFILE, Uniform(k), Partitioning(size)) for k, size in (("zero2", 0.5), ("fsdp", 0.5), ("fsdp", 2))]
    found = fit_costs(PROFILE, runs(plans, replace(PROFILE, link=TRUE_LINK)))
    assert "beta of all_reduce" not in found.errors and found.link.beta[0] == pytest.approx(1.45e-8, rel=0.05)


def test_an_emulated_link_stays_and_a_run_alone_is_not_judged() -> None:
    emulated = replace(PROFILE, link=replace(GUESS, emulated=True))
    [first, *_] = calibration_plans(Job(emulated))
    found = fit_costs(emulated, runs([first], emulated))
    assert found.link == emulated.link and found.calibration_runs == {} and found.prediction_error is None
    assert fit_costs(emulated, []) is emulated


def test_a_device_with_streams_of_its_own_is_slower_beside_messages() -> None:
    on_streams = replace(PROFILE, execution=ExecutionModel("stream"), link=replace(GUESS, depth=1))
    took = runs(calibration_plans(Job(on_streams)), replace(on_streams, interference=0.25))
    took = [Run(plan, [each._replace(host_s=1e-4 * len(plan.messages)) for each in periods]) for plan, periods in took]
    found = fit_costs(on_streams, took)
    assert found.interference == pytest.approx(0.25, rel=0.1) and found.contention == Contention()
    assert found.execution.host_seconds_per_message == pytest.approx(1e-4)


# ---- plans that tell costs apart


@pytest.mark.parametrize("sizes", [[3 * MIB // 2] * 8, [MIB] * 8, [1000] * 8, [10, 10**7, 300, 10**6]])
def test_the_first_plan_has_every_operation_with_long_and_short_messages(sizes: list[int]) -> None:
    mixed, greedy = calibration_plans(Job(chain(*sizes, link=GUESS)))
    for kind in ("AR", "RS", "AG_F"):
        sent = [mixed.wire(m) for m in mixed.messages if str(m.kind) == kind]
        assert max(sent) >= 2 * min(sent)
    assert greedy.strategy == "greedy"


def test_calibration_plans_keep_a_budget() -> None:
    free = calibration_plans(Job(PROFILE))
    budget = min(plan.prediction.peak_bytes for plan in free if plan.prediction)
    plans = calibration_plans(Job(PROFILE), budget)
    assert all(plan.budget == budget and plan.prediction and plan.prediction.peak_bytes <= budget for plan in plans)
