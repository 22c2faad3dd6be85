"""How the tests themselves are run."""

import random
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from xdist.dsession import DSession

from tests.conftest import SurvivesCrashes

FATAL = "import os\ndef test_before(): pass\ndef test_fatal(): os._exit(1)\ndef test_after(): pass\n"


def run(folder: Path, *options: str, **env: str) -> str:
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    env = {"PATH": "/usr/bin:/bin", **env}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.slow
def test_a_worker_that_dies_fails_one_test_and_the_others_run(tmp_path):
    (tmp_path / "test_a.py").write_text(FATAL)
    for name in "bcd":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    said = run(tmp_path, "-n", "2", "--dist", "loadfile")
    assert "crashed while running" in said
    assert "1 failed, 8 passed" in said


class Worker:
    """A process of xdist, as its scheduler sees it. A test named `fatal` ends it."""

    def __init__(self, number: int, tests: list[str], ran: list[str]) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}", spec=SimpleNamespace(id=f"gw{number}"))
        self.tests, self.ran = tests, ran
        self.told: deque[int | None] = deque()
        self.shutting_down = self.dead = False
        self.workeroutput = {"exitstatus": 0, "shouldfail": False, "shouldstop": False}
        self.events = self.work()  # None: it waits for the scheduler

    def send_runtest_some(self, indices):
        if self.dead:
            raise OSError("cannot send")
        self.told.extend(indices)

    def shutdown(self):
        self.told.append(None)
        self.shutting_down = True

    def work(self):
        yield "workerready", {"workerinfo": {}}
        yield "collectionfinish", {"ids": self.tests}
        test = yield from self.next()
        while test is not None:
            following = yield from self.next()  # a test runs when the next one is known
            if "fatal" in self.tests[test]:
                self.dead = True
                yield "errordown", {"error": "died"}
                return
            self.ran.append(self.tests[test])
            yield "runtest_protocol_complete", {"item_index": test, "duration": 0.0}
            test = following
        yield "workerfinished", {}

    def next(self):
        while not self.told:
            yield None
        return self.told.popleft()


def session(names: str, seed: int) -> tuple[list[str], list[str]]:
    """Tests that ran, and those that ended their worker: of files `names` (a has a fatal test), in an order of chance."""
    tests = [f"test_{name}.py::{test}" for name in names for test in (("one", "fatal", "two") if name == "a" else ("one", "two"))]
    asked = {"tx": ["2*popen"], "maxfail": 0, "dist": "loadfile"}
    config = MagicMock(getvalue=asked.get)
    config.option.configure_mock(verbose=-1, maxworkerrestart=None, numprocesses=2, loadscopereorder=False, debug=False)
    config.pluginmanager.getplugin.return_value = None
    ran: list[str] = []
    crashed: list[str] = []
    workers: list[Worker] = []

    def start(*_):
        workers.append(Worker(len(workers), tests, ran))
        control._active_nodes.add(workers[-1])

    control = DSession(config)
    control._session, control.sched, control.shouldstop = MagicMock(), SurvivesCrashes(config, MagicMock()), False
    control._clone_node, control.handle_crashitem = start, lambda test, _: crashed.append(test)
    start(), start()
    chance, idle = random.Random(seed), set()
    while not control.session_finished:
        assert len(idle) < len(workers) or not control.queue.empty(), f"all wait: {names}, {seed}"
        turn = chance.randrange(len(workers) + 1)
        if turn == len(workers):
            if not control.queue.empty():
                control.loop_once()
                idle = {n for n in idle if not workers[n].told}
        elif (event := next(workers[turn].events, None)) is None:
            idle.add(turn)
        else:
            control.queue.put((event[0], {"node": workers[turn], **event[1]}))
    return sorted(ran), crashed


@pytest.mark.parametrize("names", ["abcd", "abcdefgh", "bcdefa"])
def test_no_worker_waits_for_ever_in_whatever_order_workers_die_start_and_end(names):
    for seed in range(50):
        ran, crashed = session(names, seed)
        assert crashed == ["test_a.py::fatal"]
        assert ran == sorted(f"test_{name}.py::{test}" for name in names for test in ("one", "two"))
