"""Jobs of ranks that somebody else has started: rank 0's part here, with a rank of its own, and rank 1 in a process."""

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import status
from launch.elastic import Cluster
from launch.joined import Handed, Membership, _Ranks
from launch.place import Place
from launch.preemption import Terminated
from launch.serving import _LOG_BYTES, end_of
from launch.status import Status
from tests.launch.processes import wait_until_gone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def both(request):
    """(rank 0's part, the process of rank 1)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    first, second = (Place(rank, 2, rank, 2, 1, "127.0.0.1", port, serves=rank == 0, starter="torchrun") for rank in (0, 1))
    place, blind = json.dumps(dataclasses.asdict(second)), getattr(request, "param", [])
    command = [sys.executable, "-m", "tests.launch.follower", place, *blind]
    follower = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield Membership(first), follower
    finally:
        follower.kill()
        print(follower.communicate()[1])


def run(lead, folder, what, *, on_tick=lambda said: None, **timeouts):
    payload = f"do {what}"
    return lead.run(
        folder, Cluster(2, **timeouts), {"MDCS_SAYS": payload}, payload=payload, module="tests.launch.ranks.told",
        arguments=[what], on_tick=on_tick,
    )  # fmt: skip


@pytest.mark.slow
def test_jobs_are_handed_out_and_one_that_fails_is_followed_by_another(tmp_path, both):
    """In the same folder, of which only rank 0 has what stays. Rank 1 is one process all along, and new for each job."""
    lead, follower = both
    folder = tmp_path / "job"
    with lead:
        raised = run(lead, folder, "raised")
        error, said = json.loads((folder / "rank1.error").read_text()), status.read(folder, 1)
        hung = run(lead, tmp_path / "hung", "hung", timeout_s=10.0, startup_s=60.0)
        fine = run(lead, folder, "fine")
        again = run(lead, folder, "fine")
        lead.exit_code = 7
    assert follower.wait(30) == 7
    assert raised.reason == "rank 1 failed at step 3: ValueError: no such luck" and (raised.rank, raised.step) == (1, 3)
    assert error["message"] == "ValueError: no such luck" and (said.pid, said.step) == (follower.pid, 3)
    assert hung.reason.startswith("no rank has moved for 10 s: ") and "ranks/told.py" in (tmp_path / "hung/rank1.log").read_text()
    assert fine.ok and again.ok and not list(folder.glob("rank1.error"))
    assert (folder / "told0").read_text() == "do fine" and not (folder / "told1").exists()
    assert f"rank 1 is process {follower.pid}, and new" in (folder / "rank1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "step", "where"),
    [("killed", 3, ": rank 1 was at step 3 (all-reduce)"), ("killed at once", None, ", before it started")],
)
def test_a_rank_whose_process_is_killed_is_named_and_ends_all_jobs(tmp_path, both, what, step, where):
    """Torchrun and srun end the other processes then, too."""
    lead, follower = both

    def end(said):
        if follower.poll() is not None:
            raise Terminated

    with lead:
        killed, next_one = (run(lead, tmp_path / name, what, on_tick=end) for name in ("a", "b"))
    assert killed.reason.startswith("the process of rank 1") and killed.reason.endswith(f"ended without a word{where}")
    assert (killed.rank, killed.step, killed.lost) == (1, step, False) and next_one == killed


@pytest.mark.slow
def test_a_program_that_is_interrupted_ends_all_ranks(tmp_path, both):
    lead, follower = both

    def stop(said):
        if all(each is not None and each.step for each in said):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lead:
        run(lead, tmp_path, "hung", on_tick=stop)
    assert follower.wait(60) == 1 and wait_until_gone([status.read(tmp_path, 0).pid], 10.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("both", [[], ["blind"]], indirect=True)
def test_the_logs_of_all_ranks_are_in_the_jobs_folder(tmp_path, both):
    """Written there where the other host sees the folder, and else sent once the rank has ended, also of one that has failed."""
    lead, follower = both
    with lead:
        for what in ("raised", "fine"):
            run(lead, tmp_path / what, what)
            said = [(tmp_path / what / f"rank{rank}.log").read_text() for rank in (0, 1)]
            assert [each.splitlines()[0] for each in said] == [f"rank {rank} was told: do {what}" for rank in (0, 1)]
            assert ("ValueError: no such luck" in said[1]) == (what == "raised")
        lead.exit_code = 0
    assert follower.wait(30) == 0


def test_another_folder_of_the_same_name_is_not_the_jobs(tmp_path):
    job = Handed(0, "", "", (), 10.0, 0, str(tmp_path), "token")
    assert not job.is_seen
    (tmp_path / "launch.json").write_text('{"id": "another"}')
    assert not job.is_seen
    (tmp_path / "launch.json").write_text('{"id": "token"}')
    assert job.is_seen


def test_of_a_long_log_the_end_is_sent(tmp_path):
    log = tmp_path / "rank1.log"
    log.write_text("first\n" + "x" * _LOG_BYTES + "\nlast")
    assert end_of(log).startswith("(the first 11 bytes are left out)\nx") and end_of(log).endswith("\nlast")


class Quiet:
    """The store's line when ranks of `hosts` have said nothing for so many seconds."""

    def __init__(self, job, hosts, silent):
        said = {rank: dataclasses.asdict(Status(rank, 0, rank, "computing", 0.0)) for rank in hosts}
        self.heard = {
            job.said_by(rank): "1 " + json.dumps({"host": host, "status": said[rank], "code": None, "error": None})
            for rank, host in hosts.items()
        }  # fmt: skip
        self.silent = {job.said_by(rank): seconds for rank, seconds in silent.items()}

    def unchanged(self, key):
        return self.silent[key]


