"""Jobs in mixed precision, from the command line to their metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.events import read_events
from mdcs.plan.messages import Plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
JOBS = {
    "norms": ("run.precision=bf16", "model.norms_fp32=true", "strategy=greedy", "scheduler=priority", "budget.over_floor=0.2"),
    "bf16": ("run.precision=bf16", "run.grad_precision=fp32", "strategy=greedy", "scheduler=dear", "budget.over_floor=0.2"),
    "fp16": ("run.precision=fp16", "strategy=zero2", "scheduler=priority", "run.eval_every=4"),
}


@pytest.mark.parametrize("precision", JOBS)
def test_a_job_trains_and_holds_what_was_predicted(tmp_path, precision):
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments/train.py"), "model=gpt2-tiny", "run.steps=8", "run.warmup_steps=2",
         "cluster.threads=1", "hydra.run.dir=out", *JOBS[precision]],
        cwd=tmp_path, env={**os.environ, "MDCS_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, start, *events = read_events(tmp_path / "out/metrics.jsonl")
    summary, losses = events[-1], [event["loss"] for event in events if event["event"] == "step"]
    assert summary["status"] == "ok" and losses[-1] < losses[0]
    profile = Plan.from_json((tmp_path / "out/plan.json").read_text()).profile
    assert (profile.param_bytes, profile.grad_bytes, profile.master_bytes) == (2, 4 if precision == "bf16" else 2, 4)
    widths = {(s.param_bytes, s.grad_bytes, s.master_bytes) for layout in profile.layouts for s in layout.sections}
    assert widths == ({(2, 2, 4), (4, 4, 0)} if precision == "norms" else {(profile.param_bytes, profile.grad_bytes, 4)})
    assert any(len(layout.sections) == 2 for layout in profile.layouts) == (precision == "norms")
    assert start["cross_iteration"] == (precision != "fp16")  # an update may be left out only when all gradients are known
    ledger, measured = summary["memory"]["ledger"], summary["memory"]["measured"]
    assert {c: measured[c] for c in ("parameters", "optimizer", "gradients")} == {
        c: ledger[c] for c in ("parameters", "optimizer", "gradients")
    }
    assert start["budget_bytes"] is None or measured["total"] <= start["budget_bytes"]
    assert json.loads((tmp_path / "out/timeline.json").read_text())["ranks"]
