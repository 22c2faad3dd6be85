"""A job that is told to stop, without SLURM: one rank hears it, all write a checkpoint of one step, and it goes on there."""

import io
import os
import signal

import pytest
from rich.console import Console

from analysis.events import read_events
from experiments.job import record
from experiments.job import run as jobs
from launch import preemption
from launch.elastic import Warm
from tests.experiments.test_worker import HASTY, composed, start_and

pytestmark = pytest.mark.slow


@pytest.fixture
def warm(monkeypatch):
    """A process of this test's own: the ranks that it forks have its environment."""
    monkeypatch.setenv(preemption.REQUEUE, "1")
    with Warm() as started:
        yield started


def test_all_ranks_stop_at_one_step_and_go_on_after_it(tmp_path, warm):
    plan = ("strategy=fsdp", "scheduler=dear", "cluster.timeout_s=60")
    outcome, _ = start_and(tmp_path, *plan, act=lambda pids: os.kill(pids[1], signal.SIGUSR2), start=warm.run)
    stopped = outcome.step
    assert outcome.reason == f"preempted at step {stopped}, of which it has a checkpoint" and stopped >= 3
    assert record.read(tmp_path).state == record.PREEMPTED
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{stopped:08d}"]

    more = ("model=mlp", "model.width=32", "data=synthetic", f"run.steps={stopped + 4}", "run.resume=auto", *plan)
    assert jobs.run(composed(*more), tmp_path, Console(file=io.StringIO()), worker=HASTY, start=warm.run).ok
    events = read_events(tmp_path / "metrics.jsonl")
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, stopped + 5))
    assert record.read(tmp_path).state == record.OK
