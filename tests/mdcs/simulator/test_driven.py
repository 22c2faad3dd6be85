"""The simulator's loops give the times of the runtime's queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import Scheduler
from mdcs.planner.strategies import RandomMix
from mdcs.profile.link import UPDATES, Contention, ExecutionModel
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import Job, examples, jobs, schedulers, seeds
from tests.mdcs.simulator.driven import DrivenReplay


def assert_same_times(plan: Plan) -> None:
    trace = replay(plan)
    periods = (len(trace.arrivals) - 1 - plan.period.length + plan.period.turn) // plan.period.length
    driven = DrivenReplay(plan, periods)
    assert driven.arrivals == pytest.approx(trace.arrivals, rel=1e-9, abs=1e-12)
    for index, start in driven.starts.items():
        times = (start, driven.ends[index], driven.dones[index])
        assert times == pytest.approx((*trace.spans[index], trace.processed[index]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("is_bound", [False, True], ids=["free", "smallest budget"])
@examples(60)
@given(jobs(), seeds, schedulers)
def test_times_are_those_of_the_queue(updates: str, is_bound: bool, job: Job, seed: int, scheduler: Scheduler) -> None:
    contention = Contention(skew_seconds=5e-5, dispatch_seconds=3e-5, turn_seconds=7e-5) if seed % 2 else Contention()
    job = replace(job, profile=replace(job.profile, interference=0.0, contention=contention, execution=ExecutionModel(updates)))
    plan = job.plan(RandomMix(seed), scheduler)
    assert_same_times(replace(plan, budget=min_feasible_budget(plan) if is_bound else None))
