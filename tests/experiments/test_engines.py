"""Every engine that runs here trains as DDP does, in the same loop, and tells the same of it; the others say why not.

Starting ranks costs seconds, so the jobs share one start.
"""

import importlib.util
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch

import mdcs
from analysis.events import read_events
from experiments.config import checks, files
from experiments.config.schema import ConfigError
from experiments.engines import ddp
from experiments.job.workload import Workload
from mdcs.export.document import document
from mdcs.plan.period import Strategy
from mdcs.planner.schedulers import StrategyAssignment, Wfbp
from tests.experiments.batch import composed, run_all, run_job
from tests.mdcs.measured import measure_profile

pytestmark = pytest.mark.slow

STEPS, WARMUP = 4, 1
SMALL = (f"run.steps={STEPS}", f"run.unmeasured_steps={WARMUP}", "run.profile_iterations=1", "cluster.threads=1")
WORKLOADS = {
    "tied gpt2": ("model=gpt2-tiny", "data=stdlib_bytes", "optimizer=adam", "optimizer.schedule=linear", "run.eval_every=2"),
    "clipped mlp": ("model=mlp", "data=digits", "optimizer=sgd", "optimizer.clip_norm=0.5", "run.accumulation=2",
                    "model.frozen=[linear1.*]"),
    "resnet": ("model=resnet-tiny", "data=synthetic", "optimizer=adamw", "run.precision=fp64", "run.eval_every=3"),
    "timed": ("model=timed", "data=synthetic", "optimizer=adam", "model.layers=3", "model.block_mib=0.05", "model.forward_ms=1",
              "model.backward_ms=2", "run.eval_every=3"),
}  # fmt: skip
ENGINES = {
    "tied gpt2": [
        "engine=ddp budget=1GiB", "engine=ddp engine.overlap=false engine.bucket_mib=0.05", "engine=fsdp2 budget=0.0001GiB",
        "engine=fsdp2 engine.reshard=never engine.prefetch=2 engine.reduce_scatter=all_to_all",
        "engine=fairscale", "engine=mdcs strategy=fsdp link=emulated link.rate_gbit=10",
    ],
    "clipped mlp": ["engine=ddp engine.bucket_mib=0.05", "engine=ddp engine.overlap=false",
                    "engine=fsdp2 model.wrap=leaf", "engine=fairscale"],
    "timed": ["engine=ddp engine.bucket_mib=0.03", "engine=fsdp2", "engine=fairscale",
              "engine=fsdp2 engine.plan=sdp", "engine=fsdp2 engine.plan=fsdp-dp",
              "engine=mdcs strategy=fsdp scheduler=dear link=emulated link.rate_gbit=10 run.save_every=3"],
    "resnet": ["engine=ddp", "engine=fsdp2 engine.reshard=never engine.reduce_scatter=all_to_all"],
}  # fmt: skip
JOBS = [(workload, overrides) for workload, chosen in ENGINES.items() for overrides in chosen]


def take_home(workload, strategies, file):
    """A plan with these strategies, in turns, for the units, as experiments/export.py writes it."""
    made = Workload(composed(*SMALL, *WORKLOADS[workload]), 0, 1, torch.device("cpu"))
    batch = next(made.batches())
    profile = measure_profile(
        made.model, made.units, lambda: made.loss(batch), made.optimizer, world=2, link=mdcs.Link.uniform(1.0, 50.0), iterations=1
    )
    mix = tuple(Strategy(each) for each, _ in zip(itertools.cycle(strategies.split("-")), profile.units, strict=False))
    file.write_text(json.dumps(document(Wfbp().schedule(StrategyAssignment(mdcs.Job(profile), mix)))))


@pytest.fixture(scope="module")
def ran(tmp_path_factory, warm):
    """The folders of all jobs, run by the same two ranks."""
    folder = tmp_path_factory.mktemp("engines")
    folders, configs = {}, {}
    for workload, overrides in JOBS:
        if plan := re.search("engine.plan=(.*)", overrides):
            take_home(workload, plan.group(1), folder / plan.group(1))
    with checks.composing():
        for number, (workload, overrides) in enumerate(JOBS):
            folders[workload, overrides] = folder / str(number)
            there = overrides.replace("engine.plan=", f"engine.plan={folder}/").split()
            configs[str(number)] = checks.compose_config([*SMALL, *WORKLOADS[workload], *there])
    run_all(folder, configs, warm)
    refused = {key: (own / "refused0").read_text() for key, own in folders.items() if (own / "refused0").exists()}
    assert refused == {}
    return folders


def losses(folder):
    return [(e["event"], e["step"], e["loss"]) for e in read_events(folder / "metrics.jsonl") if "loss" in e and "step" in e]


def steps(folder):
    return [event for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]


def summary(folder):
    return read_events(folder / "metrics.jsonl")[-1]


def test_every_engine_that_needs_no_gpu_and_is_installed_has_a_job():
    tried = {overrides.split()[0].partition("=")[2] for _, overrides in JOBS}
    assert {*files.groups()["engine"]} - tried == {"deepspeed", "fairscale_fsdp", "dataparallel"}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_engine_trains_as_ddp_does(ran, workload):
    curves = {overrides: losses(folder) for (of, overrides), folder in ran.items() if of == workload}
    wanted = curves[ENGINES[workload][0]]
    assert len({loss for event, _, loss in wanted if event == "step"}) == STEPS
    for overrides, curve in curves.items():
        assert [point[:2] for point in curve] == [point[:2] for point in wanted], overrides
        # Two ranks sum two numbers; norms, and updates of flat shards, are summed in other orders.
        assert [point[2] for point in curve] == pytest.approx([point[2] for point in wanted], rel=2e-6), overrides


