"""Submitted jobs: what is asked for and what is refused, and the batch script."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from analysis.load import load_run
from experiments import compare, jobs, train
from experiments.job import record, submission
from hydra_plugins import _mdcs_jobs
from hydra_plugins.mdcs_slurm import CODE, MdcsSlurmConf, check, script, snapshot
from launch import status
from tests.experiments import one_process
from tests.hydra_plugins import slurm_cluster

ROOT = Path(__file__).resolve().parents[2]
ASKED = MdcsSlurmConf(
    nodes=2, ranks_per_node=4, cpus_per_task=8, gpus_per_node="a100:4", mem="64G", partition="large", constraint="a100&ib",
    exclude="n[3,7]", exclusive=True, dependency="after:99", job_name="curve", comment="of ours: today", reservation="ours",
    time="1-12", cpu_bind="cores", gpu_bind="closest", container="apptainer exec --nv image.sif", python="python3.12",
    modules=["cuda/12"], env={"NCCL_DEBUG": "INFO it"}, setup=["ulimit -l unlimited"], sbatch={"licenses": "x"},
    srun_args=["--mpi=pmix"], parallel=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (MdcsSlurmConf(nodes=0), "hydra.launcher.nodes: must be >= 1, got 0"),
        (MdcsSlurmConf(env={"A-B": "1"}), "hydra.launcher.env: A-B is no name of a variable"),
        (MdcsSlurmConf(sbatch={"--wrap": "1"}), "hydra.launcher.sbatch: --wrap is no name of a long option of sbatch"),
        (MdcsSlurmConf(comment="a\n#SBATCH -N 9"), "hydra.launcher.comment: must be one line, got 'a\\n#SBATCH -N 9'"),
        (MdcsSlurmConf(env={"A": "1\n2"}), "hydra.launcher.env: must be one line, got '1\\n2'"),
        (MdcsSlurmConf(setup=["a\nb"]), "hydra.launcher.setup: must be one line, got 'a\\nb'"),
    ],
)
def test_what_cannot_be_is_one_line_with_its_key(asked, line):
    with pytest.raises(ValueError) as error:
        check(asked)
    assert str(error.value) == line


def test_a_job_of_slurm_is_known_until_it_has_ended(tmp_path, monkeypatch):
    _mdcs_jobs._queue.cache_clear()
    program(tmp_path, monkeypatch, "squeue", "printf '7_0|PENDING|Priority\\n7_3|RUNNING|None\\n'")
    for number, state in (("7_0", "pending (Priority)"), ("7_1", ""), ("7_2", ""), ("7_3", "running")):
        _mdcs_jobs.write(tmp_path, _mdcs_jobs.Job(number, "logs"))
        assert _mdcs_jobs.state(tmp_path) == state
    program(tmp_path, monkeypatch, "squeue", "[[ -z $SQUEUE_STATES ]] && printf '8|PENDING|Priority\\n'")
    monkeypatch.setenv("SQUEUE_STATES", "all")
    _mdcs_jobs.write(tmp_path, _mdcs_jobs.Job("8", "logs"))
    assert _mdcs_jobs.state(tmp_path) == "pending (Priority)"  # submitted within a second after SLURM was asked
    program(tmp_path, monkeypatch, "squeue", "exit 1")
    _mdcs_jobs._queue.cache_clear()
    assert _mdcs_jobs.state(tmp_path) == "unknown"


SRUN = """
while [[ $1 = --* ]]; do [[ $1 = --output=* ]] && out=${1#*=}; shift; done
"$@" >${out/\\%t/0}
"""
SBATCH = """
script=$(cat); last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' <<<"$script")
export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID
for SLURM_ARRAY_TASK_ID in $(seq 0 ${last:-0}); do bash -c "$script" >/dev/null 2>&1; done
echo 7
"""
"""An srun that starts one rank, and an sbatch that runs jobs at once."""


def commands(folder: Path, *names: str) -> list[Path]:
    """Folders of jobs of which each prints its name."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / _mdcs_jobs.COMMAND).write_text(f"-c 'print(\"job {name}\")'")
    return [folder / name for name in names]


def test_all_that_is_asked_for_is_in_the_script(tmp_path):
    check(ASKED)
    first = _mdcs_jobs.Job("7", "")
    text = script(ASKED, Path("/shared/my code"), tmp_path / "submitted", commands(tmp_path, "0", "1"), [first], resumes=True)
    lines = text.splitlines()
    for line in (
        "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8", "--gpus-per-node=a100:4", "--mem=64G", "--time=1-12",
        "--partition=large", "--constraint='a100&ib'", "--exclude='n[3,7]'", "--exclusive", "--job-name=curve",
        "--comment='of ours: today'", "--reservation=ours", "--licenses=x", "--array=0-1%3", "--requeue", "--signal=USR1@90",
        "--dependency=after:99,afterok:7", "--kill-on-invalid-dep=yes", f"--output={tmp_path / 'submitted/%A_%a.log'}",
    ):  # fmt: skip
        assert f"#SBATCH {line}" in lines
    for line in ("module load cuda/12", "export NCCL_DEBUG='INFO it'", "ulimit -l unlimited", "code='/shared/my code'"):
        assert line in lines
    [run] = [line for line in lines if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1 --open-mode=append --cpus-per-task=8 --cpu-bind=cores --gpu-bind=closest --mpi=pmix" in run
    assert run.endswith('--output="$logs/rank-%t.log" apptainer exec --nv image.sif python3.12 -u "${command[@]}"')
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    never = script(MdcsSlurmConf(requeue=False), None, tmp_path, [tmp_path / "0"], resumes=True)
    assert "#SBATCH --no-requeue" in never  # whatever the cluster's usual is
    assert "MDCS_REQUEUE" not in never and "--signal" not in never
    assert "PYTHONPATH" not in never and "--array" not in never and "dependency" not in never


def test_the_script_runs_its_jobs_command_and_leaves_output_and_exit_code(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "srun", SRUN)
    folders = commands(tmp_path, "a b", "1")
    (folders[1] / _mdcs_jobs.COMMAND).write_text("-c 'exit(3)'")
    text = script(MdcsSlurmConf(), tmp_path, tmp_path / "logs", folders, resumes=False)
    for i, code in ((0, 0), (1, 3)):
        env = os.environ | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(i)}
        assert subprocess.run(["bash", "-c", text], env=env, check=False).returncode == code
        assert _mdcs_jobs.exit_code(folders[i]) == code
    assert (tmp_path / "logs/7_0/rank-0.log").read_text() == "job a b\n"
    _mdcs_jobs.write(folders[1], _mdcs_jobs.Job("7_1", "logs/7_1"))
    assert _mdcs_jobs.failure(folders[1]) == "job 7_1 has ended with exit code 3; the output of its ranks is in logs/7_1"


def test_of_a_job_that_was_ended_from_outside_slurm_says_how_and_it_has_failed_in_its_files_too(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "squeue", "[[ $* = '-h -t all -o %T -j 7_1' ]] && echo CANCELLED")
    _mdcs_jobs.write(tmp_path, _mdcs_jobs.Job("7_1", "logs/7_1"))
    assert _mdcs_jobs.failure(tmp_path) == "job 7_1 has ended: SLURM says CANCELLED; the output of its ranks is in logs/7_1"
    (tmp_path / "metrics.jsonl").write_text('{"event": "job", "schema": 3}\n{"event": "step", "st')
    record.write(tmp_path, "of a job", record.RUNNING)
    said = submission.settled(tmp_path, waited=True)
    assert said.startswith("job 7_1 has ended: SLURM says CANCELLED; ") and load_run(tmp_path).reason == said
    assert (record.read(tmp_path).state, record.read(tmp_path).reason) == (record.FAILED, said)
    (tmp_path / _mdcs_jobs.EXIT_CODE).write_text("137")
    assert "has ended with exit code 137: SLURM says CANCELLED; " in _mdcs_jobs.failure(tmp_path)


def program(folder: Path, monkeypatch, name: str, does: str) -> None:
    """Put a program on the path."""
    (folder / name).write_text(f"#!/bin/bash\n{does}\n")
    (folder / name).chmod(0o755)
    if not os.environ["PATH"].startswith(str(folder)):
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_jobs_run_the_code_as_it_was_when_they_were_submitted(tmp_path, monkeypatch):
    """A sweep that is repeated after a bug was fixed runs the fixed code, and jobs that wait what they were submitted with."""
    checkout = tmp_path / "checkout"
    for name in CODE:
        (checkout / name / "__pycache__").mkdir(parents=True)
        (checkout / name / "module.py").write_text("wrong")
    monkeypatch.setattr("hydra_plugins.mdcs_slurm.ROOT", checkout)
    before = snapshot(tmp_path / "code")
    assert snapshot(tmp_path / "code") == before and not list(before.rglob("__pycache__"))
    (checkout / "mdcs/module.py").write_text("right")
    after = snapshot(tmp_path / "code")
    assert [(each / "mdcs/module.py").read_text() for each in (before, after)] == ["wrong", "right"]
    assert sorted((tmp_path / "code").iterdir()) == sorted([before, after])


def common(folder: Path) -> tuple[str, ...]:
    each = ("run.unmeasured_steps=1", "hydra.launcher.ranks_per_node=2", "hydra.launcher.parallel=1")
    return ("-m", "hydra/launcher=mdcs_slurm", "model=mlp", "data=synthetic", *each, f"hydra.sweep.dir={folder / 'sweep'}")


def test_jobs_that_sbatch_refuses_are_one_line(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "sbatch", "echo 'sbatch: error: invalid partition specified: ours' >&2; exit 1")
    refused = one_process.call(train, tmp_path, *common(tmp_path), "run.name=a,b")
    line = "config: hydra.launcher: sbatch refuses the jobs: sbatch: error: invalid partition specified: ours"
    assert refused.stderr.splitlines()[-1] == line and refused.returncode == 2


@pytest.fixture
def accepted(tmp_path, monkeypatch):
    """A SLURM that accepts all jobs and whose jobs end at once. It returns the scripts that sbatch got."""
    program(tmp_path, monkeypatch, "sbatch", 'echo x >>"$0.calls"; n=$(wc -l <"$0.calls"); cat >"$0.asked.$n"; echo $n')
    for name in ("squeue", "sacct", "scancel"):
        program(tmp_path, monkeypatch, name, f'echo "$@" >>{tmp_path}/{name}.calls')
    return lambda: [file.read_text() for file in sorted(tmp_path.glob("sbatch.asked.*"))]


def submit(folder: Path, *overrides: str) -> tuple[str, int]:
    """Output of a sweep that nobody waits for, and the number of runs in its folder."""
    done = one_process.call(train, folder, *common(folder), "hydra.launcher.wait=false", *overrides)
    assert done.returncode == 0, done.stderr
    assert f" not ended: mdcs jobs {folder / 'sweep'} shows them" in done.stdout or "submitted: " not in done.stdout
    return done.stdout, len(list((folder / "sweep").glob("*/status.json")))


def test_nodes_and_what_else_a_job_asks_for_belong_to_a_runs_identity(tmp_path, accepted):
    """On four nodes the runs of two nodes are not shown in place of new ones; another time limit makes no run another."""
    assert submit(tmp_path, "hydra.launcher.nodes=2")[1] == 1
    assert yaml.safe_load((tmp_path / "sweep/0/frozen.yaml").read_text())["cluster"]["ranks"] == 4
    done = record.read(tmp_path / "sweep/0")
    record.write(tmp_path / "sweep/0", done.identity, record.OK)

    out, runs = submit(tmp_path, "hydra.launcher.nodes=4")
    assert "not run again" not in out and runs == 2
    said, there = submit(tmp_path, "hydra.launcher.nodes=2", "hydra.launcher.time=7")
    assert "0: ok, not run again" in said and there == 2
    for asked in ("hydra.launcher.constraint=a100", "+hydra.launcher.env.NCCL_ALGO=Ring"):
        runs += 1
        said, there = submit(tmp_path, "hydra.launcher.nodes=2", asked)
        assert there == runs and re.search(r"^\d: another hydra.launcher.\w+ .*than then, runs again elsewhere", said, re.M)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("hydra/launcher=basic", "hydra.launcher.ranks_per_node: is for hydra/launcher=mdcs_slurm"),
        ("hydra.launcher.partiton=a", "hydra.launcher.partiton: no such key; did you mean hydra.launcher.partition?"),
        ("hydra.launcher.nodes=two", "hydra.launcher.nodes: Value 'two' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path, asked, line):
    done = one_process.call(train, tmp_path, *common(tmp_path), *asked.split())
    assert (done.returncode, done.stderr) == (2, line + "\n")


def test_other_ranks_than_the_launcher_starts_are_refused(tmp_path):
    refused = one_process.call(train, tmp_path, *common(tmp_path), "hydra.launcher.nodes=3", "cluster.ranks=2")
    said = refused.stderr.splitlines()
    assert refused.returncode == 2 and said[0].startswith("cluster.ranks: must be 6, as many as are started; got 2 (job ")
    assert not list(tmp_path.rglob("frozen.yaml"))


def test_one_job_is_submitted_without_m_and_a_comparison_is_the_program_itself(tmp_path, accepted, monkeypatch):
    asked = (*common(tmp_path)[1:], "hydra.launcher.wait=false")
    assert one_process.call(train, tmp_path, *asked).returncode == 0
    monkeypatch.setitem(sys.modules, "__main__", compare)
    assert one_process.call(compare, tmp_path, *asked, "compare.rounds=3").returncode == 0
    jobs, comparison = accepted()
    assert "--array" not in jobs + comparison and f"experiments.job.submission {tmp_path / 'sweep/0'}" in jobs
    assert 'command=("$code"/experiments/compare.py ' in comparison and "compare.rounds=3" in comparison
    [code] = (tmp_path / "sweep/code").iterdir()
    assert f"code={code}\n" in comparison and "MDCS_REQUEUE" in jobs and "MDCS_REQUEUE" not in comparison


def dependency(script: str) -> str:
    return next((line.partition("=")[2] for line in script.splitlines() if line.startswith("#SBATCH --dependency=")), "")


def test_one_job_measures_the_profile_before_the_array_of_those_that_need_it(tmp_path, accepted):
    """A wider sweep later, with the profile there, has none of it; a single job measures its own."""
    out, _ = submit(tmp_path, "strategy=dp,fsdp", "hydra.launcher.dependency='after:99'")
    first, jobs = accepted()
    assert "submitted first, as the others need its profile: 1\n" in out and "submitted: 2_0, 2_1" in out
    assert "--array" not in first and dependency(first) == "after:99"
    assert "#SBATCH --array=0-1%1" in jobs and dependency(jobs) == "after:99,afterok:1"
    [measured] = (tmp_path / "sweep/profiles").iterdir()
    assert {*_mdcs_jobs.before(tmp_path / "sweep/0"), *_mdcs_jobs.before(tmp_path / "sweep/1")} == {measured}

    (measured / "profile.json").write_text("{}")
    submit(tmp_path, "strategy=dp,fsdp,zero2,sdp")
    assert [dependency(script) for script in accepted()[2:]] == [""] and not (measured / _mdcs_jobs.COMMAND).exists()
    submit(tmp_path, "strategy=dp,fsdp", "sweep.force=true")
    assert [dependency(script) for script in accepted()[3:]] == ["", "afterok:4"]
    submit(tmp_path, "strategy=dp", "data.batch_size=3")
    assert [dependency(script) for script in accepted()[5:]] == [""]


def test_a_sweep_of_more_jobs_than_an_array_may_have_is_several_arrays(tmp_path, monkeypatch, accepted):
    program(tmp_path, monkeypatch, "scontrol", "printf 'MaxArraySize            = 3\nMaxJobCount = 2\n'")
    out, _ = submit(tmp_path, "run.name=a,b,c,d")
    first, *arrays = accepted()
    assert "--array" not in first and "submitted: 2_0, 2_1, 2_2, 3; logs are in" in out
    assert [dependency(script) for script in arrays] == ["afterok:1"] * 2
    assert "#SBATCH --array=0-2%1\n" in arrays[0] and "--array" not in arrays[1]
    assert _mdcs_jobs.read(tmp_path / "sweep/3").logs == str(tmp_path / "sweep/submitted/3")


def test_jobs_whose_profile_was_not_measured_have_failed_with_the_reason(tmp_path, accepted):
    """SLURM has removed them from the queue."""
    done = one_process.call(train, tmp_path, *common(tmp_path), "strategy=dp,fsdp")
    why = "job 1 has ended without an exit code; the output of its ranks is in"
    assert done.stderr.count(f"failed: the sweep's profile was not measured: {why} {tmp_path / 'sweep/submitted/1'}\n") == 2
    assert done.returncode == 1 and "2 of 2 jobs failed" in done.stderr


def test_a_node_that_is_lost_takes_no_processes_of_another_cluster_along(tmp_path):
    """Both clusters of this machine name their nodes alike."""
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    started: dict[str, list[subprocess.Popen[bytes]]] = {}
    try:
        for name in ("slurm", "slurm-2"):
            env = os.environ | {"SLURMD_NODENAME": "n1", "SLURM_CONF": f"{tmp_path / name}/slurm.conf"}
            started[name] = [subprocess.Popen([*waits, "-N", "n1", "-f", env["SLURM_CONF"]])]
            started[name].append(subprocess.Popen(waits, env=env))
        for name, processes in started.items():
            assert set(slurm_cluster.processes_of(tmp_path / name, "n1")) == {process.pid for process in processes}
    finally:
        for process in [*started.get("slurm", []), *started.get("slurm-2", [])]:
            process.kill()
            process.wait()


def test_jobs_of_a_sweep_are_shown_with_their_output(tmp_path, monkeypatch, capfd):
    _mdcs_jobs._queue.cache_clear()
    program(tmp_path, monkeypatch, "squeue", f"echo x >>{tmp_path}/asked; printf '7_0|RUNNING|None\\n7_1|PENDING|Priority\\n'")
    assert jobs.main([str(tmp_path)]) == 2 and "no job was submitted from here" in capfd.readouterr().err
    for folder, number in zip(commands(tmp_path, "0", "1", "2", "3"), ("7_0", "7_1", "7_2", "7_3"), strict=True):
        _mdcs_jobs.write(folder, _mdcs_jobs.Job(number, str(tmp_path / "submitted" / number)))
    (tmp_path / "2" / _mdcs_jobs.EXIT_CODE).write_text("0")
    (tmp_path / "3" / _mdcs_jobs.EXIT_CODE).write_text("1")
    record.write(tmp_path / "3", "", record.FAILED, "rank 1 failed")
    status.write(tmp_path / "0", status.Status(0, 1, 12, "backward", 0.0))
    assert jobs.main([str(tmp_path)]) == 0
    assert capfd.readouterr().out.replace(f"{tmp_path}/", "").splitlines() == [
        "  7_0          running            0: step 12 (backward)",
        "  7_1          pending (Priority) 1",
        "  7_2          ok                 2",
        "  7_3          failed (1)         3: rank 1 failed",
    ]
    assert (tmp_path / "asked").read_text() == "x\n"  # one question for all

    assert jobs.main([str(tmp_path), "--log", "9"]) == 2 and "no job 9; jobs: 0, 1, 2, 3" in capfd.readouterr().err
    assert jobs.main([str(tmp_path), "--log", "0:1"]) == 2 and "rank 1 of job 0 has written nothing" in capfd.readouterr().err
    (tmp_path / "submitted/7_0").mkdir(parents=True)
    (tmp_path / "submitted/7_0/rank-1.log").write_text("of rank 1")
    monkeypatch.setattr(os, "execvp", lambda name, command: capfd.readouterr() and pytest.fail(str(command)))
    with pytest.raises(pytest.fail.Exception, match=r"'tail', '-n', '40', '.*/submitted/7_0/rank-1.log'"):
        jobs.main([str(tmp_path), "--log", "0:1"])


def test_what_the_documentation_submits_and_shows(tmp_path, monkeypatch, capfd, accepted):
    text = (ROOT / "docs/cluster.md").read_text().replace("/shared", str(tmp_path)).replace("\\\n", " ")
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall("^mdcs .*", text, re.M)]
    monkeypatch.setattr(os, "execvp", lambda name, command: sys.exit(command))
    submits, *_ = [words for name, *words in commands if name == "train" and any("mdcs_slurm" in word for word in words)]
    done = one_process.call(train, tmp_path, *submits, "hydra.launcher.wait=false")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2" in accepted()[-1]
    for words in [words for name, *words in commands if name == "jobs"]:
        if "--log" not in words:
            assert jobs.main(words) == 0 and capfd.readouterr().out.count("\n") >= 3
            continue
        run, _, rank = words[words.index("--log") + 1].partition(":")
        log = Path(_mdcs_jobs.read(tmp_path / "sweep" / run).logs) / f"rank-{rank or 0}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        with pytest.raises(SystemExit) as ended:
            jobs.main(words)
        assert ended.value.code == ["tail", "-n", "40", *(["-F"] if "-f" in words else []), str(log)]


APP = """
import os, sys, hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    print(dict(config), flush=True)
    sys.exit(config.code)
main()
"""


def test_any_program_of_hydra_has_its_jobs_submitted(tmp_path, monkeypatch):
    """Its jobs are the program with one's overrides; it runs none of them itself."""
    for name, does in (("srun", SRUN), ("sbatch", SBATCH), ("squeue", "")):
        program(tmp_path, monkeypatch, name, does)
    (tmp_path / "app.py").write_text(APP)
    command = [sys.executable, "app.py", "-m", "hydra/launcher=mdcs_slurm", "+code=0,3", "+name='a b'", "hydra.sweep.dir=out"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "has ended with exit code 3" in done.stderr and "{'code'" not in done.stdout
    for code, log in ((0, 0), (3, 1)):
        job = _mdcs_jobs.read(tmp_path / f"out/{log}")
        assert (Path(job.logs) / "rank-0.log").read_text() == f"{{'code': {code}, 'name': 'a b'}}\n"


def test_sigterm_leaves_jobs_of_slurm_alone_and_ctrl_c_cancels_them(tmp_path, monkeypatch, accepted):
    program(tmp_path, monkeypatch, "squeue", f"touch {tmp_path}/waits; printf '1|RUNNING|None\\n2|RUNNING|None\\n'")
    (tmp_path / "app.py").write_text(APP)
    heard = ["env", "--default-signal=INT"]  # which the tests' own shell may ignore
    command = [*heard, sys.executable, "app.py", "-m", "hydra/launcher=mdcs_slurm", "+code=0", "hydra.sweep.dir=out"]
    for signum in (signal.SIGTERM, signal.SIGINT):
        (tmp_path / "waits").unlink(missing_ok=True)
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        waiting = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not (tmp_path / "waits").exists():
            assert waiting.poll() is None
            time.sleep(0.05)
        waiting.send_signal(signum)
        said = waiting.communicate(timeout=60)[1]
        if signum == signal.SIGTERM:
            assert waiting.returncode == 143 and f"the jobs go on: mdcs jobs {tmp_path / 'out'}" in said
            assert not (tmp_path / "scancel.calls").exists()
    assert (tmp_path / "scancel.calls").read_text() == "2\n"
