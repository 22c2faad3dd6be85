"""A job whose ranks are forks is the job that it is elsewhere: the same bytes at its peaks, and the same losses."""

from pathlib import Path

import pytest

from analysis.events import read_events
from experiments.job.profiles import Profiles
from launch.elastic import Warm
from tests.experiments.batch import composed, run_job

pytestmark = pytest.mark.slow

# One message at a time, which compute waits for: what is held at a peak does not depend on when one ends.
JOB = ("model=mlp", "data=synthetic", "strategy=fsdp", "scheduler=sequential", "link=emulated", "cluster.threads=1",
       "run.steps=6", "run.unmeasured_steps=2", "run.profile_iterations=1")  # fmt: skip


def ran(folder: Path, known: Profiles, start=None) -> tuple[dict, list, list]:
    assert run_job(composed(*JOB), folder, known=known, start=start).ok
    events = read_events(folder / "metrics.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    return events[-1]["memory"]["measured"], [s["peak_bytes"] for s in steps if not s["warmup"]], [s["loss"] for s in steps]


def test_memory_and_losses_are_those_of_ranks_of_their_own(tmp_path):
    known = Profiles()
    cold = ran(tmp_path / "cold", known)
    with Warm() as warm:
        first, second = (ran(tmp_path / name, known, warm.run) for name in ("first", "second"))
    assert cold[0]
    for memory, peaks, losses in (first, second):
        assert losses == cold[2]
        assert (memory, peaks) == (pytest.approx(cold[0], abs=64), pytest.approx(cold[1], abs=64))  # a loss that is still held
