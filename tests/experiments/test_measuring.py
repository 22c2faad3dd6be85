"""A job without a profile trains from its first step: its first steps measure one, and choose the plan of the others."""

from pathlib import Path

import pytest

from analysis.events import read_events
from analysis.load import load_run
from experiments.job.profiles import Profiles
from launch.elastic import Outcome
from mdcs.plan.plan import Plan
from tests.experiments.batch import composed, run_job

pytestmark = pytest.mark.slow

JOB = ("model=mlp", "data=synthetic", "optimizer.clip_norm=1", "run.accumulation=2", "cluster.threads=1", "run.steps=32",
       "run.unmeasured_steps=2", "run.profile_iterations=1", "run.save_every=5", "run.keep=9", "profile.cache=false")  # fmt: skip
JOINT = ("strategy=joint", "strategy.seconds=1", "budget=floor+30%")


def run(folder: Path, known: Profiles, warm, *overrides: str) -> Outcome:
    return run_job(composed(*JOB, *overrides), folder, known=known, start=warm.run)


def steps_of(folder: Path) -> list[dict]:
    return [event for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, warm):
    """A job that measures, one that plans from its profile, and one that goes on from a checkpoint of the measuring."""
    folder, known = tmp_path_factory.mktemp("measuring"), Profiles()
    for name, profiles, overrides in (
        ("first", known, (*JOINT, "strategy.trials=2")),
        ("sibling", known, (*JOINT, "strategy.trials=1")),
        ("resumed", Profiles(), (*JOINT, f"run.resume={folder / 'first/checkpoints/step-00000005'}",)),
    ):
        outcome = run(folder / name, profiles, warm, *overrides)
        assert outcome.ok, outcome.reason
    return folder


def test_steps_that_measure_are_warm_up_and_say_their_plan(folders):
    first, steps = folders / "first", steps_of(folders / "first")
    assert [step["step"] for step in steps] == list(range(1, 33))
    measuring = [step for step in steps if "plan" in step]
    assert [step["step"] for step in measuring] == list(range(1, len(measuring) + 1)) and 12 < len(measuring) < 20
    assert [step["warmup"] for step in steps] == [step["step"] <= len(measuring) + 1 for step in steps]
    assert measuring[0]["plan"].startswith("dp ") and len({step["plan"] for step in measuring}) > 4
    starts = [event for event in read_events(first / "metrics.jsonl") if event["event"] == "start"]
    plan = Plan.from_json((first / "plan.json").read_text())
    assert "plan_hash" not in starts[0] and starts[-1]["plan_hash"] == plan.hash and len(starts[-1]["tried"]) == 2
    sent = [step["bytes"] for step in steps if not step["warmup"]]
    assert all(bytes_ == plan.sent_bytes() for bytes_ in sent[:-1])
    assert len(load_run(first).measured_steps) == 31 - len(measuring)


def test_a_sibling_plans_from_the_profile_from_its_first_step(folders):
    assert not any("plan" in step for step in steps_of(folders / "sibling"))
    profiles = [(folders / name / "profile.json").read_bytes() for name in ("first", "sibling")]
    assert profiles[0] == profiles[1]


def test_losses_are_those_of_a_job_that_does_not_measure(folders):
    losses = {name: [(step["step"], step["loss"]) for step in steps_of(folders / name)] for name in ("first", "sibling")}
    assert losses["first"] == losses["sibling"]
    assert [(step["step"], step["loss"]) for step in steps_of(folders / "resumed")] == losses["first"][5:]


def test_a_budget_that_turns_out_too_small_is_infeasible_as_soon_as_slots_are_measured(tmp_path, warm):
    outcome = run(tmp_path, Profiles(), warm, "budget=50% of ddp", "data.batch_size=2048", "strategy=dp")
    assert outcome.infeasible and outcome.reason.startswith("budget: "), outcome.reason
