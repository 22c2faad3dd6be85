"""Sweeps that are repeated: what has ended well is kept, also when the program was killed. The ranks run a stub."""

import csv
import json
import re
import signal
import time

import pytest

from analysis.events import read_events
from experiments.job import record
from experiments.job.tracking import JsonLines
from hydra_plugins import _mdcs_jobs
from tests.experiments import stub_slurm
from tests.experiments.test_train import start, train

pytestmark = pytest.mark.usefixtures("no_pictures")

SWEEP = ("-m", "run.steps=3", "run.unmeasured_steps=1")


def states(folder):
    return {path.parent.name: record.read(path.parent).state for path in sorted(folder.glob("*/status.json"))}


def kept(out: str) -> list[str]:
    return re.findall(r"^(\d+): \w+, not run again", out, re.M)


@pytest.mark.slow
def test_a_killed_sweep_loses_no_finished_run(tmp_path):
    """The one that ran when SIGKILL came runs again, as does the one that had not yet."""
    jobs = (*SWEEP, "run.name=fine,slow,last", "hydra.sweep.dir=multirun/day/then")
    first = start(tmp_path, *jobs)
    deadline = time.monotonic() + 200
    while not (running := list(tmp_path.glob("multirun/*/*/1/rank1.status"))):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    sweep = running[0].parents[1]
    assert states(sweep) == {"0": "ok", "1": "running"}
    before = (sweep / "0/metrics.jsonl").read_bytes()

    done = train(tmp_path, *jobs, ranks=False)
    assert done.returncode == 0, done.stderr
    assert f"going on in {sweep} (sweep.force=true runs every job)" in done.stdout
    assert kept(done.stdout) == ["0"] and "1: not finished, runs again (job " in done.stdout
    assert "3 jobs, 1 of them earlier, in " in done.stdout
    assert (sweep / "0/metrics.jsonl").read_bytes() == before and states(sweep) == dict.fromkeys("012", "ok")
    assert (sweep / "table.csv").read_text().count("\n") == 4
    # Both plan with the profile of the first, as if nothing had happened.
    for job in "12":
        assert f"path: {sweep / '0/profile.json'}" in (sweep / job / "config.yaml").read_text()

    again = train(tmp_path, *jobs, ranks=False)
    assert (again.returncode, kept(again.stdout)) == (0, ["0", "1", "2"])
    anew = train(tmp_path, *jobs, "sweep.force=true", ranks=False)
    assert (anew.returncode, kept(anew.stdout)) == (0, []) and (sweep / "0/metrics.jsonl").read_bytes() != before


@pytest.mark.slow
def test_what_failed_runs_again_unless_told_otherwise(tmp_path):
    jobs = (*SWEEP, "hydra.sweep.dir=out", "run.name=raise,fine")
    first = train(tmp_path, *jobs, "sweep.fail_fast=true", ranks=False)
    assert first.returncode == 1 and states(tmp_path / "out") == {"0": "failed"}
    said = record.read(tmp_path / "out/0")
    assert said.reason == "rank 1 failed: RuntimeError: the stub fails as told"
    assert [job["status"] for job in json.loads((tmp_path / "out/sweep.json").read_text())["jobs"]] == ["failed", "left out"]

    left = train(tmp_path, *jobs, "sweep.retry_failed=false", ranks=False)
    assert (left.returncode, kept(left.stdout)) == (1, ["0"])
    assert states(tmp_path / "out") == {"0": "failed", "1": "ok"}
    assert "0: failed, runs again" in train(tmp_path, *jobs, ranks=False).stdout
    attempts = [sum(event["event"] == "job" for event in read_events(tmp_path / f"out/{n}/metrics.jsonl")) for n in (0, 1)]
    assert attempts == [2, 1]


def test_after_a_change_of_code_jobs_run_again_it_is_said_why_and_the_table_has_the_new_ones(tmp_path, monkeypatch):
    jobs = (*SWEEP, "hydra.sweep.dir=out", "run.name=a,b")
    assert train(tmp_path, *jobs, ranks=False).returncode == 0
    monkeypatch.setattr(record, "code_of", lambda cls: "of the day after")
    for folders in (["2", "3"], ["2", "3"]):
        again = train(tmp_path, *jobs, ranks=False)
        assert again.returncode == 0 and kept(again.stdout) == ([] if "runs again elsewhere" in again.stdout else folders)
        with (tmp_path / "out/table.csv").open() as file:
            assert [row["folder"].rpartition("/")[2] for row in csv.DictReader(file)] == folders
    assert json.loads((tmp_path / "out/3/identity.json").read_text())["code of the model"] == "of the day after"


