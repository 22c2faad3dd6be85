"""Every engine that runs here trains as DDP does, in the same loop, and says the same of it; the others say why not.

Starting ranks costs seconds, so all jobs share one start.
"""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import analysis
from experiments import checks, engines, jobs
from experiments.config import PEERS, ConfigError
from experiments.tracking import read_events
from launch import elastic

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
STEPS, WARMUP = 4, 1
SMALL = (f"run.steps={STEPS}", f"run.warmup_steps={WARMUP}", "run.profile_iterations=1", "cluster.threads=1")
WORKLOADS = {
    "tied gpt2": ("model=gpt2-tiny", "data=stdlib_bytes", "optimizer=adam", "optimizer.schedule=linear", "run.eval_every=2"),
    "clipped mlp": ("model=mlp", "data=digits", "optimizer=sgd", "optimizer.clip_norm=0.5", "run.accumulation=2",
                    "model.frozen=[layers.1.*]"),
    "resnet": ("model=resnet-tiny", "data=synthetic", "optimizer=adamw", "run.precision=fp64", "run.eval_every=3"),
}  # fmt: skip
ZERO = [f"engine=deepspeed engine.stage={stage}" for stage in (1, 2, 3)] if importlib.util.find_spec("deepspeed") else []
ENGINES = {
    "tied gpt2": [
        "engine=ddp", "engine=ddp engine.bucket_mib=0.05 engine.gradient_as_bucket_view=false budget.gib=1",
        "engine=ddp_no_overlap engine.bucket_mib=0.05", "engine=fsdp2 budget.gib=0.0001",
        "engine=fsdp2 engine.reshard=never engine.prefetch=2 engine.reduce_scatter=all_to_all",
        "engine=fsdp2 engine.reshard=group engine.reshard_group=2", "engine=fairscale", *ZERO,
        "engine=mdcs strategy=fsdp",
    ],
    "clipped mlp": ["engine=ddp", "engine=ddp_no_overlap", "engine=fsdp2 model.wrap=leaf", "engine=fairscale", *ZERO],
    "resnet": ["engine=ddp", "engine=fsdp2 engine.prefetch=1 engine.reduce_scatter=all_to_all", "engine=fairscale"],
}  # fmt: skip
JOBS = [(workload, overrides) for workload, chosen in ENGINES.items() for overrides in chosen]


def composed(*overrides):
    with checks.composing():
        return checks.compose_config([*SMALL, *overrides])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folders of all jobs, run by the same two ranks."""
    folder = tmp_path_factory.mktemp("engines")
    folders = {}
    for number, (workload, overrides) in enumerate(JOBS):
        own = folders[workload, overrides] = folder / str(number)
        config = jobs.resolve(composed(*WORKLOADS[workload], *overrides.split()))
        own.mkdir()
        checks.save(dataclasses.replace(config, tracker=dataclasses.replace(config.tracker)), own / "config.yaml")
    outcome = elastic.run(
        folder / "launch", elastic.Cluster(2, 60, 60), jobs.environment(config),
        module="tests.experiments.batch_worker", arguments=[str(own) for own in folders.values()],
    )  # fmt: skip
    assert outcome.ok, outcome.reason
    refused = {key: (own / "refused0").read_text() for key, own in folders.items() if (own / "refused0").exists()}
    assert refused == {}
    return folders


def losses(folder):
    return [(e["event"], e["step"], e["loss"]) for e in read_events(folder / "metrics.jsonl") if "loss" in e and "step" in e]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_engine_trains_as_ddp_does(ran, workload):
    curves = {overrides: losses(folder) for (of, overrides), folder in ran.items() if of == workload}
    wanted = curves["engine=ddp"]
    assert len({loss for event, _, loss in wanted if event == "step"}) == STEPS
    for overrides, curve in curves.items():
        assert [point[:2] for point in curve] == [point[:2] for point in wanted], overrides
        # The order of sums over two ranks is the same; norms, and updates of flat shards, are summed in other orders.
        assert [point[2] for point in curve] == pytest.approx([point[2] for point in wanted], rel=2e-6), overrides
