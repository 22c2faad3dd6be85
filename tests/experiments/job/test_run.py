"""A job in a folder that another has used or uses, and what is known of one that fails early. The ranks are stubs."""

import dataclasses
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import analysis
from analysis.events import METRICS, read_events
from experiments import train
from experiments.config.schema import ConfigError
from experiments.job import record, resolved
from experiments.job import run as jobs
from experiments.job.events import job_event
from experiments.job.profiles import Profiles
from experiments.job.resolved import resolve
from launch.elastic import Outcome, claim
from mdcs.profile.cache import cache_folder
from tests.experiments import batch, one_process
from tests.experiments.batch import QUIET, run_job
from tests.experiments.job.test_tracking import Heard

PROFILE = Path(__file__).parents[1] / "profile.json"
STUB = "tests.experiments.stub_worker"
LEFT = ("profile.json", "plan.json", "predicted_timeline.json", "timeline.json")


def composed(*overrides: str):
    return batch.composed("run.steps=3", "run.unmeasured_steps=1", *overrides)


def run(folder: Path, *overrides: str, known: Profiles | None = None):
    return run_job(composed(*overrides), folder, known=known, worker=STUB)


@pytest.mark.slow
def test_a_job_that_fails_early_has_nothing_of_the_former_one(tmp_path):
    assert run(tmp_path, "strategy=dp", "profile.cache=false").ok
    for name in LEFT:
        shutil.copy(PROFILE, tmp_path / name)
    known, asked = Profiles(), ("model.layers=3", "strategy=fsdp", "scheduler=dear", "budget=0.5GiB", "run.name=early")
    assert not run(tmp_path, *asked, known=known).ok
    assert not any((tmp_path / name).exists() for name in LEFT)
    assert known.find(composed(*asked)) is None and not cache_folder().exists()

    events = read_events(tmp_path / METRICS)
    assert [event["event"] for event in events] == ["job", "start", *["step"] * 3, "summary", "job", "failure"]
    row = analysis.load_run(tmp_path).row()
    assert (row["name"], row["status"], row["steps"]) == ("early", "failed", 0)
    assert (row["model"], row["strategy"], row["scheduler"], row["world"]) == ("gpt2-tiny", "fsdp", "dear", 2)
    assert (row["budget_bytes"], row["emulated"], row["emulated_ranks"], row["engine"]) == (2**29, False, False, "mdcs")


def test_the_profile_that_a_job_names_stays_where_it_is(tmp_path):
    for name in LEFT:
        shutil.copy(PROFILE, tmp_path / name)
    job = composed(f"profile.path={tmp_path / 'profile.json'}")
    assert not jobs.prepare("profile", job, tmp_path, QUIET)
    assert (tmp_path / "profile.json").exists()
    assert not any((tmp_path / name).exists() for name in LEFT if name != "profile.json")


def test_a_folder_in_which_a_job_runs_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "rank0.status").write_text(json.dumps({"rank": 0, "pid": os.getpid(), "step": 1, "phase": "", "time": 0.0}))
    with claim(tmp_path):
        shutil.copy(PROFILE, tmp_path / "profile.json")
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}
        job = composed(f"profile.path={PROFILE}")
        for start in (run, lambda folder: jobs.prepare("plan", job, folder, QUIET)):
            with pytest.raises(ConfigError, match=f"hydra.run.dir: {tmp_path} is in use by a job of process {os.getpid()} "):
                start(tmp_path)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_job_that_runs_again_is_a_run_of_its_own_to_a_tracker_unless_it_goes_on(tmp_path):
    """The second time it plans with the profile of the first, which its resolved config names."""
    config = dataclasses.replace(composed("profile.cache=false"), tracker=Heard())
    goes_on = dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))
    known = Profiles()
    for job in (config, config, goes_on):
        assert run_job(job, tmp_path, known=known, worker=STUB, start=one_process.run).ok
    assert f"path: {tmp_path / 'profile.json'}" in (tmp_path / "config.yaml").read_text()
    assert record.read(tmp_path).identity == record.identity_of(config)
    assert len(config.tracker.runs) == 2
    assert {each.rpartition("-")[0] for each in config.tracker.runs} == {record.identity_of(config)}


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("strategy=dp", "scheduler=fusion"), "dp fusion, gpt2-tiny, 2 ranks"),
        (("strategy=dp", "scheduler=fusion", "budget.limit=123456789"), "dp fusion, 117.738MiB, gpt2-tiny, 2 ranks"),
        (("strategy=joint", "budget=floor+30%", "cluster.ranks=1"), "joint, floor+30%, gpt2-tiny, 1 rank"),
        (("strategy=greedy", "budget=0.5GiB", "budget.schedule_share=0.25", "model=mlp", "data=digits",
          "run.varied='batch_size=8'"), "greedy wfbp s=0.25 batch_size=8, 0.5GiB, mlp, 2 ranks"),
        (("engine=ddp", "cluster.ranks=4"), "ddp, gpt2-tiny, 4 ranks"),
        (("run.name=mine", "run.varied='seed=1'"), "mine"),
    ],
)  # fmt: skip
def test_a_run_is_named_by_its_plan_budget_model_and_ranks(overrides, name):
    assert resolve(composed(*overrides)).run.name == name


