"""Jobs of ranks that somebody else has started: both processes' parts, in two threads here, with ranks of their own."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from launch import status
from launch.elastic import Cluster
from launch.joined import Membership
from launch.place import Place


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
