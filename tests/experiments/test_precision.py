"""Jobs in mixed precision, from their config to their metrics."""

import json

import pytest

from analysis.events import read_events
from mdcs.plan.plan import Plan
from tests.experiments.batch import composed, run_all

pytestmark = pytest.mark.slow

JOBS = {
    "bf16": ("run.precision=bf16", "run.grad_precision=fp32", "strategy=greedy", "scheduler=dear", "budget=floor+20%"),
    "fp16": ("run.precision=fp16", "strategy=zero2", "scheduler=priority", "run.eval_every=4"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, warm):
    """The folders of all jobs, by the names above."""
    own = tmp_path_factory.mktemp("precision")
    common = ("model=gpt2-tiny", "run.steps=8", "run.unmeasured_steps=2", "run.profile_iterations=2", "cluster.threads=1")
    run_all(own, {name: composed(*common, *overrides) for name, overrides in JOBS.items()}, warm)
    return own


@pytest.mark.parametrize("precision", JOBS)
def test_a_job_trains_and_holds_what_was_predicted(folder, precision):
    out = folder / precision
    _, start, *events = read_events(out / "metrics.jsonl")
    summary, losses = events[-1], [event["loss"] for event in events if event["event"] == "step"]
    assert summary["status"] == "ok" and losses[-1] < losses[0]
    profile = Plan.from_json((out / "plan.json").read_text()).profile
    widths = {(layout.param_width, layout.grad_width, layout.master_width) for layout in profile.layouts}
    assert widths == {(2, 4 if precision == "bf16" else 2, 4)}
    assert start["cross_iteration"] == (precision != "fp16")  # an update may be left out only when all gradients are known
    ledger, measured = summary["memory"]["ledger"], summary["memory"]["measured"]
    assert {c: measured[c] for c in ("parameters", "optimizer", "gradients")} == {
        c: ledger[c] for c in ("parameters", "optimizer", "gradients")
    }
    assert start["budget_bytes"] is None or measured["total"] <= start["budget_bytes"]
    assert json.loads((out / "timeline.json").read_text())["ranks"]
