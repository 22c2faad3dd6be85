"""`search.py` asks Optuna, measures, prunes with reasons, and goes on where it was."""

import argparse
import math
import sys

import optuna
import pytest

from analysis.events import METRICS
from experiments import search as program
from experiments.job.tracking import JsonLines
from launch import elastic
from launch.claim import claim
from launch.elastic import Outcome
from mdcs.sizes import MIB

SMALL = ("model=mlp", "data=synthetic", "strategy=greedy", "budget.gib=0.5")


@pytest.fixture
def ran(monkeypatch):
    """Instead of ranks: a step time that is least at 4 MiB, and two things that go wrong. The configs that ran."""
    ran = []

    def run(config, folder, console, *, known, worker):
        ran.append(config)
        if config.link.depth == 3:
            return Outcome(False, "rank 1 failed: as told")
        bucket = getattr(config.scheduler, "bucket_mib", None)
        step_s = 9.0 if bucket is None else 1 + abs(math.log2(bucket) - 2)
        over = (config.budget.schedule_share or 0) > 0.5
        folder.mkdir(parents=True)
        with JsonLines(folder / METRICS) as metrics:
            metrics.write({"event": "job", "schema": 2, "budget_bytes": 512 * MIB})
            spread = {"median": step_s, "p10": step_s, "p90": step_s}
            metrics.write({"event": "summary", "status": "ok", "step_s": spread, "peak_bytes": 600 * MIB, "fits": not over})
        return Outcome(True)

    monkeypatch.setattr(program.jobs, "run", run)
    return ran


def search(monkeypatch, folder, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["search.py", "--out", str(folder), *arguments])
    return program.main("tests.experiments.hasty_worker")


def study(folder) -> optuna.Study:
    return optuna.load_study(storage=f"sqlite:///{folder / program.STUDY}", study_name="mdcs")


@pytest.mark.slow
def test_the_search_finds_the_bucket_prunes_with_reasons_and_goes_on(tmp_path, monkeypatch, ran, capsys):
    assert search(monkeypatch, tmp_path, *SMALL, "--trials", "4") == 0
    assert len(ran) == 4
    assert search(monkeypatch, tmp_path, *SMALL, "--trials", "6") == 0
    assert len(ran) == 6  # those of before are not run again
    trials = study(tmp_path).trials
    assert all("scheduler.bucket_mib" in t.params or "scheduler.block_mib" in t.params for t in trials)
    assert not any("scheduler.bucket_mib" in t.params and "scheduler.block_mib" in t.params for t in trials)
    reasons = {t.user_attrs["reason"] for t in trials if t.state == optuna.trial.TrialState.PRUNED}
    assert reasons == {"rank 1 failed: as told", "peak of 600.0 MiB, over the budget of 512.0 MiB"}
    best = study(tmp_path).best_trial
    assert best.params["scheduler"] == "fusion" and best.value < 9 and best.params["link.depth"] != 3
    told = capsys.readouterr().out.splitlines()
    first = next(line for line in told if f"scheduler.bucket_mib={best.params['scheduler.bucket_mib']:.6g}" in line)
    assert first.split()[0] == str(best.number)
    assert len((tmp_path / program.TABLE).read_text().splitlines()) == 7


def test_axes_of_one_s_own(tmp_path, monkeypatch, ran):
    axes = ("--search", "link.depth=1..2", "--search", "optimizer=adam,sgd")
    assert search(monkeypatch, tmp_path, *SMALL, "budget.schedule_share=0.5", *axes, "--trials", "3") == 0
    assert all(set(trial.params) == {"link.depth", "optimizer"} for trial in study(tmp_path).trials)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--search", "scheduler.bucket_mib=1..2"], "scheduler.bucket_mib: no such key of scheduler=wfbp; it has none"),
        (["--search", "scheduler=fusion,dear", "--search", "scheduler.seed=1..2"],
         "scheduler.seed: no such key of scheduler=dear"),
        (["--search", "link.depth=0..2"], "link.depth: must be >= 1, got 0"),
        (["budget.gib=-1"], "budget.gib: must be > 0, got -1"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_one_line(tmp_path, monkeypatch, ran, capsys, arguments, line):
    assert search(monkeypatch, tmp_path / "out", "model=mlp", "data=synthetic", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1 and not ran and not (tmp_path / "out").exists()


def test_a_folder_has_one_study(tmp_path, monkeypatch, ran, capsys):
    assert search(monkeypatch, tmp_path, *SMALL, "--trials", "1", "--search", "link.depth=1..2") == 0
    assert search(monkeypatch, tmp_path, *SMALL, "--trials", "2", "--search", "link.depth=1..3") == 2
    assert "has a study of something else: " in capsys.readouterr().err


def test_a_folder_has_one_search_at_a_time(tmp_path, monkeypatch, ran, capsys):
    """Another would end the trial that this one runs."""
    with claim(tmp_path):
        assert search(monkeypatch, tmp_path, *SMALL, "--trials", "1", "--search", "link.depth=1..2") == 2
    assert f"--out: {tmp_path} is in use by a job of process " in capsys.readouterr().err and not ran


def test_whole_numbers_are_proposed_as_such_and_on_a_logarithmic_scale():
    axis, trial = program.Axis.parse("data.samples=1000..5000000"), optuna.create_study().ask()
    assert int(axis.suggest(trial).partition("=")[2]) >= 1000 and axis.first == "1000"
    assert trial.distributions["data.samples"].log
    assert program.Axis.parse("data.samples=1000000..5000000").first == "1000000"


@pytest.mark.parametrize("text", ["link.depth", "link.depth=", "=1..2", "link.depth=2..1", "link.depth=1..x", "a=1..inf"])
def test_what_is_no_axis_is_said(text):
    with pytest.raises(argparse.ArgumentTypeError, match="an axis is KEY=LOW..HIGH or KEY=VALUE,VALUE"):
        program.Axis.parse(text)


@pytest.mark.slow
def test_real_trials(tmp_path, monkeypatch, capsys, warm):
    monkeypatch.setattr(elastic, "run", warm.run)
    tiny = ("model.layers=3", "model.block_mib=0.25", "model.forward_ms=1", "model.backward_ms=2", "run.steps=4",
            "run.warmup_steps=1", "run.profile_iterations=2")  # fmt: skip
    assert search(monkeypatch, tmp_path, "experiment=search_timed", *tiny, "--trials", "3") == 0
    done = [trial for trial in study(tmp_path).trials if trial.value is not None]
    assert done and all(trial.value > 0.009 for trial in done)  # what computing takes
