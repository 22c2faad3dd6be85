"""`search.py` asks Optuna, measures, prunes with reasons, and goes on where it was."""

import math
import os

import optuna
import pytest

from analysis.events import METRICS
from experiments import search as program
from experiments.job.tracking import JsonLines
from launch.claim import claim
from launch.elastic import Outcome
from mdcs.sizes import MIB
from tests.experiments import one_process, stub_slurm

SMALL = ("model=mlp", "data=synthetic", "strategy=greedy", "budget=0.5GiB")


@pytest.fixture
def ran(monkeypatch):
    """Instead of ranks: a step time that is least at 4 MiB, and two things that go wrong. The configs that ran."""
    ran = []

    def run(config, folder, console, *, known):
        ran.append(config)
        assert "HYDRA_FULL_ERROR" not in os.environ  # what jobs start inherits this
        if config.link.depth == 3:
            return Outcome(False, "rank 1 failed: as told")
        bucket = getattr(config.scheduler, "bucket_mib", None)
        step_s = 9.0 if bucket is None else 1 + abs(math.log2(bucket) - 2)
        over = (config.budget.schedule_share or 0) > 0.5
        folder.mkdir(parents=True)
        with JsonLines(folder / METRICS) as metrics:
            metrics.write({"event": "job", "schema": 3, "budget_bytes": 512 * MIB})
            metrics.write({"event": "step", "step": 1, "step_s": step_s})
            metrics.write({"event": "summary", "status": "ok", "peak_bytes": 600 * MIB, "fits": not over})
        return Outcome(True)

    monkeypatch.setattr(program.jobs, "run", run)
    return ran


def search(folder, *arguments: str, start=one_process.run):
    folder.mkdir(exist_ok=True)
    return one_process.call(
        program, folder, *arguments, "hydra.run.dir=.", worker="tests.experiments.hasty_worker", start=start
    )  # fmt: skip


def study(folder) -> optuna.Study:
    return optuna.load_study(storage=f"sqlite:///{folder / program.STUDY}", study_name="mdcs")


@pytest.mark.slow
def test_the_search_finds_the_bucket_prunes_with_reasons_and_goes_on(tmp_path, ran):
    assert search(tmp_path, *SMALL, "search.trials=4").returncode == 0
    assert len(ran) == 4
    done = search(tmp_path, *SMALL, "search.trials=6")
    assert done.returncode == 0 and len(ran) == 6  # those of before are not run again
    trials = study(tmp_path).trials
    assert all("scheduler.bucket_mib" in t.params or "scheduler.block_mib" in t.params for t in trials)
    assert not any("scheduler.bucket_mib" in t.params and "scheduler.block_mib" in t.params for t in trials)
    reasons = {t.user_attrs["reason"] for t in trials if t.state == optuna.trial.TrialState.PRUNED}
    assert reasons == {"rank 1 failed: as told", "peak of 600.0 MiB, over the budget of 512.0 MiB"}
    best = study(tmp_path).best_trial
    assert best.params["scheduler"] == "fusion" and best.value < 9 and best.params["link.depth"] != 3
    bucket = f"scheduler.bucket_mib={best.params['scheduler.bucket_mib']:.6g}"
    first = next(line for line in done.stdout.splitlines() if bucket in line)
    assert first.split()[0] == str(best.number)
    assert len((tmp_path / program.TABLE).read_text().splitlines()) == 7