class Running:
    def poll(self):
        return None


@pytest.mark.parametrize("silent", [{1: 0.1, 2: 9.8, 3: 10.1}, {1: 0.1, 2: 10.1, 3: 9.8}])
def test_a_host_that_is_gone_is_named_with_all_its_ranks_whichever_spoke_last(tmp_path, silent):
    job = Handed(0, "", "", (), 10.0, 0)
    hosts = _Ranks(Quiet(job, {1: "a", 2: "b", 3: "b"}, silent), job, tmp_path, Cluster(4, timeout_s=10.0), Running())
    assert hosts.poll() == 1
    gone = hosts.gone()
    assert (gone.rank, gone.step) == (2, 2)
    assert gone.reason == (
        "host b has not answered for 10 s: rank 2 was at step 2 (computing), rank 3 was at step 3 (computing)"
    )


def test_a_process_that_has_ended_without_a_word_is_told_from_a_host_that_is_gone(tmp_path):
    """By connections that were closed: another rank has failed before the silence was as long as that of a host that is gone."""
    job = Handed(0, "", "", (), 60.0, 0)
    ranks = _Ranks(Quiet(job, {1: "a", 2: "a"}, {1: 4.0, 2: 0.1}), job, tmp_path, Cluster(3), Running())
    assert ranks.poll() is None and ranks.gone() is None
    gone = ranks.gone(ending=True)
    assert gone.reason == "the process of rank 1 on host a ended without a word: rank 1 was at step 1 (computing)"
    assert (gone.rank, gone.step, gone.lost) == (1, 1, False)


def test_a_running_ranks_steps_are_written_at_most_once_a_second_and_its_end_at_once(tmp_path, monkeypatch):
    job, line, now = Handed(0, "", "", (), 10.0, 0), SimpleNamespace(heard={}, unchanged=lambda key: 0.0), [100.0]
    monkeypatch.setattr("launch.joined.time.monotonic", lambda: now[0])
    ranks = _Ranks(line, job, tmp_path, Cluster(2), Running())
    steps = []
    for seconds, step, phase, code in (
        (0.0, 1, "training", None), (0.2, 2, "training", None), (0.4, 2, "evaluating", None), (0.6, 3, "evaluating", None),
        (1.5, 3, "evaluating", None), (1.6, 4, "evaluating", None), (1.7, 5, "evaluating", -9),
    ):  # fmt: skip
        now[0] = 100 + seconds
        said = dataclasses.asdict(Status(1, 0, step, phase, 0.0))
        line.heard[job.said_by(1)] = "1 " + json.dumps({"host": "a", "status": said, "code": code, "error": None})
        ranks.poll()
        steps.append(status.read(tmp_path, 1).step)
    assert steps == [1, 1, 2, 2, 3, 3, 5]
