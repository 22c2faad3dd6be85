"""conf/experiment/: what a sweep makes of them, and tiny versions that run."""

import json
import shutil
from itertools import product
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from hydra import compose

from analysis import report as layers
from experiments import curve, train
from experiments.config import checks
from experiments.job import run as jobs
from launch.elastic import Warm
from tests.experiments import one_process
from tests.experiments.batch import QUIET, composed


def jobs_of(name: str) -> list[list[str]]:
    """The overrides of each job of its sweep, beside the experiment itself."""
    sweeper = compose("config", [f"experiment={name}"], return_hydra_config=True).hydra.sweeper
    axes = [[f"{key}={value}" for value in str(values).split(",")] for key, values in sweeper.params.items()]
    return [*map(list, product(*axes)), *(job.split() for job in sweeper.also)]


@pytest.mark.parametrize(
    ("name", "count"),
    [("quick", 44), ("bert_nli_ddp_bucket", 8), ("memory_dp_fsdp_precision", 4), ("slurm_grid", 21), ("gpu_worlds", 12)],
)
def test_every_job_of_a_sweep_composes(name, count):
    with checks.composing():
        jobs = jobs_of(name)
        made = [checks.compose_config([f"experiment={name}", *job]) for job in (jobs[0], jobs[-1])]  # they take a while
    assert len(jobs) == count and made[0] != made[1]


def run(warm: Warm, folder: Path, program: ModuleType, *arguments: str) -> str:
    done = one_process.call(program, folder, *arguments, worker="tests.experiments.hasty_worker", start=warm.run)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SHORT = ("run.steps=3", "run.unmeasured_steps=1", "run.profile_iterations=2", "cluster.threads=1")
TINY_RESNET = ("model.depths=[1,1,1,1]", "model.width_divisor=16", "model.image=32", "data.batch_size=2")


@pytest.mark.slow
def test_a_tiny_curve_of_a_rank_of_eight_on_the_cpu(tmp_path, warm):
    small = ("model=gpt2-tiny", "cluster.device=cpu", "data.batch_size=2", *SHORT)
    front = ("curve.strategies=[greedy]", "curve.budgets=[floor+0%,floor+50%]", "hydra.run.dir=out")
    run(warm, tmp_path, curve, "experiment=gpu_curve", *small, *front)
    points = json.loads((tmp_path / "out/curve.json").read_text())["points"]
    assert [point["measured"]["status"] for point in points] == ["ok", "ok"]


@pytest.mark.slow
def test_a_tiny_memory_sweep(tmp_path, warm, no_pictures):
    run(warm, tmp_path, train, "experiment=memory_dp_fsdp_precision", *TINY_RESNET, *SHORT, "hydra.sweep.dir=out")
    layers.write_layers(tmp_path / "out")
    frame = pd.read_csv(tmp_path / "out/memory_by_layer.csv", index_col="unit")
    assert set(frame.columns) == {f"{s} {p}, measured" for s, p in product(("dp", "fsdp"), ("fp32", "bf16"))}
    assert (frame["fsdp fp32, measured"] < frame["dp fp32, measured"]).all()
    assert (tmp_path / "out/memory_by_layer.png").stat().st_size > 10_000


# ---- pictures


def test_memory_by_layer_is_the_most_of_a_unit_s_slots(tmp_path):
    """The run that the other tests plan with, predicted."""
    folder = tmp_path / "0"
    job = ("model=mlp", "data=digits", "optimizer=sgd", "optimizer.momentum=0")
    config = composed(*job, f"profile.path={Path(__file__).with_name('profile.json')}")
    assert jobs.prepare("plan", config, folder, QUIET) == ""
    (folder / "metrics.jsonl").write_text('{"event": "job", "schema": 3, "strategy": "dp"}\n')
    shutil.copytree(folder, tmp_path / "1")
    assert list(layers.by_layer([folder, tmp_path / "1"]).columns) == ["dp fp32, predicted", "dp fp32, predicted, 1"]
    frame = layers.by_layer([folder])
    timeline = json.loads((folder / "predicted_timeline.json").read_text())
    totals = {slot["slot"]: slot["predicted"]["total"] / 2**20 for slot in timeline["memory"]}
    assert list(frame.columns) == ["dp fp32, predicted"]
    for unit, row in frame.iterrows():
        assert row.iloc[0] == max(total for slot, total in totals.items() if slot.partition(":")[2] == unit)