def test_settings_are_what_was_asked_for_but_for_what_has_a_column_and_what_changes_nothing():
    settings = job_event(resolve(composed("data.batch_size=8", "run.name=a", "tracker=wandb")))["settings"]
    assert {key: settings[key] for key in ("data.name", "data.batch_size", "optimizer.name", "run.seed", "link.depth")} == {
        "data.name": "stdlib_bytes", "data.batch_size": 8, "optimizer.name": "adam", "run.seed": 0, "link.depth": 2,
    }  # fmt: skip
    groups = {key.partition(".")[0] for key in settings}
    assert not groups & {"tracker", "sweep", "curve"} and "run.name" not in settings and "budget.limit" not in settings
    peers = job_event(resolve(composed("engine=ddp")))["settings"]
    assert not any(key.startswith(("strategy.", "scheduler.")) for key in peers) and "engine.bucket_mib" in peers


def on(config, **cluster):
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, **cluster))


def test_many_ranks_on_few_cores_are_warned_of_before_they_start(tmp_path, monkeypatch):
    said, config = [], composed()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(resolved, "_free_memory", lambda: 8 << 30)
    for ranks in (8, 9, 32):
        console = Console(file=io.StringIO(), width=400)

        def start(*_, console=console, **__):
            said.append(console.file.getvalue())
            return Outcome(False, "not started")

        jobs.run(on(config, ranks=ranks), tmp_path / f"{ranks}", console, start=start)
    assert ["warning" in each for each in said] == [False, True, True]
    assert said[2].startswith("warning: 32 ranks share 2 cores: starting may take minutes")


def test_what_this_machine_does_not_have_is_refused_by_its_key_before_a_rank_starts(tmp_path, monkeypatch):
    def start(*_, **__):
        raise AssertionError

    config = composed()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for free, gpus, key, asked in (
        (8 << 30, 0, "cluster.ranks", {"ranks": 200}), (1 << 30, 0, "cluster.ranks", {"ranks": 12}),
        (8 << 30, 0, "cluster.device", {"device": "cuda"}), (8 << 30, 1, "cluster.ranks", {"device": "cuda"}),
    ):  # fmt: skip
        monkeypatch.setattr(resolved, "_free_memory", lambda free=free: free)
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ConfigError) as refused:
            run_job(on(config, **asked), tmp_path / "out", start=start)
        assert refused.value.key == key
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        run_job(composed(), tmp_path / "file/out", start=one_process.run)
    assert refused.value.key == "hydra.run.dir"
    for typed, key in (
        (["hydra.run.dir=file/out"], "hydra.run.dir"),
        (["paths.root=file"], "paths.root"),
        (["-m", "strategy=dp", "hydra.sweep.dir=file/out"], "hydra.sweep.dir"),
    ):
        done = one_process.call(train, tmp_path, *typed)
        assert done.returncode == 2 and done.stderr.startswith(f"{key}: "), done.stderr
        assert len(done.stderr.splitlines()) == 1
