"""Jobs that are handed in: what is asked for and what is refused, the script that can be printed, and jobs of this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.events import read_events
from experiments import train
from experiments.job import record
from hydra_plugins import _mdcs_handed
from hydra_plugins._mdcs_slurm import CODE, MdcsLocalConf, MdcsSlurmConf, check, parameters, script, slots, snapshot
from launch import orphans, status
from tests.experiments import one_process

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))
ASKED = MdcsSlurmConf(
    nodes=2, ranks_per_node=4, cpus_per_node=8, gpus_per_node=4, mem_gb=1.5, partition="large", constraint="a100",
    modules=["cuda/12"], env={"NCCL_DEBUG": "INFO it"}, setup=["ulimit -l unlimited"], sbatch={"reservation": "ours"}, parallel=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (MdcsSlurmConf(nodes=0), "hydra.launcher.nodes: must be >= 1, got 0"),
        (MdcsSlurmConf(mem_gb=0), "hydra.launcher.mem_gb: must be > 0, got 0"),
        (MdcsSlurmConf(executor="pbs"), "hydra.launcher.executor: must be slurm or local, got pbs"),
        (MdcsLocalConf(partition="large"), "hydra.launcher.partition: has no effect without SLURM, got large"),
        (MdcsSlurmConf(env={"A-B": "1"}), "hydra.launcher.env: A-B is no name of a variable"),
        (MdcsLocalConf(cpus_per_node=1000), f"hydra.launcher.cpus_per_node: this machine has {CORES}, got 1000"),
    ],
)
def test_what_cannot_be_is_one_line_with_its_key(asked, line):
    with pytest.raises(ValueError) as error:
        check(asked)
    assert str(error.value) == line


def test_jobs_of_this_machine_have_cores_and_memory_each():
    assert slots(MdcsLocalConf(parallel=1000)) == 1000
    assert slots(MdcsLocalConf(parallel=1000, cpus_per_node=1)) == CORES
    assert slots(MdcsLocalConf(parallel=1000, mem_gb=0.25)) > slots(MdcsLocalConf(parallel=1000, mem_gb=0.5)) >= 1
    assert slots(MdcsLocalConf(parallel=1, cpus_per_node=1)) == 1


def test_a_job_of_slurm_is_known_until_it_has_ended(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\nprintf '7_0 PENDING\\n7_1 COMPLETED\\n'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for job, state in (("7_0", "PENDING"), ("7_1", ""), ("7_2", "")):
        _mdcs_handed.note(tmp_path, "slurm", job)
        assert _mdcs_handed.state(tmp_path) == state
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert _mdcs_handed.state(tmp_path) == "unknown"


def test_all_that_is_asked_for_reaches_submitit():
    check(ASKED)
    told = parameters(ASKED, Path("/shared/code"))
    assert (told["nodes"], told["tasks_per_node"], told["slurm_array_parallelism"]) == (2, 1, 3)
    assert told["slurm_srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=8"]
    assert told["slurm_additional_parameters"] == {"requeue": True, "reservation": "ours"}
    never = parameters(MdcsSlurmConf(requeue=False), Path("/shared/code"))
    assert never["slurm_additional_parameters"] == {"no-requeue": True}  # whatever the cluster's usual is


def test_the_script_is_what_one_would_write_by_hand(tmp_path):
    pytest.importorskip("submitit")
    text = script(ASKED, Path("/shared/code"), tmp_path / "submitted", tmp_path / "0")
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=8", "#SBATCH --gpus-per-node=4",
        "#SBATCH --mem=1536MB", "#SBATCH --partition=large", "#SBATCH --constraint=a100", "#SBATCH --reservation=ours",
        "module load cuda/12", "export NCCL_DEBUG='INFO it'", "ulimit -l unlimited", "cd /shared/code",
    ):  # fmt: skip
        assert line in text.splitlines()
    [run] = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1 --cpus-per-task=8" in run
    assert run.endswith(f"-m launch.node 4 experiments.job.frozen {tmp_path / '0'}")


def test_jobs_run_the_code_as_it_was_when_they_were_handed_in(tmp_path, monkeypatch):
    """A sweep that is repeated after a bug was fixed runs the fixed code, and jobs that wait what they were handed in with."""
    checkout = tmp_path / "checkout"
    for name in CODE:
        (checkout / name / "__pycache__").mkdir(parents=True)
        (checkout / name / "module.py").write_text("wrong")
    monkeypatch.setattr("hydra_plugins._mdcs_slurm.ROOT", checkout)
    before = snapshot(tmp_path / "code")
    assert snapshot(tmp_path / "code") == before and not list(before.rglob("__pycache__"))
    (checkout / "mdcs/module.py").write_text("right")
    after = snapshot(tmp_path / "code")
    assert [(each / "mdcs/module.py").read_text() for each in (before, after)] == ["wrong", "right"]
    assert sorted((tmp_path / "code").iterdir()) == sorted([before, after])


def common(folder: Path) -> tuple[str, ...]:
    each = ("run.warmup_steps=1", "hydra.launcher.ranks_per_node=2", "hydra.launcher.parallel=1")
    return ("-m", *each, f"hydra.sweep.dir={folder / 'sweep'}")


def sweep(folder: Path, *overrides: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "experiments/train.py"), *common(folder), *overrides]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=stdout, stderr=stderr)


@pytest.mark.slow
def test_jobs_that_sbatch_refuses_are_one_line(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: ours' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    refused = one_process.call(train, tmp_path, *common(tmp_path), "hydra/launcher=mdcs_slurm", "run.name=a,b")
    line = "config: hydra.launcher: sbatch refuses the jobs: sbatch: error: invalid partition specified: ours"
    assert refused.stderr.splitlines()[-1] == line and refused.returncode == 2


@pytest.fixture
def accepted(tmp_path, monkeypatch):
    """A SLURM that accepts all arrays and has none that has not ended; `asked` has what sbatch was told of each."""
    pytest.importorskip("submitit")
    number = 'echo x >> "$0.calls"; n=$(wc -l < "$0.calls"); for last; do :; done; cp "$last" "$0.asked.$n"'
    for name, does in (("sbatch", f'{number}; echo "Submitted batch job $n"'), ("srun", ":"), ("squeue", ":")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return lambda: [file.read_text() for file in sorted(tmp_path.glob("sbatch.asked.*"))]


def hand_in(folder: Path, *overrides: str) -> tuple[str, int]:
    """Output of a sweep that nobody waits for, and the number of runs in its folder."""
    asked = ("hydra/launcher=mdcs_slurm", "hydra.launcher.wait=false", "model=mlp", "data=synthetic", *overrides)
    done = one_process.call(train, folder, *common(folder), *asked)
    assert done.returncode == 0, done.stderr
    return done.stdout, len(list((folder / "sweep").glob("*/status.json")))


def test_nodes_and_what_else_a_job_asks_for_belong_to_a_runs_identity(tmp_path, accepted):
    """On four nodes the runs of two nodes are not shown in place of new ones; another time limit makes no run another."""
    assert hand_in(tmp_path, "hydra.launcher.nodes=2")[1] == 1
    assert yaml.safe_load((tmp_path / "sweep/0/frozen.yaml").read_text())["cluster"]["ranks"] == 4
    done = record.read(tmp_path / "sweep/0")
    record.write(tmp_path / "sweep/0", done.identity, record.OK)

    out, runs = hand_in(tmp_path, "hydra.launcher.nodes=4")
    assert "not run again" not in out and runs == 2
    said, there = hand_in(tmp_path, "hydra.launcher.nodes=2", "hydra.launcher.time_min=7")
    assert "0: ok, not run again" in said and there == 2
    for asked in ("hydra.launcher.constraint=a100", "+hydra.launcher.env.NCCL_ALGO=Ring"):
        runs += 1
        assert hand_in(tmp_path, "hydra.launcher.nodes=2", asked)[1] == runs


def test_other_ranks_than_the_launcher_starts_are_refused(tmp_path):
    asked = ("hydra/launcher=mdcs_slurm", "hydra.launcher.nodes=3", "cluster.ranks=2")
    refused = one_process.call(train, tmp_path, *common(tmp_path), *asked)
    said = refused.stderr.splitlines()
    assert refused.returncode == 2 and said[0].startswith("cluster.ranks: must be 6, as many as are started; got 2 (job ")
    assert not list(tmp_path.rglob("frozen.yaml"))


def dependency(script: str) -> str:
    return next((line.partition("=")[2] for line in script.splitlines() if line.startswith("#SBATCH --dependency=")), "")


def test_one_job_measures_the_profile_before_the_array_of_those_that_need_it(tmp_path, accepted):
    """A wider sweep later, with the profile there, has none of it; a single job measures its own."""
    out, _ = hand_in(tmp_path, "strategy=dp,fsdp", "+hydra.launcher.sbatch.dependency=after:99")
    first, jobs = accepted()
    assert "handed in first, as the others need what it leaves: 1\n" in out and "handed in: 2_0, 2_1" in out
    assert "--array" not in first and dependency(first) == "after:99"
    assert "#SBATCH --array=0-1%1" in jobs and dependency(jobs) == "after:99,afterany:1"
    [measured] = (tmp_path / "sweep/profiles").iterdir()
    assert {*_mdcs_handed.before(tmp_path / "sweep/0"), *_mdcs_handed.before(tmp_path / "sweep/1")} == {measured}

    (measured / "profile.json").write_text("{}")
    hand_in(tmp_path, "strategy=dp,fsdp,zero2,sdp")
    assert [dependency(script) for script in accepted()[2:]] == [""] and not (measured / "frozen.yaml").exists()
    hand_in(tmp_path, "strategy=dp,fsdp", "sweep.force=true")
    assert [dependency(script) for script in accepted()[3:]] == ["", "afterany:4"]
    hand_in(tmp_path, "strategy=dp", "data.batch_size=3")
    assert [dependency(script) for script in accepted()[5:]] == [""]


LOCAL = (
    "hydra/launcher=mdcs_local", "run.steps=1000", "+hydra.launcher.env.MDCS_WORKER=tests.experiments.stub_worker",
    f"hydra.launcher.setup=['export PYTHONPATH=$PYTHONPATH:{ROOT}']", "run.name=slow,slow too",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_a_sweep_that_is_interrupted_ends_its_jobs_of_this_machine(tmp_path, waits):
    """Also while the others are still to be handed in, and where Ctrl-C is ignored, as by what a shell runs in the background."""
    pytest.importorskip("submitit")
    running = sweep(tmp_path, *LOCAL, f"hydra.launcher.wait={waits}".lower())
    ranks = [tmp_path / f"sweep/0/rank{rank}.status" for rank in (0, 1)]
    deadline = time.monotonic() + 100
    while not ranks[0].exists():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert _mdcs_handed.state(tmp_path / "sweep/0") == "RUNNING"
    running.terminate()
    assert "interrupted" in running.communicate(timeout=60)[1] and running.returncode == 130
    pids = [said.pid for rank in (0, 1) if (said := status.read(tmp_path / "sweep/0", rank)) is not None]
    assert pids and orphans.wait_until_gone(pids, 10.0) == []


@pytest.mark.slow
def test_jobs_that_nobody_waits_for_need_not_have_begun(tmp_path):
    pytest.importorskip("submitit")
    with (tmp_path / "said").open("w") as said:  # which the job has, too
        done = sweep(tmp_path, *LOCAL[:-1], "run.name=slow", "hydra.launcher.wait=false", stdout=said, stderr=said)
        done.wait(100)
    job = json.loads((tmp_path / "sweep/0" / _mdcs_handed.FILE).read_text())["job"]
    _mdcs_handed.cancel("local", job)  # which is nobody's child by now
    assert _mdcs_handed.state(tmp_path / "sweep/0") == "RUNNING"
    _mdcs_handed.end(int(job))
    assert done.returncode == 0 and "1 jobs in " in (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"][0]["status"] == "handed in"


@pytest.mark.slow
def test_jobs_of_this_machine_run_by_themselves_and_a_failed_rank_fails_job_and_sweep(tmp_path):
    pytest.importorskip("submitit")
    command = [
        sys.executable, str(ROOT / "experiments/train.py"), "-m", "hydra/launcher=mdcs_local", "hydra.launcher.ranks_per_node=2",
        "hydra.launcher.parallel=1", "+hydra.launcher.env.MDCS_WORKER=tests.experiments.stub_worker", "run.name=fine,raise",
        f"hydra.launcher.setup=['export PYTHONPATH=$PYTHONPATH:{ROOT}']", "run.steps=2", "run.warmup_steps=1",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    reason = "rank 1 failed before step 1 (planning): RuntimeError: the stub fails as told"
    assert done.returncode == 1, done.stderr
    assert f"failed: {reason} (its logs are in {tmp_path / 'sweep/1'})" in done.stderr
    ends = [read_events(tmp_path / f"sweep/{number}/metrics.jsonl")[-1] for number in (0, 1)]
    assert [end["event"] for end in ends] == ["summary", "failure"] and ends[1]["reason"] == reason
