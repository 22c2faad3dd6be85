"""Ranks in network namespaces of their own: they reach each other, and nothing is left of them, however they end."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from launch import elastic, network, status
from tests.launch.processes import launcher_of_ranks_that_hang, wait_until_gone

WHY_NOT = network.refusal(1.0)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=f"no shaped network: {WHY_NOT}")]

CLUSTER = elastic.Cluster(ranks=2, timeout_s=30.0, startup_s=60.0, rate_gbit=1.0)


def namespace(process: int | str) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except OSError:  # it has ended, or is another user's
        return ""


def parent(process: int) -> int:
    """0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Seen:
    """The ranks of a job while it runs, and their namespaces, that of the holder included."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.interfaces = set(os.listdir("/sys/class/net"))
        self.ranks: list[int] = []
        self.holder = 0
        self.namespaces: set[str] = set()

    def look(self, said) -> None:
        if all(said) and not self.ranks:
            self.ranks = [each.pid for each in said]
            self.holder = parent(self.ranks[0])
            self.namespaces = {namespace(pid) for pid in (self.holder, *self.ranks)}
            (self.folder / "seen").touch()

    def assert_nothing_left(self) -> None:
        assert len(self.namespaces) == 3 and not self.namespaces & {"", namespace("self")}
        assert wait_until_gone([self.holder, *self.ranks], 10.0) == []
        deadline = time.monotonic() + 10
        while self.left() and time.monotonic() < deadline:  # a namespace that is empty goes a moment later
            time.sleep(0.05)
        assert self.left() == []
        assert set(os.listdir("/sys/class/net")) == self.interfaces

    def left(self) -> list[str]:
        return [file.name for file in Path("/proc").glob("[0-9]*") if namespace(file.name) in self.namespaces]


def run(seen: Seen, module: str, *arguments: str) -> elastic.Outcome:
    """A job whose ranks run `module` once they have been seen."""
    arguments = (str(seen.folder), module, *arguments)
    return elastic.run(seen.folder, CLUSTER, {}, module="tests.launch.ranks.seen", arguments=arguments, on_tick=seen.look)


def test_a_job_ends_well_and_each_rank_was_in_a_namespace_of_its_own(tmp_path):
    seen = Seen(tmp_path)
    outcome = run(seen, "tests.launch.ranks.succeed")
    assert outcome == elastic.Outcome(ok=True)
    assert json.loads((tmp_path / "launch.json").read_text())["env"]["GLOO_SOCKET_IFNAME"] == network.INTERFACE
    seen.assert_nothing_left()


def test_a_killed_rank_ends_the_job_with_its_name(tmp_path):
    seen = Seen(tmp_path)
    outcome = run(seen, "tests.launch.ranks.fail", "killed", str(tmp_path))
    assert (outcome.reason, outcome.rank, outcome.step) == ("rank 1 was killed by SIGKILL at step 3", 1, 3)
    seen.assert_nothing_left()
    children = [int(file.read_text()) for file in tmp_path.glob("child*")]
    assert len(children) == 2 and wait_until_gone(children, 30.0) == []


def test_a_network_that_is_lost_ends_the_job(tmp_path):
    seen, killed = Seen(tmp_path), []

    def kill_the_holder(said):
        seen.look(said)
        if seen.holder and (tmp_path / "ready").exists() and not killed:
            os.kill(seen.holder, signal.SIGKILL)
            killed.append(seen.holder)

    arguments = ["hung", str(tmp_path)]
    outcome = elastic.run(tmp_path, CLUSTER, {}, module="tests.launch.ranks.fail", arguments=arguments, on_tick=kill_the_holder)
    # Unless a rank's connection was gone before its agent was.
    assert not outcome.ok and outcome.reason.startswith(("the launcher's agent ended with -9", "rank "))
    seen.assert_nothing_left()


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path):
    seen = Seen(tmp_path)
    launcher = launcher_of_ranks_that_hang(tmp_path, "rate_gbit=1.0")
    seen.look([status.read(tmp_path, rank) for rank in (0, 1)])
    assert parent(seen.holder) == launcher.pid
    launcher.kill()
    launcher.wait(30)
    assert wait_until_gone([int(file.read_text()) for file in tmp_path.glob("child*")], 30.0) == []
    seen.assert_nothing_left()
