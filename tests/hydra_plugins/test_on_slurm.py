"""Sweeps on a real SLURM of two nodes: jobs over both; one fails, one is cancelled, one is preempted, a node goes.

Where nothing is trained the ranks run a stub. A test waits most of its time, and has a network of its own.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from analysis.events import read_events
from experiments.job import record
from tests.hydra_plugins import slurm_cluster

WHY_NOT = slurm_cluster.missing()
pytestmark = [
    pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(550),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no SLURM: {WHY_NOT}"),
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("hydra/launcher=mdcs_slurm", "hydra.launcher.nodes=2", "hydra.launcher.ranks_per_node=2", "hydra.launcher.parallel=1")
ONE_EACH = ("hydra.launcher.ranks_per_node=1",)  # jobs that train
JOB = ("model=mlp", "data=synthetic", "cluster.threads=1", "run.warmup_steps=1", "profile.cache=false")


def start(folder: Path, *overrides: str, stub: bool = True, **pipes: int) -> "subprocess.Popen[str]":
    train = [sys.executable, str(ROOT / "experiments/train.py"), "-m", *LAUNCHER, *JOB, *overrides, "hydra.sweep.dir=sweep"]
    unshare = shutil.which("unshare")
    assert unshare is not None
    cluster = [unshare, "-nm", sys.executable, "-m", "tests.hydra_plugins.slurm_cluster", str(folder / "slurm"), *train]
    own = {"MDCS_WORKER": f"tests.experiments.{'stub' if stub else 'hasty'}_worker"}
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return subprocess.Popen(cluster, cwd=folder, env={**os.environ, **own, "PYTHONPATH": paths}, text=True, **pipes)


def until(there, process: "subprocess.Popen[str]", seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)


def last_event(folder: Path) -> dict:
    return read_events(folder / "metrics.jsonl")[-1]


def has_stepped(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and any(event["event"] == "step" for event in read_events(metrics))


def test_a_job_that_fails_is_cancelled_or_loses_a_node_fails_and_no_other_does(tmp_path):
    names = ("raise", "fine", "slow", "slower")
    running = start(tmp_path, f"run.name={','.join(names)}", "run.steps=500", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: has_stepped(tmp_path / "sweep/2"), running, 400.0)
    inside(tmp_path, running, "scancel", "2_2")  # 1 is the job that measures their profile
    until(lambda: has_stepped(tmp_path / "sweep/3"), running)
    for pid in slurm_cluster.processes_of(tmp_path / "slurm", "n1"):
        os.kill(pid, signal.SIGKILL)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 1, (out, err)
    reason = "rank 1 failed before step 1 (planning): RuntimeError: the stub fails as told"
    assert f"failed: {reason} (its logs are in {tmp_path / 'sweep/0'})" in err
    assert last_event(tmp_path / "sweep/0")["reason"] == reason
    assert last_event(tmp_path / "sweep/1")["event"] == "summary"
    for job in "23":
        assert f"its logs are in {tmp_path / 'sweep' / job}" in err, err
    assert {"2_0", "2_1", "2_2", "2_3"} <= set(out.replace(",", " ").replace(";", " ").split())


def test_jobs_over_both_nodes_plan_with_the_one_profile_that_was_measured_before_them(tmp_path):
    """And the logs of ranks of both nodes are in every job's folder."""
    jobs = ("strategy=dp,fsdp", "run.steps=3", "run.profile_iterations=1", "hydra.launcher.parallel=2", *ONE_EACH)
    assert start(tmp_path, *jobs, stub=False).wait(540) == 0
    [measured] = (tmp_path / "sweep/profiles").glob("*/profile.json")
    for job in "01":
        steps = [event for event in read_events(tmp_path / f"sweep/{job}/metrics.jsonl") if event["event"] == "step"]
        assert len(steps) == 3 and "nodes: 2" in (tmp_path / f"sweep/{job}/config.yaml").read_text()
        assert f"path: {measured}" in (tmp_path / f"sweep/{job}/config.yaml").read_text()
        assert {file.name for file in (tmp_path / f"sweep/{job}").glob("rank*.log")} == {"rank0.log", "rank1.log"}
    assert (tmp_path / "sweep/table.csv").read_text().count("\n") == 3


