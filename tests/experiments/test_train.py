"""`train.py` from a user's side: exit codes, what is said, what is left in the folder. The ranks run a stub, in
processes of their own only where launching is what is tested.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.events import read_events
from experiments import train as program
from experiments.config.files import groups
from experiments.config.schema import OWN, fields_by_key
from experiments.job import record
from tests.experiments import one_process
from tests.launch.processes import assert_gone
from tests.mdcs.profiles import few

ROOT = Path(__file__).resolve().parents[2]
HERE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
WORKER = "tests.experiments.stub_worker"
STUB = f"import os; os.environ['MDCS_WORKER'] = {WORKER!r}; from experiments import train; sys.exit(train.main())"
QUICK = ("run.steps=3", "run.unmeasured_steps=1")


def start(folder: Path, *overrides: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HERE + STUB, *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, **pipes)


def train(folder: Path, *overrides: str, ranks: bool = True) -> "subprocess.CompletedProcess[str]":
    if not ranks:
        return one_process.call(program, folder, *overrides, worker=WORKER)
    process = start(folder, *overrides)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_job_that_ends_well(tmp_path):
    done = train(tmp_path, *QUICK, "hydra.run.dir=out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dp wfbp, gpt2-tiny, 2 ranks: step 3/3 loss 0.3333" in done.stdout
    assert f"the run is in {tmp_path / 'out'}; its first step ended after 2.5 s; mdcs report " in done.stdout
    assert [e["event"] for e in read_events(tmp_path / "out/metrics.jsonl")] == ["job", "start", *["step"] * 3, "summary"]
    assert "threads: null" not in (tmp_path / "out/config.yaml").read_text()


@pytest.mark.slow
def test_a_job_is_mirrored_to_wandb_with_its_pictures(tmp_path):
    done = train(tmp_path, *QUICK, "tracker=wandb", "tracker.mode=offline", "tracker.timeout_s=100",
                 "hydra.run.dir=out", ranks=False)
    assert (done.returncode, done.stderr) == (0, "")
    [run] = (tmp_path / "out/wandb").glob("offline-run-*")
    assert list(run.glob("files/media/images/tradeoff_*.png"))


@pytest.mark.parametrize(
    ("name", "reason"),
    few([
        ("kill", "rank 1 was killed by SIGKILL at step 2"),
        ("raise", "rank 1 failed before step 1 (planning): RuntimeError: the stub fails as told"),
        ("nothing", "all ranks ended well, but wrote no summary"),
    ]),
)  # fmt: skip
def test_a_job_that_fails_says_why_and_records_it(tmp_path, name, reason):
    done = train(tmp_path, *QUICK, f"run.name={name}", "hydra.run.dir=out", ranks=name != "nothing")
    assert done.returncode == 1
    assert done.stderr == f"failed: {reason} (its logs are in {tmp_path / 'out'})\n"
    last = read_events(tmp_path / "out/metrics.jsonl")[-1]
    assert (last["event"], last["status"], last["reason"]) == ("failure", "failed", reason)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["budget.reserve_mib=-5"], "budget.reserve_mib: must be >= 0, got -5"),
        (["-m", "budget.reserve_mib=-5"], "budget.reserve_mib: must be >= 0, got -5 (job budget.reserve_mib=-5)"),
        pytest.param(
            ["-m", "strategy=foo"],
            f"strategy: no such option foo; options: {', '.join(groups()['strategy'])}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_config_is_one_line_and_starts_nothing(tmp_path, overrides, line):
    done = train(tmp_path, *overrides, "hydra.run.dir=out", "hydra.sweep.dir=out", ranks=False)
    assert (done.returncode, done.stderr) == (2, line + "\n")
    assert not list(tmp_path.rglob("launch.json"))


def test_a_sweep_goes_on_after_bad_jobs_and_ends_with_the_table(tmp_path):
    grid = ("-m", "budget.reserve_mib=-1,1", "run.name=fine,raise", "hydra.sweep.dir=out")
    done = train(tmp_path, *QUICK, *grid, ranks=False)
    assert done.returncode == 1
    first, second, last = done.stderr.splitlines()
    assert first.startswith("budget.reserve_mib: must be >= 0, got -1 (job ")
    assert second.startswith("failed: rank 1 failed: RuntimeError: the stub fails as told")
    assert last.startswith("3 of 4 jobs failed: ")
    assert "budget.reserve_mib=1 run.name=raise" in last
    sweep = json.loads((tmp_path / "out/sweep.json").read_text())
    assert [job["status"] for job in sweep["jobs"]] == ["invalid", "invalid", "ok", "failed"]
    assert [job["folder"] for job in sweep["jobs"]] == [None, None, "0", "1"]
    assert (tmp_path / "out/table.csv").read_text().count("\n") == 3
    assert (tmp_path / "out/tradeoff.png").stat().st_size > 1000
    assert "sweep: out" in (tmp_path / "out/0/config.yaml").read_text()
    # The second job plans with the profile that the first has measured.
    assert f"path: {tmp_path / 'out/0/profile.json'}" in (tmp_path / "out/1/config.yaml").read_text()


def test_a_sweep_goes_on_after_a_fault_of_the_code(tmp_path, no_pictures):
    def start(run_dir, *args, **named):
        if run_dir.name == "0":
            raise KeyError("a fault\nof two lines")
        return one_process.run(run_dir, *args, **named)

    asked = (*QUICK, "-m", "run.name=a,b", "hydra.sweep.dir=out")
    done = one_process.call(program, tmp_path, *asked, worker=WORKER, start=start)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    *_, failed, last = done.stderr.splitlines()
    assert failed.startswith("failed: KeyError: 'a fault") and last.startswith("1 of 2 jobs failed: ")
    assert [job["status"] for job in json.loads((tmp_path / "out/sweep.json").read_text())["jobs"]] == ["failed", "ok"]
    assert (tmp_path / "out/table.csv").read_text().count("\n") == 3
    assert record.read(tmp_path / "out/0").state == record.FAILED


OWN_DISK = 'mount -t tmpfs -o size=4m none "$0" && cd "$0" && exec "$@"'
DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", OWN_DISK)


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_job_on_a_full_disk(tmp_path):
    """The reason is told, and what was measured is whole; so it is when the disk stays full, and nothing can start."""
    disk = [*DISK, str(tmp_path)]
    if subprocess.run([*disk, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a system that lets users mount a disk of their own")
    grid = ("-m", "run.name=full,fine,full-stays,after", "profile.cache=false", "hydra.sweep.dir=out")
    show = '"$@"; echo "exit $?"; cat out/*/metrics.jsonl'
    command = [*disk, "sh", "-c", show, "sh", sys.executable, "-c", HERE + STUB, *QUICK, *grid]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "exit 1\n" in done.stdout and "Traceback" not in done.stderr, done.stderr
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    reason = "failed: rank 0 failed at step 2: RuntimeError: the stub fails on a full disk"
    assert [line.partition(" (")[0] for line in failed[:2]] == [reason] * 2
    assert len(failed) == 3 and "No space left on device" in failed[2]
    assert "3 of 4 jobs failed: " in done.stderr.splitlines()[-1]
    events = [json.loads(line) for line in done.stdout.partition("exit 1\n")[2].splitlines()]
    assert [event["event"] for event in events][:9] == ["job", "start", "step", "failure", "job", "start", *["step"] * 3]


@pytest.mark.slow
def test_single_jobs_join_the_grid_with_what_it_has_in_common(tmp_path, no_pictures):
    also = "hydra.sweeper.also=['strategy=fsdp scheduler=sequential','strategy=dp scheduler=wfbp']"
    grid = ("-m", "strategy=dp", "scheduler=wfbp", also, "hydra.sweep.dir=out")
    assert train(tmp_path, *QUICK, *grid, ranks=False).returncode == 0
    jobs = [job["overrides"] for job in json.loads((tmp_path / "out/sweep.json").read_text())["jobs"]]
    common = ["run.steps=3", "run.unmeasured_steps=1"]
    assert jobs == [[*common, "strategy=dp", "scheduler=wfbp"], [*common, "strategy=fsdp", "scheduler=sequential"]]


@pytest.mark.slow
def test_a_grid_has_joint_once_per_budget(tmp_path, no_pictures):
    """It decides the schedule: other schedulers and shares make no other job of it."""
    grid = ("-m", "strategy=dp,joint", "scheduler=dear,priority", "budget=1GiB", "budget.schedule_share=0,0.5")
    done = train(tmp_path, *QUICK, *grid, "hydra.sweep.dir=out", ranks=False)
    assert done.returncode == 0
    same = [line.partition(" (job ")[0] for line in done.stderr.splitlines()]
    assert same == ["same as job 4: strategy=joint decides the schedule"] * 3
    jobs = json.loads((tmp_path / "out/sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["ok"] * 5
    assert [job["folder"] for job in jobs if "strategy=joint" in job["overrides"]] == ["4"]
    assert "scheduler: null\n" in (tmp_path / "out/4/config.yaml").read_text()


def test_a_job_is_told_what_its_strategy_does_not_use(tmp_path):
    asked = ("strategy=joint", "scheduler=dear", "budget=1GiB", "budget.schedule_share=0.5")
    done = train(tmp_path, *QUICK, *asked, "hydra.run.dir=out", ranks=False)
    unused = "strategy=joint decides the schedule: not used: scheduler=dear budget.schedule_share=0.5\n"
    assert (done.returncode, done.stderr) == (0, unused)
    assert "joint, 1GiB, gpt2-tiny, 2 ranks: step 3/3 loss" in done.stdout


@pytest.mark.parametrize(("signum", "multirun"), [(signal.SIGINT, ("-m",)), (signal.SIGTERM, ())])
@pytest.mark.slow
def test_an_interrupted_program_ends_its_ranks(tmp_path, signum, multirun):
    process = start(tmp_path, *multirun, "run.name=slow", "run.steps=1000", "hydra.run.dir=out/0", "hydra.sweep.dir=out")
    metrics = tmp_path / "out/0/metrics.jsonl"
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not (metrics.exists() and len(read_events(metrics)) > 2):
        time.sleep(0.05)
    pids = [json.loads((tmp_path / f"out/0/rank{rank}.status").read_text())["pid"] for rank in (0, 1)]
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    goes_on = f"; hydra.sweep.dir={tmp_path / 'out'} continues the sweep" if multirun else ""
    assert (process.returncode, err) == (130, f"interrupted: all ranks were ended{goes_on}\n")
    assert_gone(pids)  # whoever started them has died, too
    assert read_events(metrics)[-1]["reason"] == "interrupted"


def test_the_scripts_work_from_any_folder(tmp_path):
    """The one of train.py is started below."""
    command = [sys.executable, str(ROOT / "experiments/plan.py"), "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "strategy:\n  _target_: mdcs.planner.strategies.Uniform\n  each: dp\n" in done.stdout


def test_help_explains_every_key_and_shows_what_is_chosen(tmp_path):
    command = [sys.executable, str(ROOT / "experiments/train.py"), "--help", "strategy=greedy", "run.steps=7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan and train: one job")
    assert re.search(r"^  strategy=greedy\* +\w", done.stdout, re.M)
    assert re.search(r"^  model.layers=2 +\w.* \(>= 1\)$", done.stdout, re.M)
    assert re.search(r"^  run.steps=7 +\w.* \(>= 1\)$", done.stdout, re.M)
    words = done.stdout.split()
    of_train = [key for key in fields_by_key() if key.partition(".")[0] not in OWN]  # others are keys of one program
    assert [key for key in of_train if not any(word.startswith(f"{key}=") for word in words)] == []
    assert max(map(len, done.stdout.splitlines())) <= 110
    command[3] = "strategy=nosuch"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("strategy: no such option nosuch; options: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
