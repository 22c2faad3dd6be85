"""Jobs on ranks that torchrun has started: one process per rank, and what ends a job is said with its place."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.rendezvous import LOG_BYTES, end_of
from launch.spmd import Job

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def start(folder: Path, *jobs: str) -> "subprocess.Popen[str]":
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*torchrun, "tests.launch.spmd_program", str(folder), *jobs], cwd=ROOT, **pipes)


def run(folder: Path, *jobs: str) -> tuple[str, list[dict]]:
    """The printed lines, and the outcomes."""
    process = start(folder, *jobs)
    printed = process.communicate(timeout=240)[0]
    assert process.returncode != 0, printed  # torchrun's own for a 7
    return printed, json.loads((folder / "outcomes.json").read_text())


@pytest.mark.parametrize("blind", [[], ["blind"]])
def test_a_process_is_a_rank_in_all_jobs_and_what_all_raise_is_followed_by_another(tmp_path, blind):
    printed, outcomes = run(tmp_path, *blind, "fine", "all raise", "fine")
    assert [each["ok"] for each in outcomes] == [True, False, True] and "no such luck for anybody" in outcomes[1]["reason"]
    assert printed.count("the program has ended") == 1 and "was told" not in printed
    processes = set()
    for number, what in enumerate(("fine", "all raise", "fine")):
        for rank in (0, 1):
            log = (tmp_path / str(number) / f"rank{rank}.log").read_text()
            processes.add((rank, re.match(rf"rank {rank}, process (\d+), was told: do {what}", log)[1]))
            assert ("Traceback" in log) == (what == "all raise")
    assert len(processes) == 2 and not (tmp_path / "0/told1").exists()


@pytest.mark.parametrize(
    ("what", "reason", "step"),
    [
        ("raised", "rank 1 failed at step 3: ValueError: no such luck", 3),
        ("hung", "no rank has moved for 8 s: rank 0 at step 3 .all-reduce., rank 1 at step 3 .all-reduce.", 3),
        ("killed", "the process of rank 1 on host .* ended without an error message: rank 1 was at step 3 .all-reduce.", 3),
        ("killed at once", "the process of rank 1.* ended .*", None),
    ],
)
def test_a_job_that_a_rank_cannot_leave_is_the_last_one(tmp_path, what, reason, step):
    _, outcomes = run(tmp_path, what, "fine")
    assert [each["ok"] for each in outcomes] == [False] * len(outcomes) and (what == "hung" or outcomes[0]["rank"] == 1)
    assert re.fullmatch(reason, outcomes[0]["reason"]) and outcomes[-1]["reason"] == outcomes[0]["reason"]
    assert step is None or outcomes[0]["step"] == step
    if what == "hung":  # where it is
        assert all("ranks/told.py" in (tmp_path / f"0/rank{rank}.log").read_text() for rank in (0, 1))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_program_that_is_interrupted_ends_all_ranks(tmp_path, signum):
    process, deadline = start(tmp_path, "hung"), time.monotonic() + 100
    while not all((tmp_path / f"0/rank{rank}.log").exists() for rank in (0, 1)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signum)
    assert process.wait(25) != 0  # before torchrun would kill its processes


def test_another_folder_of_the_same_name_is_not_the_jobs(tmp_path):
    job = Job(0, "", "", (), 10.0, 0, str(tmp_path), "token")
    assert not job.is_seen
    for token in ("another", "token"):
        (tmp_path / "launch.json").write_text(json.dumps({"id": token}))
        assert job.is_seen == (token == "token")


def test_of_a_long_log_the_end_is_sent(tmp_path):
    log = tmp_path / "rank1.log"
    log.write_text("first\n" + "x" * LOG_BYTES + "\nlast")
    assert end_of(log).startswith("(the first 11 bytes are left out)\nx") and end_of(log).endswith("\nlast")
