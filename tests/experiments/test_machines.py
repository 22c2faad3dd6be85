"""Two hosts (network namespaces) whose ranks torchrun starts: programs run on them as on one host, they share no files, and when
one of them is gone the other says so and ends. (test_shaped.py: hosts that the program makes.)
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from analysis.events import read_events
from launch import network
from mdcs.profile.schema import Profile
from tests.experiments.batch import composed, run_job

WHY_NOT = network.refusal(1.0)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=f"no shaped network: {WHY_NOT}")]

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--node-rank={node}",
    "--master-addr={address}", "--master-port=29500",
)  # fmt: skip
JOB = ("model=mlp", "data=synthetic", "strategy=fsdp", "cluster.threads=1", "run.profile_iterations=1", "run.unmeasured_steps=1")
TIMEOUT_S = 15
SAID = re.compile("^rank 1: .*", re.M)


def start(folder: Path, per_node: int, program: str, *overrides: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.launch.hosts", str(folder), *TORCHRUN, f"--nproc-per-node={per_node}"]
    return subprocess.Popen([*command, str(ROOT / "mdcs/cli.py"), program, *overrides, "hydra.run.dir=out"], cwd=ROOT)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]


def test_two_hosts_measure_a_curve_and_compare_as_one_does(tmp_path, warm):
    """The comparison needs no more than the curve's profile; all losses are those of four ranks on one host."""
    exact = ("run.steps=4", "run.precision=fp64")
    curve, compare = tmp_path / "curve", tmp_path / "compare"
    for folder in (curve, compare):
        folder.mkdir()
    few = ("budget=floor+30%", "curve.shares=3", "curve.budgets=[]", "curve.measure=stop")
    assert start(curve, 2, "curve", *JOB, *exact, *few).wait(900) == 0, (curve / "host0/log").read_text()
    out = curve / "host0/out"
    assert [point["measured"] is not None for point in json.loads((out / "curve.json").read_text())["points"]].count(True) == 1
    short = (*exact[:1], *JOB[-2:], "cluster.threads=1", "compare.only=[mdcs,ddp]", "compare.rounds=1")
    given = f"profile.path={out / 'profile.json'}"
    assert start(compare, 2, "compare", given, *short).wait(900) == 0, (compare / "host0/log").read_text()

    outcome = run_job(composed(*JOB, *exact, "cluster.ranks=4"), tmp_path / "one", start=warm.run)
    assert outcome.ok, outcome.reason
    runs = [out / "runs/0", *sorted((compare / "host0/out/runs").glob("0-*"))]
    assert len(runs) == 3
    for each in runs:
        assert len(losses(each)) == 4 and losses(each) == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
        cluster = yaml.safe_load((each / "config.yaml").read_text())["cluster"]
        assert (cluster["name"], cluster["ranks"], cluster["nodes"]) == ("joined", 4, 2)
        assert all((each / f"rank{rank}.log").read_text() for rank in range(4))
    # The second host has written nothing that stays; profiles of one host, and of another network, are others.
    assert [file.name for file in (curve / "host1").iterdir()] == ["log"]
    two, one = (Profile.from_json((folder / "profile.json").read_text()).about for folder in (out, tmp_path / "one"))
    assert (one.get("hosts"), two["hosts"]) == (None, "2") and two["network"].startswith(network.INTERFACE)


@pytest.mark.parametrize("gone", [1, 0])
def test_a_host_that_is_gone_ends_the_job_on_the_other(tmp_path, gone):
    hosts = start(tmp_path, 1, "train", *JOB, "run.steps=100000", f"cluster.timeout_s={TIMEOUT_S}")
    metrics, deadline = tmp_path / "host0/out/metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and len(losses(metrics.parent)) >= 200):  # all ranks' steps are known by then
        assert hosts.poll() is None and time.monotonic() < deadline, (tmp_path / "host0/log").read_text()
        time.sleep(0.2)
    (tmp_path / "vanish").write_text(str(gone))
    log, ended = tmp_path / "host1/log", 0.0
    while hosts.poll() is None and gone == 0 and not SAID.search(log.read_text()):
        time.sleep(0.1)
        ended = time.time()
    assert hosts.wait(TIMEOUT_S + 60) != 0
    vanished = float((tmp_path / "vanished").read_text())
    address = network.addresses(2)[gone]
    if gone == 1:
        last = read_events(metrics)[-1]
        assert last["event"] == "failure" and last["rank"] == 1 and last["step"] > 0
        assert f"({address}) has not answered for " in last["reason"] and "rank 1 was at step " in last["reason"]
        ended = last["time"]
    else:
        said = SAID.search(log.read_text()).group()
        assert f"host {address}, that of rank 0, has not answered for " in said and "was at step " in said
    assert ended - vanished < TIMEOUT_S + 30  # the network's own time for a host that is gone is minutes