def test_a_sweep_that_grows_keeps_the_folders_of_its_jobs(tmp_path):
    train(tmp_path, *SWEEP, "hydra.sweep.dir=out", "run.name=a,c", ranks=False)
    more = train(tmp_path, *SWEEP, "hydra.sweep.dir=out", "run.name=a,b,c", "cluster.timeout_s=60", ranks=False)
    assert (more.returncode, kept(more.stdout)) == (0, ["0", "1"])
    assert [read_events(tmp_path / f"out/{n}/metrics.jsonl")[0]["name"] for n in range(3)] == ["a", "c", "b"]


def test_a_key_of_sweeps_is_refused_for_one_job(tmp_path):
    done = train(tmp_path, "sweep.force=true", ranks=False)
    assert (done.returncode, done.stderr) == (2, "sweep.force: is for a sweep (-m)\n")


@pytest.mark.slow
def test_a_submitted_job_that_has_not_ended_is_not_submitted_again(tmp_path, monkeypatch):
    stub_slurm.install(tmp_path / "slurm", monkeypatch)
    jobs = (*SWEEP, "run.name=fine,other", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert train(tmp_path, *jobs, ranks=False).returncode == 0
    waiting = tmp_path / "sweep/1"
    (tmp_path / "slurm/squeue").write_text("#!/bin/bash\necho '7|RUNNING|None'\n")
    _mdcs_jobs.write(waiting, _mdcs_jobs.Job("7", "logs"))
    with JsonLines(waiting / "metrics.jsonl") as metrics:
        metrics.write({"event": "failure", "status": "failed", "reason": "preempted at step 2"})
    before = (waiting / "metrics.jsonl").read_bytes()
    for state in (record.PREEMPTED, record.SUBMITTED):
        record.write(waiting, record.read(waiting).identity, state, "preempted at step 2")
        done = train(tmp_path, *jobs, ranks=False)
        assert (done.returncode, done.stderr, kept(done.stdout)) == (0, "", ["0"])
        assert "1: submitted before and running, not run again (job " in done.stdout
        with (tmp_path / "sweep/table.csv").open() as file:
            assert [row["status"] for row in csv.DictReader(file)] == ["ok", record.SUBMITTED]
        assert states(tmp_path / "sweep") == {"0": "ok", "1": state} and (waiting / "metrics.jsonl").read_bytes() == before

    (tmp_path / "slurm/squeue").write_text("#!/bin/bash\n")
    _mdcs_jobs.write(waiting, _mdcs_jobs.Job("7", "logs"))  # it has ended, and left no word
    done = train(tmp_path, *jobs, ranks=False)
    assert "1: submitted, runs again (job " in done.stdout and states(tmp_path / "sweep") == {"0": "ok", "1": "ok"}


def test_what_a_sweep_varies_is_a_column_and_in_the_names_of_its_runs(tmp_path):
    """The tutorial's sweep over buckets, with seeds."""
    plan = (*SWEEP, "strategy=dp", "scheduler=fusion", "budget=1GiB", "hydra.sweep.dir=out")
    done = train(tmp_path, *plan, "scheduler.bucket_mib=0.1,25", "run.seed=1,2", ranks=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    swept = [(size, seed) for size in ("0.1", "25") for seed in ("1", "2")]
    assert [(f"{float(row['scheduler.bucket_mib']):g}", row["run.seed"]) for row in rows] == swept
    assert [row["name"] for row in rows] == [
        f"dp fusion bucket_mib={size} seed={seed}, 1GiB, gpt2-tiny, 2 ranks" for size, seed in swept
    ]
    assert "2 runs of dp · fusion · bucket_mib=25, budget 1 GiB: median 100.0 ms, 100.0 to 100.0" in done.stdout
    again = train(tmp_path, *plan, "scheduler.bucket_mib=25", "run.seed=2", ranks=False)
    assert kept(again.stdout) == ["3"]  # what a sweep varies is not what its jobs are
