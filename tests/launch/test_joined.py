"""Jobs of ranks that somebody else has started: both processes' parts, in two threads here, with ranks of their own."""

import dataclasses
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from launch import status
from launch.elastic import Cluster
from launch.joined import _LOG_BYTES, Handed, Membership, _end_of, _Ranks, said_by
from launch.place import Place
from launch.status import Status


@pytest.fixture
def both(tmp_path):
    """(rank 0's part, the other's once it has ended: what it was handed, how it was told that jobs ended, its exit code)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    first, second = (Place(rank, 2, rank, 2, 1, "127.0.0.1", port, serves=rank == 0, starter="torchrun") for rank in (0, 1))
    folder = tmp_path / "rank1"
    folder.mkdir()

    def follow():
        handed, outcomes = [], []
        with Membership(second) as member:
            while not isinstance(job := member.receive(), int):
                handed.append(job.payload)
                outcomes.append(member.take_part(job, folder, {"MDCS_SAYS": job.payload}))
        return handed, outcomes, job

    lead = Membership(first)
    with ThreadPoolExecutor(1) as pool:
        yield lead, pool.submit(follow)


def run(lead, folder, what, **timeouts):
    payload = f"do {what}"
    return lead.run(
        folder, Cluster(2, **timeouts), {"MDCS_SAYS": payload}, payload=payload, module="tests.launch.ranks.told",
        arguments=[what],
    )  # fmt: skip


@pytest.mark.slow
def test_jobs_are_handed_out_and_their_end_is_told_to_all(tmp_path, both):
    """One that fails is followed by one that does not, in the same folder; only rank 0's has what stays."""
    lead, other = both
    folder = tmp_path / "job"
    with lead:
        raised = run(lead, folder, "raised")
        error = json.loads((folder / "rank1.error").read_text())
        killed = run(lead, folder, "killed")
        said = status.read(folder, 1)
        fine = run(lead, folder, "fine")
        lead.leave(7)
    handed, outcomes, code = other.result(30)
    assert handed == ["do raised", "do killed", "do fine"] and code == 7
    assert raised.reason == "rank 1 failed at step 3: ValueError: no such luck" and (raised.rank, raised.step) == (1, 3)
    assert error["message"] == "ValueError: no such luck"
    assert killed.reason == "rank 1 was killed by SIGKILL at step 3" and said.step == 3
    assert fine.ok and not list(folder.glob("rank1.error"))
    assert [(each.ok, each.reason) for each in outcomes] == [(each.ok, each.reason) for each in (raised, killed, fine)]
    assert (folder / "told0").read_text() == "do fine" and not (folder / "told1").exists()


@pytest.mark.parametrize("seen", [True, False])
def test_the_logs_of_all_ranks_are_in_the_jobs_folder(tmp_path, both, monkeypatch, seen):
    """Written there where the other host sees the folder, and else sent once the rank has ended, also of one that has failed."""
    if not seen:
        monkeypatch.setattr(Handed, "is_seen", False)
    lead, other = both
    with lead:
        for what in ("raised", "fine"):
            run(lead, tmp_path / what, what)
            said = [(tmp_path / what / f"rank{rank}.log").read_text() for rank in (0, 1)]
            assert [each.splitlines()[0] for each in said] == [f"rank {rank} was told: do {what}" for rank in (0, 1)]
            assert ("ValueError: no such luck" in said[1]) == (what == "raised")
        lead.leave(0)
    other.result(30)
    assert (tmp_path / "rank1/rank1.log").is_symlink() == seen


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
    assert _end_of(log).startswith("(the first 11 bytes are left out)\nx") and _end_of(log).endswith("\nlast")


class Quiet:
    """The store's line when ranks of `hosts` have said nothing for so many seconds."""

    def __init__(self, job, hosts, silent):
        said = {rank: dataclasses.asdict(Status(rank, 0, rank, "computing", 0.0)) for rank in hosts}
        self.heard = {
            said_by(job, rank): "1 " + json.dumps({"host": host, "status": said[rank], "code": None, "error": None})
            for rank, host in hosts.items()
        }  # fmt: skip
        self.silent = {said_by(job, rank): seconds for rank, seconds in silent.items()}

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
        line.heard[said_by(job, 1)] = "1 " + json.dumps({"host": "a", "status": said, "code": code, "error": None})
        ranks.poll()
        steps.append(status.read(tmp_path, 1).step)
    assert steps == [1, 1, 2, 2, 3, 3, 5]
