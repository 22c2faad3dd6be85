"""Ranks that are forks: what is imported stays from job to job, what a job does to its process does not; failures end one job."""

import os
from pathlib import Path

import pytest

from launch import elastic
from launch.elastic import Warm
from tests.launch.processes import wait_until_gone
from tests.launch.test_elastic import CLUSTER, assert_nothing_left


def told(warm: Warm, folder: Path, env: dict[str, str]) -> list[list[str]]:
    """By rank: who has forked it, whether the module was there, whether an earlier job has changed its environment."""
    assert warm.run(folder, CLUSTER, env, module="tests.launch.ranks.imports", arguments=[str(folder)]).ok
    return [(folder / f"told{rank}").read_text().split() for rank in (0, 1)]


def test_jobs_share_what_is_imported_and_nothing_else(tmp_path):
    with Warm() as warm:
        first, second, other = (
            told(warm, tmp_path / name, env) for name, env in (("a", {}), ("b", {}), ("c", {"OMP_NUM_THREADS": "1"}))
        )
    by = first[0][0]
    assert first == [[by, "False", "no"]] * 2 and second == [[by, "True", "no"]] * 2
    assert other[0][0] != by and other[0][1] == "False"
    assert wait_until_gone([int(by), int(other[0][0])], 30.0) == []


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("killed", "rank 1 was killed by SIGKILL at step 3"),
        pytest.param("raised", "rank 1 failed at step 3: ", marks=pytest.mark.slow),
        pytest.param("hung", "no rank has moved for ", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_fails_ends_alone_and_says_what_it_says_elsewhere(tmp_path, what, reason):
    with Warm() as warm:
        failed = warm.run(tmp_path, CLUSTER, {}, module="tests.launch.ranks.fail", arguments=[what, str(tmp_path)])
        assert not failed.ok and failed.reason.startswith(reason), failed
        assert_nothing_left(tmp_path)
        if what == "killed":
            assert warm.run(tmp_path / "next", CLUSTER, {}, module="tests.launch.ranks.succeed") == elastic.Outcome(ok=True)


def test_a_process_that_cannot_start_is_the_reason(tmp_path):
    with Warm() as warm:
        failed = warm.run(tmp_path, CLUSTER, {"PYTHONHOME": "/nowhere"}, module="tests.launch.ranks.succeed")
    assert not failed.ok and failed.reason.startswith("the launcher's agent ended with 1: ")


def test_a_program_that_is_interrupted_ends_its_ranks(tmp_path):
    pids = []

    def stop(statuses):
        pids[:] = [said.pid for said in statuses if said is not None and said.step]
        if len(pids) == 2:
            raise KeyboardInterrupt

    with Warm() as warm, pytest.raises(KeyboardInterrupt):
        warm.run(tmp_path, CLUSTER, {}, module="tests.launch.ranks.fail", arguments=["hung", str(tmp_path)], on_tick=stop)
    assert len(pids) == 2 and wait_until_gone(pids, 30.0) == []
    assert os.getpid() not in pids
