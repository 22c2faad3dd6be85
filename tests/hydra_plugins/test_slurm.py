"""Jobs that are handed in: what is asked for and what is refused, the script that can be printed, and jobs of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from analysis.events import read_events
from hydra_plugins._mdcs_slurm import MdcsLocalConf, MdcsSlurmConf, check, parameters, script, snapshot

ROOT = Path(__file__).resolve().parents[2]
ASKED = MdcsSlurmConf(
    nodes=2, ranks_per_node=4, cpus_per_node=8, gpus_per_node=4, mem_gb=1.5, partition="large", constraint="a100",
    modules=["cuda/12"], env={"NCCL_DEBUG": "INFO it"}, setup=["ulimit -l unlimited"], sbatch={"reservation": "ours"}, parallel=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (MdcsSlurmConf(nodes=0), "hydra.launcher.nodes: must be >= 1, got 0"),
        (MdcsSlurmConf(mem_gb=0), "hydra.launcher.mem_gb: must be > 0, got 0"),
        (MdcsSlurmConf(executor="pbs"), "hydra.launcher.executor: must be slurm or local, got pbs"),
        (MdcsLocalConf(partition="large"), "hydra.launcher.partition: has no effect without SLURM, got large"),
        (MdcsSlurmConf(env={"A-B": "1"}), "hydra.launcher.env: A-B is no name of a variable"),
    ],
)
def test_what_cannot_be_is_one_line_with_its_key(asked, line):
    with pytest.raises(ValueError) as error:
        check(asked)
    assert str(error.value) == line


def test_all_that_is_asked_for_reaches_submitit():
    check(ASKED)
    told = parameters(ASKED, Path("/shared/code"))
    assert (told["nodes"], told["tasks_per_node"], told["slurm_array_parallelism"]) == (2, 1, 3)
    assert told["slurm_srun_args"] == ["--kill-on-bad-exit=1", "--cpus-per-task=8"]


def test_the_script_is_what_one_would_write_by_hand(tmp_path):
    pytest.importorskip("submitit")
    text = script(ASKED, Path("/shared/code"), tmp_path / "submitted", tmp_path / "0")
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=8", "#SBATCH --gpus-per-node=4",
        "#SBATCH --mem=1536MB", "#SBATCH --partition=large", "#SBATCH --constraint=a100", "#SBATCH --reservation=ours",
        "module load cuda/12", "export NCCL_DEBUG='INFO it'", "ulimit -l unlimited", "cd /shared/code",
    ):  # fmt: skip
        assert line in text.splitlines()
    [run] = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1 --cpus-per-task=8" in run
    assert run.endswith(f"-m launch.node 4 experiments.job.frozen {tmp_path / '0'}")


def test_the_code_is_as_it_was_when_the_first_job_was_handed_in(tmp_path):
    code = snapshot(tmp_path / "code")
    file = code / "experiments/train.py"
    file.write_text("changed")
    assert snapshot(tmp_path / "code") == code and file.read_text() == "changed"
    assert (code / "conf/config.yaml").exists() and not list(code.rglob("__pycache__"))


@pytest.mark.slow
def test_jobs_of_this_machine_run_by_themselves_and_a_failed_rank_fails_job_and_sweep(tmp_path):
    pytest.importorskip("submitit")
    command = [
        sys.executable, str(ROOT / "experiments/train.py"), "-m", "hydra/launcher=mdcs_local", "hydra.launcher.ranks_per_node=2",
        "hydra.launcher.parallel=1", "+hydra.launcher.env.MDCS_WORKER=tests.experiments.stub_worker", "run.name=fine,raise",
        f"hydra.launcher.setup=['export PYTHONPATH=$PYTHONPATH:{ROOT}']", "run.steps=2", "run.warmup_steps=1",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    reason = "rank 1 failed before step 1 (planning): RuntimeError: the stub fails as told"
    assert done.returncode == 1, done.stderr
    assert f"failed: {reason} (its logs are in {tmp_path / 'sweep/1'})" in done.stderr
    ends = [read_events(tmp_path / f"sweep/{number}/metrics.jsonl")[-1] for number in (0, 1)]
    assert [end["event"] for end in ends] == ["summary", "failure"] and ends[1]["reason"] == reason