def test_times_of_a_step_add_up_and_what_an_engine_does_not_show_is_null(ran):
    for (_, overrides), folder in ran.items():
        assert len(steps(folder)) == STEPS
        for step in steps(folder):
            if "fsdp-dp" in overrides:  # torch's all-reduces cannot be listened to
                assert step["step_s"] > 0 and step["compute_s"] is step["stalled_s"] is step["communication_s"] is None
                continue
            assert step["step_s"] >= step["compute_s"] > 0, overrides
            assert step["stalled_s"] == pytest.approx(step["step_s"] - step["compute_s"])
            if "fairscale" in overrides:
                assert step["communication_s"] is step["overlap_ratio"] is step["bytes"] is None
            else:
                assert 0 <= step["overlap_s"] <= step["communication_s"]
            if "overlap=false" in overrides or ("fsdp2" in overrides and not re.search("prefetch|plan", overrides)):
                assert step["overlap_s"] == 0, overrides  # nothing runs beside compute
        told = summary(folder)
        assert told["step_s"]["p10"] <= told["step_s"]["median"] <= told["step_s"]["p90"]


def test_evaluations_and_checkpoints_are_timed_by_themselves_and_belong_to_no_step(ran):
    """Each takes more than a second, between the last two steps, of a few milliseconds each."""
    for (workload, overrides), folder in ran.items():
        if workload == "timed":
            told = summary(folder)
            assert steps(folder)[-1]["step_s"] < 1 < told["evaluation_s"], overrides
            assert told["checkpoint_s"] > 1 if "save_every" in overrides else told["checkpoint_s"] == 0, overrides


def test_steps_have_the_learning_rate_they_updated_with(ran):
    """It falls to zero, linearly, over the job."""
    for (workload, overrides), folder in ran.items():
        rates = [step["learning_rate"] for step in steps(folder)]
        wanted = [rates[0] * (1 - done / STEPS) if workload == "tied gpt2" else rates[0] for done in range(STEPS)]
        assert rates[0] > 0 and rates == pytest.approx(wanted), overrides


def test_bytes_are_those_of_the_collectives(ran):
    """ddp sends the same without overlap; fsdp2 gathers once or twice, and all-to-all halves what its reduction sends."""
    # The step before the first evaluation, which leaves what is not in blocks gathered.
    sent = {overrides: steps(folder)[1]["bytes"] for (workload, overrides), folder in ran.items() if workload == "tied gpt2"}
    whole = sent["engine=ddp budget=1GiB"]["AR"]
    assert sent["engine=ddp engine.overlap=false engine.bucket_mib=0.05"] == {"AR": whole}
    always, never = (sent[name] for name in sent if "fsdp2" in name)
    assert always["RS"] == whole and always["AG_F"] == whole // 2 and 0 < always["AG_B"] < whole // 2
    assert never == {"RS": whole // 2, "AG_F": whole // 2}


def test_a_budget_is_a_limit_that_peers_are_checked_against(ran):
    """The peak is that of the rank that held most, as the allocator counts it."""
    for (_, overrides), folder in ran.items():
        told = summary(folder)
        assert told["peak_bytes"] >= told["memory"]["measured"]["total"] > 0
        assert told["fits"] is {"budget=1GiB": True, "budget=0.0001GiB": False}.get(overrides.split()[-1]), overrides
    peaks = {overrides.split()[0]: summary(folder)["peak_bytes"] for (of, overrides), folder in ran.items() if of != "resnet"}
    assert peaks["engine=fsdp2"] < peaks["engine=ddp"]


def test_the_error_of_a_reduction_after_backward_is_not_lost():
    def lost(_):
        raise RuntimeError("connection closed by peer")

    begun, reduced = torch.futures.Future(), torch.futures.Future()
    begun.then(lost).then(lambda ended: ddp._hand_over(ended, torch.ones(1), reduced))
    begun.set_result(None)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        reduced.wait()


# ---- what cannot run here


def run_it(folder: Path, *overrides: str, only: str | None = None):
    return run_job(composed(*SMALL, "model=mlp", "data=digits", *overrides), folder, only=only)


@pytest.mark.parametrize(
    ("overrides", "only", "message"),
    [
        ("engine=dataparallel cluster.device=cuda cluster.ranks=1", None,
         "engine: dataparallel needs several CUDA devices, and torch finds 1"),
        ("engine=ddp", "plan", "engine: ddp trains without a plan"),
    ],
)  # fmt: skip
def test_what_cannot_run_says_so_before_anything_starts(tmp_path, monkeypatch, overrides, only, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError) as error:
        run_it(tmp_path / "run", *overrides.split(), only=only)
    assert str(error.value) == message and not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("more", [(), ("optimizer.clip_norm=0.5", "run.accumulation=2")], ids=["plain", "clipped"])
def test_zero_trains_as_ddp_does(tmp_path, stage, more):
    for engine in ("engine=ddp", f"engine=deepspeed engine.stage={stage}"):
        outcome = run_it(tmp_path / engine[7:10], *engine.split(), *more)
        assert outcome.ok, outcome.reason
    wanted, curve = losses(tmp_path / "ddp"), losses(tmp_path / "dee")
    assert [point[2] for point in curve] == pytest.approx([point[2] for point in wanted], rel=2e-6)
    assert summary(tmp_path / "dee")["peak_bytes"] > 0 and summary(tmp_path / "dee")["stalled_s"] is None
    assert all(math.isfinite(step["step_s"]) for step in steps(tmp_path / "dee"))
