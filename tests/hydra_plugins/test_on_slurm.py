"""Sweeps on a real SLURM of two nodes: jobs over both; one fails, one is cancelled, one is preempted, a node goes.

Where nothing is trained the ranks run a stub. A test waits most of its time, and has a network of its own.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

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
JOB = ("model=mlp", "data=synthetic", "cluster.threads=1", "run.unmeasured_steps=1", "profile.cache=false")

STEPS = 60
TIMED = ("model=timed", "model.layers=4", "model.block_mib=0.5", "model.forward_ms=10", "model.backward_ms=20", "strategy=fsdp",
         "run.profile_iterations=1", f"run.steps={STEPS}", *ONE_EACH)  # fmt: skip


def start(folder: Path, *overrides: str, stub: bool = True, **pipes: int) -> "subprocess.Popen[str]":
    return within(folder, program("train", *JOB, *overrides, "hydra.sweep.dir=sweep"), stub=stub, **pipes)


def program(name: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "experiments", name, *LAUNCHER, *overrides]


def within(folder: Path, *commands: list[str], stub: bool, **pipes: int) -> "subprocess.Popen[str]":
    """Run the commands one after the other in a cluster, until one fails."""
    unshare = shutil.which("unshare")
    assert unshare is not None
    script = " && ".join(map(shlex.join, commands)).replace("PROFILE", '"$(echo sweep/profiles/*/profile.json)"')
    module = "tests.hydra_plugins.slurm_cluster"
    cluster = [unshare, "-nm", sys.executable, "-m", module, str(folder / "slurm"), "sh", "-c", script]
    (folder / "node").mkdir(exist_ok=True)
    own = {"MDCS_WORKER": f"tests.experiments.{'stub' if stub else 'hasty'}_worker", "TMPDIR": str(folder / "node")}
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
    names = ("breaks", "fine", "slow", "slower")
    running = start(tmp_path, f"run.name={','.join(names)}", "run.steps=500", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: has_stepped(tmp_path / "sweep/2"), running, 400.0)
    inside(tmp_path, running, "scancel", "2_2")  # 1 is the job that measures their profile
    until(lambda: has_stepped(tmp_path / "sweep/3"), running)
    assert len(list((tmp_path / "node").glob("mdcs-rank-*"))) == 3  # of this job: those of the killed ranks are gone
    for pid in slurm_cluster.processes_of(tmp_path / "slurm", "n1"):
        os.kill(pid, signal.SIGKILL)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 1, (out, err)
    reason = "rank 3 failed at step 2: RuntimeError: the stub breaks as told"
    assert f"failed: {reason} (its logs are in {tmp_path / 'sweep/0'})" in err
    assert all((tmp_path / "sweep/submitted/2_0" / f"rank-{rank}.log").exists() for rank in range(4))
    logs = [(tmp_path / "sweep/0" / f"rank{rank}.log").read_text() for rank in range(4)]
    assert ["Traceback" in log and "the stub breaks as told" in log for log in logs] == [False, False, False, True]
    assert last_event(tmp_path / "sweep/0")["reason"] == reason
    assert last_event(tmp_path / "sweep/1")["event"] == "summary"
    for job in "23":
        said = record.read(tmp_path / "sweep" / job)
        assert f"failed: {said.reason} (its logs are in {tmp_path / 'sweep' / job}" in err, err
        assert said.state == record.FAILED and last_event(tmp_path / "sweep" / job)["reason"] == said.reason
    assert {"2_0", "2_1", "2_2", "2_3"} <= set(out.replace(",", " ").replace(";", " ").split())


def test_a_sweep_shares_one_profile_and_the_curve_and_the_comparison_plan_with_it_too(tmp_path):
    """All jobs run over both nodes and leave the logs of every rank."""
    quick = ("model.forward_ms=1", "model.backward_ms=2", "run.steps=3", "cluster.timeout_s=300")
    shared = (*JOB[1:], *TIMED, *quick)
    short = (*shared, "profile.path=PROFILE")
    train = program("train", *shared, "strategy=dp,fsdp", "hydra.launcher.parallel=2", "hydra.sweep.dir=sweep")
    points = ("budget=floor+30%", "curve.shares=3", "curve.budgets=[]", "curve.measure=stop")
    curve = program("curve", *short, *points, "hydra.sweep.dir=curve")
    compare = program("compare", *short, "compare.only=[mdcs,ddp]", "compare.rounds=1", "hydra.sweep.dir=compare")
    assert within(tmp_path, train, curve, compare, stub=False).wait(540) == 0
    [measured] = (tmp_path / "sweep/profiles").glob("*/profile.json")
    runs = [tmp_path / "sweep/0", tmp_path / "sweep/1", tmp_path / "curve/0/runs/0", *tmp_path.glob("compare/0/runs/*")]
    assert len(runs) == 5
    losses = [[event["loss"] for event in read_events(run / "metrics.jsonl") if event["event"] == "step"] for run in runs]
    assert len(losses[0]) == 3 and all(each == pytest.approx(losses[0]) for each in losses)
    for run in runs:
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["cluster"]["nodes"] == 2 and (run.parent.name != "sweep" or config["profile"]["path"] == str(measured))
        assert {file.name for file in run.glob("rank*.log")} == {"rank0.log", "rank1.log"}
    for job in ("sweep/submitted/1", "sweep/submitted/2_0", "sweep/submitted/2_1", "curve/submitted/4", "compare/submitted/5"):
        assert {file.name for file in (tmp_path / job).iterdir()} == {"rank-0.log", "rank-1.log"}
    assert (tmp_path / "sweep/table.csv").read_text().count("\n") == 3
    points = json.loads((tmp_path / "curve/0/curve.json").read_text())["points"]
    assert [point["measured"]["status"] for point in points if point["measured"] is not None] == ["ok"]
    comparison = json.loads((tmp_path / "compare/0/comparison.json").read_text())
    assert comparison["world"] == 2 and [each["name"] for each in comparison["candidates"]] == ["mdcs", "ddp"]


def inside(folder: Path, running: "subprocess.Popen[str]", *command: str) -> str:
    """Output of one of SLURM's commands in the cluster."""
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm/slurm.conf")}
    entered = ["nsenter", f"--target={running.pid}", "--net", "--mount", *command]
    return subprocess.run(entered, env=env, check=True, capture_output=True, text=True).stdout


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