def test_axes_of_one_s_own_are_lists_of_the_command_line(tmp_path, ran):
    axes = ("link.depth=int(interval(1,2))", "optimizer=adam,sgd")
    assert search(tmp_path, *SMALL, "budget.schedule_share=0.5", *axes, "search.trials=3").returncode == 0
    assert all(set(trial.params) == {"link.depth", "optimizer"} for trial in study(tmp_path).trials)
    done = search(tmp_path, *SMALL, "link.depth=range(1,4)", "search.trials=4")
    assert done.returncode == 2 and done.stderr.startswith("hydra.run.dir: ") and "has a study of something else: " in done.stderr
    with claim(tmp_path):  # another would end the trial that this one runs
        done = search(tmp_path, *SMALL, "budget.schedule_share=0.5", *axes, "search.trials=4")
    assert done.returncode == 2 and f"hydra.run.dir: {tmp_path} is in use by a job of process " in done.stderr
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["scheduler.bucket_mib=1,2"], "scheduler.bucket_mib: no such key of scheduler=wfbp; it has none"),
        (["scheduler=fusion,dear", "scheduler.seed=1,2"], "scheduler.seed: no such key of scheduler=dear"),
        (["scheduler=fusion,daer"], "scheduler: no such option daer; options: "),
        (["link.depth=int(interval(0,2))"], "link.depth: must be >= 1, got 0"),
        (["budget=floor+10%", "budget.schedule_share=interval(0.5,2)"], "budget.schedule_share: must be <= 1, got 2"),
        (["search.over=[link.depth]"], "search.over: an axis is KEY=VALUE,VALUE, KEY=range(…) or KEY=interval(LOW,HIGH); got"),
        (["search.over=['link.depth=']"], "search.over: an axis is KEY=VALUE,VALUE"),
        (["search.over=['link.depth=interval(5,1)']"], "search.over: interval(LOW,HIGH) needs finite numbers, LOW below HIGH"),
        (["search.over=['link.depth=int(interval(2,2))']"], "search.over: interval(LOW,HIGH) needs finite numbers"),
        (["search.over=['link.depth=interval(1,inf)']"], "search.over: interval(LOW,HIGH) needs finite numbers"),
        (["search.over=['link.depth=1,2','link.depth=3,4']"], "search.over: has link.depth twice"),
        (["budget=-1GiB"], "budget: no such limit -1GiB; a limit is 40GiB, '75% of ddp', floor+10% or none"),
        (["curve.plane=2"], "curve.plane: is for mdcs curve"),
        (["budget=[1]"], "budget: takes names of options"),
        (["--trials=3"], "--trials=3: is search.trials=VALUE"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_one_line_before_the_first_trial(tmp_path, ran, arguments, line):
    done = search(tmp_path, "model=mlp", "data=synthetic", *arguments)
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count("\n") == 1
    assert not ran and not (tmp_path / program.STUDY).exists()


def test_whole_numbers_are_proposed_as_such_and_on_a_logarithmic_scale():
    axis, trial = program.Axis.parse("data.samples=int(interval(1000,5000000))"), optuna.create_study().ask()
    assert int(axis.suggest(trial).partition("=")[2]) >= 1000 and axis.ends == ("1000", "5000000")
    assert trial.distributions["data.samples"].log


def test_trials_are_submitted_several_at_a_time_behind_the_job_that_measures_their_profile(tmp_path, monkeypatch):
    stub_slurm.install(tmp_path / "slurm", monkeypatch)
    small = (*SMALL, "budget.schedule_share=interval(0,1)", "search.trials=3", "hydra/launcher=mdcs_slurm")
    done = search(tmp_path, *small, "hydra.launcher.parallel=2", "hydra.launcher.nodes=2", "hydra.sweep.dir=out")
    assert done.returncode == 0, done.stderr
    assert [trial.value for trial in study(tmp_path / "out/0").trials] == [0.25] * 3
    profile, two, one = [(tmp_path / f"slurm/script.{i}").read_text() for i in (1, 2, 3)]
    assert " profile " in profile and "--array=0-1%2" in two and "--dependency=afterok:1" in two
    assert "out/0/runs/2 train " in one and "--array" not in one
    assert "ranks: 2" in (tmp_path / "out/0/runs/2/frozen.yaml").read_text()

    done = search(tmp_path, *small, "hydra.launcher.wait=false", "hydra.sweep.dir=other")
    assert done.returncode == 2 and done.stderr.startswith("hydra.launcher.wait: must be true: a search waits for its trials\n")

    (tmp_path / "slurm/sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    done = search(tmp_path, *small, "hydra.sweep.dir=third")
    assert done.returncode == 2
    assert "hydra.launcher: sbatch refuses the jobs: sbatch: error: invalid partition" in done.stderr.splitlines()


def test_trials_none_of_which_can_be_composed_are_pruned_and_nothing_is_submitted(tmp_path, monkeypatch):
    stub_slurm.install(tmp_path / "slurm", monkeypatch)
    monkeypatch.setattr(program.Axis, "suggest", lambda axis, trial: f"{axis.key}=0")
    asked = ("link.depth=int(interval(1,2))", "search.trials=2", "hydra/launcher=mdcs_slurm", "hydra.sweep.dir=out")
    done = search(tmp_path, *SMALL, *asked)
    assert done.returncode == 1 and "failed: all trials were pruned" in done.stderr
    assert [trial.state for trial in study(tmp_path / "out/0").trials] == [optuna.trial.TrialState.PRUNED] * 2
    assert not list((tmp_path / "slurm").glob("script.*"))


@pytest.mark.slow
def test_real_trials(tmp_path, warm):
    tiny = ("model.layers=3", "model.block_mib=0.25", "model.forward_ms=1", "model.backward_ms=2", "run.steps=4",
            "run.unmeasured_steps=1", "run.profile_iterations=2")  # fmt: skip
    done = search(tmp_path, "experiment=search_timed", *tiny, "search.trials=3", start=warm.run)
    assert done.returncode == 0, done.stderr
    done = [trial for trial in study(tmp_path).trials if trial.value is not None]
    assert done and all(trial.value > 0.009 for trial in done)  # what computing takes
