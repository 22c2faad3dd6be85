"""Jobs that succeed and jobs that fail in each way a rank can fail: the reason, in time, and nothing left
running.
"""

import contextlib
import ipaddress
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from launch import elastic, status
from tests.launch.processes import assert_gone, launcher_of_ranks_that_hang, wait_until_gone
from tests.mdcs.profiles import few

TIMEOUT_S = 4.0
CLUSTER = elastic.Cluster(ranks=2, timeout_s=TIMEOUT_S, startup_s=60.0)


def fail(folder: Path, what: str, **kwargs) -> elastic.Outcome:
    return elastic.run(folder, CLUSTER, {}, module="tests.launch.ranks.fail", arguments=[what, str(folder)], **kwargs)


def assert_nothing_left(folder: Path) -> None:
    pids = [int(file.read_text()) for pattern in ("pid*", "child*") for file in folder.glob(pattern)]
    assert len(pids) == 4
    assert_gone(pids)


@pytest.mark.slow
def test_a_job_that_ends_well_where_an_earlier_one_did_not(tmp_path):
    leave(tmp_path, {1: 1}, [(1, 1.0, "no such luck")])
    status.StatusFile(tmp_path, 1).set(step=7, phase="all-reduce")
    (tmp_path / "rank1.log").write_text("why")
    assert not elastic.outcome_of(tmp_path, CLUSTER, 1, None).ok
    seen = []
    env = {"MDCS_SAYS": "hello"}
    cluster = elastic.Cluster(ranks=2)  # its timeout is generous: nothing here hangs
    outcome = elastic.run(tmp_path, cluster, env, module="tests.launch.ranks.succeed", on_tick=seen.append)
    assert outcome == elastic.Outcome(ok=True)
    for rank in (0, 1):
        assert f"the end of rank {rank}, hello" in (tmp_path / f"rank{rank}.log").read_text()
    assert [said.step for said in seen[-1]] == [3, 3]
    kept = tmp_path / "attempts" / "1"
    assert (kept / "rank1.log").read_text() == "why" and "no such luck" in (kept / "rank1.error").read_text()


@pytest.mark.slow
def test_a_job_listens_on_the_loopback_alone(tmp_path):
    outcome = elastic.run(tmp_path, CLUSTER, {}, module="tests.launch.ranks.listen", arguments=[str(tmp_path)])
    assert outcome == elastic.Outcome(ok=True)
    loopback = f"{int.from_bytes(ipaddress.ip_address('127.0.0.1').packed, sys.byteorder):08X}"
    for rank in (0, 1):
        addresses = (tmp_path / f"listening{rank}").read_text().split()
        assert len(addresses) >= 2  # the agent's store, and gloo
        assert set(addresses) == {loopback}
    assert json.loads((tmp_path / "launch.json").read_text())["env"]["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("what", "reason"),
    few(
        [
            ("killed", "rank 1 was killed by SIGKILL at step 3"),
            ("raised", "rank 1 failed at step 3: ValueError: no such luck"),
            ("exited", "rank 1 exited with 3 at step 3"),
        ]
    ),
)
def test_the_reason_is_the_first_failure_and_not_what_it_caused(tmp_path, what, reason):
    outcome = fail(tmp_path, what)
    assert (outcome.reason, outcome.rank, outcome.step) == (reason, 1, 3)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_by_its_timeout_and_names_who_was_where(tmp_path):
    outcome = fail(tmp_path, "hung")
    assert outcome.reason == "no rank has moved for 4 s: rank 0 at step 3 (all-reduce), rank 1 at step 3 (all-reduce)"
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_worker_that_cannot_be_imported(tmp_path):
    outcome = elastic.run(tmp_path, CLUSTER, {}, module="tests.launch.ranks.missing")
    assert not outcome.ok
    assert "failed before step 1 (starting): ImportError" in outcome.reason


def test_an_agent_that_cannot_start_leaves_its_last_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    outcome = elastic.run(tmp_path, CLUSTER, {}, module="tests.launch.ranks.succeed")
    assert outcome.reason.startswith("the launcher's agent ended with 1: ")
    assert "it said nothing" not in outcome.reason