def inside(folder: Path, running: "subprocess.Popen[str]", *command: str) -> str:
    """Output of one of SLURM's commands in the cluster."""
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm/slurm.conf")}
    entered = ["nsenter", f"--target={running.pid}", "--net", "--mount", *command]
    return subprocess.run(entered, env=env, check=True, capture_output=True, text=True).stdout


STEPS = 60
TIMED = ("model=timed", "model.layers=4", "model.block_mib=0.5", "model.forward_ms=10", "model.backward_ms=20", "strategy=fsdp",
         "run.profile_iterations=1", f"run.steps={STEPS}", *ONE_EACH)  # fmt: skip


LONG = pytest.mark.skipif("MDCS_LONG" not in os.environ, reason="minutes, as limits are: MDCS_LONG=1")


@pytest.mark.parametrize("how", ["told", pytest.param("out of time", marks=LONG)])
def test_a_job_that_is_preempted_or_out_of_time_goes_on_where_it_was(tmp_path, how):
    """The ranks of both nodes write a checkpoint together, SLURM starts the job again, and it makes the steps that are left."""
    limit = ("hydra.launcher.time=3", "hydra.launcher.grace_s=60", f"run.steps={STEPS * 13}") if how == "out of time" else ()
    running = start(tmp_path, *TIMED, *limit, stub=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics = tmp_path / "sweep/0/metrics.jsonl"
    until(lambda: has_stepped(tmp_path / "sweep/0"), running)
    if how == "told":
        inside(tmp_path, running, "scancel", "--signal=USR2", "1")  # as `sbatch --signal=USR2` and preemption do
    out, err = running.communicate(timeout=540)
    assert running.returncode == 0, (out, err)
    events = read_events(metrics)
    names = [event["event"] for event in events if event["event"] not in ("start", "step", "checkpoint")]
    assert names[:4] == ["job", "preempted", "failure", "job"] and names[-2:] == ["resumed", "summary"]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert sorted(set(steps)) == list(range(1, events[-1]["steps"] + 1))
    assert "queued again" in (tmp_path / "sweep/submitted/1/rank-0.log").read_text()


@pytest.mark.parametrize("node", ["n1", pytest.param("n0", marks=LONG)])
def test_a_job_whose_node_is_lost_goes_on_from_its_checkpoint_once_the_node_is_back(tmp_path, node):
    """n1: the ranks of n0 see it first, and rank 0 has the job start again. n0, with rank 0 and the script: SLURM does."""
    running = start(tmp_path, *TIMED, "run.save_every=3", "cluster.timeout_s=15", stub=False, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE)  # fmt: skip
    metrics, cluster = tmp_path / "sweep/0/metrics.jsonl", tmp_path / "slurm"
    until(lambda: metrics.exists() and any(event["event"] == "checkpoint" for event in read_events(metrics)), running)
    lost = slurm_cluster.processes_of(cluster, node, steps=True)
    for pid in lost:
        os.kill(pid, signal.SIGSTOP)  # it says nothing any more, and no connection is closed
    try:
        if node == "n1":
            until(lambda: record.read(tmp_path / "sweep/0").state == record.PREEMPTED, running)
        until(lambda: "down" in inside(tmp_path, running, "sinfo", "-h", "-n", node, "-o", "%T"), running)
        assert record.read(tmp_path / "sweep/0").state == (record.PREEMPTED if node == "n1" else record.RUNNING)
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        inside(tmp_path, running, "/usr/sbin/slurmd", "-N", node, "-f", str(cluster / "slurm.conf"))
        out, err = running.communicate(timeout=400)
    finally:
        for pid in {*lost, *slurm_cluster.processes_of(cluster, node)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert running.returncode == 0, (out, err)
    events = read_events(metrics)
    [resumed] = [event["step"] for event in events if event["event"] == "resumed"]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert resumed >= 3 and steps[-1] == STEPS and steps[-(STEPS - resumed):] == list(range(resumed + 1, STEPS + 1))
    assert record.read(tmp_path / "sweep/0").state == record.OK
    assert ("queued again" in (tmp_path / "sweep/submitted/1/rank-0.log").read_text()) == (node == "n1")
