"""examples/own_model/: models of one's own train as with DDP, and are planned, without a line in this repository."""

import json
from pathlib import Path

import pytest

from experiments import compare, curve
from tests.experiments import one_process

CONF = Path(__file__).resolve().parents[2] / "examples/own_model/conf"
SHORT = ("run.steps=4", "run.unmeasured_steps=1", "run.profile_iterations=1", "cluster.threads=1", "hydra.run.dir=out")
GPT2 = ("model=own", "model._target_=examples.own_model.gpt2.build_model", "model.layers=3")
CURVES = ("data=own", "data._target_=examples.own_model.plain.Curves", "data.points=32", "run.eval_every=2")
POINTS = ("--config-dir", str(CONF), "model=points", *CURVES)


@pytest.mark.slow
def test_a_model_of_transformers_trains_as_with_ddp(tmp_path, warm):
    asked = ("strategy=fsdp", "compare.only=[mdcs,ddp]", "compare.rounds=1")
    done = one_process.call(compare, tmp_path, *GPT2, *SHORT, *asked, start=warm.run)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads((tmp_path / "out/comparison.json").read_text())["losses"]
    assert losses["equal"] and losses["differences"]["ddp"] == 0


@pytest.mark.slow
def test_a_model_of_plain_pytorch_comes_to_its_curve(tmp_path, warm, no_pictures):
    asked = ("strategy=greedy", "scheduler=priority", "budget=floor+20%", "curve.shares=3", "curve.budgets=[floor+0%]")
    done = one_process.call(curve, tmp_path, *POINTS, *SHORT, *asked, "curve.measure=stop", start=warm.run)
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads((tmp_path / "out/curve.json").read_text())["points"]
    assert [(point["stop_point"], point["measured"]["status"]) for point in points if point["measured"]] == [(True, "ok")]
