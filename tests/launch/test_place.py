"""Places of ranks, as torchrun and srun say them, and what is none: nothing is ever taken for this machine."""

import pytest

from launch import place
from launch.place import NoPlace, Place

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "localhost,other", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1",
}  # fmt: skip


def test_a_process_that_nobody_made_a_rank_has_no_place():
    assert place.place({}) is None
    assert place.place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # the script of a job, and not a step
    assert place.place({**TORCHRUN, "MDCS_AGENT_PID": "1"}) is None  # a rank that a program of ours has started


def test_what_torchrun_says():
    joined = place.place(TORCHRUN)
    assert joined == Place(3, 4, 1, 2, 2, "10.77.0.1", 29500, serves=False, starter="torchrun")
    assert joined.environment() == {key: TORCHRUN[key] for key in TORCHRUN if key in joined.environment()}


def test_without_a_store_of_the_agents_the_first_rank_serves_one():
    alone = {key: value for key, value in TORCHRUN.items() if key != "TORCHELASTIC_USE_AGENT_STORE"}
    assert [place.place({**alone, "RANK": rank}).serves for rank in ("0", "1")] == [True, False]


def test_what_srun_says():
    first, last = place.place(SRUN), place.place({**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"})
    assert (first.rank, first.world, first.local, first.beside, first.hosts) == (0, 4, 0, 2, 2)
    assert (last.rank, last.local, last.port, last.address) == (3, 1, first.port, "127.0.0.1")
    assert (first.serves, last.serves) == (True, False)
    of = [{**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(7, 57) for step in range(100)]
    assert len({place.place(each).port for each in of}) == len(of)  # no two steps of jobs that may share a node


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({**SRUN, "SLURM_STEP_NODELIST": "no-such-host.invalid"}, "host no-such-host.invalid has no address here"),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty: the host of rank 0 is unknown"),
        ({**SRUN, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID must be a whole number, got x"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE must be a whole number, got nothing"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(said, complaint):
    with pytest.raises(NoPlace, match=complaint):
        place.place(said)


def test_the_loopback_does_not_lead_to_other_hosts():
    joined = place.place({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(NoPlace, match="this machine's loopback .127.0.0.1., which the ranks of 2 hosts do not share"):
        place.interface(joined)
    one = place.place({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "GROUP_WORLD_SIZE": "1"})
    assert place.interface(one) == ("lo", "127.0.0.1")


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN])
def test_a_program_that_starts_its_own_ranks_is_no_rank_and_one_of_them_says_so(environment, capsys):
    key = "RANK" if "RANK" in environment else "SLURM_PROCID"
    for rank in ("0", "3"):
        with pytest.raises(SystemExit) as ended:
            place.require_alone("compare.py", {**environment, key: rank})
        assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"compare.py: {'torchrun' if key == 'RANK' else 'srun'} has started it 4 times")


def test_a_program_that_was_started_once_or_by_a_program_of_ours_may_run():
    once = {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, {**TORCHRUN, "WORLD_SIZE": "1"}
    for environment in ({}, *once, {**TORCHRUN, "MDCS_AGENT_PID": "1"}):
        place.require_alone("compare.py", environment)