@pytest.mark.slow
def test_an_exception_of_the_caller_ends_the_ranks(tmp_path):
    def stop(said):
        if (tmp_path / "ready").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path, "hung", on_tick=stop)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGTERM))]
)
def test_a_launcher_that_dies_takes_the_ranks_along(tmp_path, signum):
    launcher = launcher_of_ranks_that_hang(tmp_path)
    children = [int(file.read_text()) for file in tmp_path.glob("child*")]
    launcher.send_signal(signum)
    assert launcher.wait(30) != 0
    try:
        ranks = [int(file.read_text()) for file in tmp_path.glob("pid*")]
        assert wait_until_gone(ranks, 30.0) == []
        assert wait_until_gone(children, 30.0) == []
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


# ---- how a reason is chosen, from what the ranks and the agent left


def leave(folder: Path, codes: dict[int, int], errors: list[tuple[int, float, str]] = ()) -> None:
    (folder / "agent0.json").write_text(json.dumps({"schema": 1, "exit_codes": codes}))
    for rank, when, message in errors:
        reason = {"schema": 1, "time": when, "rank": rank, "step": 7, "phase": "backward", "message": message}
        (folder / f"rank{rank}.error").write_text(json.dumps(reason))


def test_the_earliest_error_wins(tmp_path):
    leave(tmp_path, {0: 1, 1: 1}, [(0, 2.0, "Connection closed by peer"), (1, 1.0, "out of memory")])
    assert elastic.outcome_of(tmp_path, CLUSTER, 1, None).reason == "rank 1 failed at step 7: out of memory"


def test_one_that_tells_of_anothers_leaving_is_not_the_first(tmp_path):
    told = "message 3 (RS of h.0): Connection closed (rank 1 left the run in step 7: ZeroDivisionError: in backward)"
    leave(tmp_path, {0: 1, 1: 1}, [(0, 1.0, told), (1, 2.0, "ZeroDivisionError: in backward")])
    assert elastic.outcome_of(tmp_path, CLUSTER, 1, None).reason == "rank 1 failed at step 7: ZeroDivisionError: in backward"


@pytest.mark.parametrize(
    ("steps", "message", "named"),
    [
        ({1: 6, 2: 7}, "step 7: waited 4 s for RS of h.1", "; rank 1 reported nothing for 5 s, since step 6"),
        ({1: 7, 2: 7}, "step 7: waited 4 s for RS of h.1", "; ranks 1, 2 reported nothing for 5 s, since step 7"),
        ({1: 8, 2: 9}, "step 7: waited 4 s for RS of h.1", "; rank 1 reported nothing for 5 s, since step 8"),
        ({1: 6, 2: 7}, "Timed out waiting 4000ms for recv", "; rank 1 reported nothing for 5 s, since step 6"),
        ({1: 6, 2: 7}, "no space left on device", ""),
    ],
)
def test_who_was_waited_for_is_named(tmp_path, monkeypatch, steps, message, named):
    leave(tmp_path, {0: 1, 1: -signal.SIGTERM}, [(0, 105.0, message)])
    monkeypatch.setattr(status.time, "time", lambda: 100.0)
    for rank, step in steps.items():
        status.StatusFile(tmp_path, rank).set(step=step)
    cluster = elastic.Cluster(3, timeout_s=4.0)
    assert elastic.outcome_of(tmp_path, cluster, 1, None).reason == f"rank 0 failed at step 7: {message}{named}"


def test_a_rank_that_aborts_after_anothers_error_is_not_the_cause(tmp_path):
    leave(tmp_path, {0: -signal.SIGABRT, 1: 1}, [(1, 1.0, "out of memory")])
    assert elastic.outcome_of(tmp_path, CLUSTER, 1, None).rank == 1


def test_a_rank_that_aborts_alone_is_the_cause(tmp_path):
    status.StatusFile(tmp_path, 0).set(step=5)
    leave(tmp_path, {0: -signal.SIGABRT, 1: -signal.SIGTERM})
    assert elastic.outcome_of(tmp_path, CLUSTER, 1, None).reason == "rank 0 was killed by SIGABRT at step 5"
