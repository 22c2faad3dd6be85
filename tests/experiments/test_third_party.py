"""A strategy, a scheduler and a model of a package and a config folder outside of this repository: chosen, checked, trained."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from analysis.events import read_events
from experiments import plan as plan_program
from experiments import train as program
from mdcs import make_plan
from mdcs.options import Checked, option
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision
from mdcs.planner.schedulers import StrategyAssignment
from tests.experiments import one_process
from tests.mdcs.planner.test_every_plan import job

ROOT = Path(__file__).resolve().parents[2]
THEIRS = Path(__file__).with_name("third_party")
CHOSEN = ("strategy=every_nth", "scheduler=late", "model=hourglass", "data=digits")
SMALL = ("run.steps=3", "run.unmeasured_steps=1", "run.profile_iterations=1", "cluster.threads=1", "hydra.run.dir=out")


def apart(folder: Path, *arguments: str, installed: bool = True) -> "subprocess.CompletedProcess[str]":
    """Train in a process of its own."""
    command = [sys.executable, str(ROOT / "experiments/train.py"), "--config-dir", str(THEIRS / "conf"), *arguments]
    paths = [os.environ.get("PYTHONPATH", ""), str(THEIRS / "package") if installed else ""]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=150)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train in this process, with their package."""
    monkeypatch.syspath_prepend(str(THEIRS / "package"))
    return lambda *arguments: one_process.call(program, tmp_path, "--config-dir", str(THEIRS / "conf"), *arguments)


@pytest.mark.slow
def test_it_trains_on_two_ranks(tmp_path):
    done = apart(tmp_path, *CHOSEN, *SMALL, "strategy.n=3", "budget=floor+50%")
    assert (done.returncode, done.stderr) == (0, "")
    plan = Plan.from_json((tmp_path / "out/plan.json").read_text())
    assert (plan.strategy, plan.scheduler, plan.world) == ("every nth", "late", 2)
    assert [str(strategy) for strategy in plan.strategies][::3] == ["zero2", "zero2"]
    events = read_events(tmp_path / "out/metrics.jsonl")
    assert (events[0]["model"], events[-1]["status"]) == ("hourglass", "ok")


MISTAKES = [  # what any option may say is in config/test_config.py
    ("strategy.n=0", "strategy.n: must be >= 1, got 0"),
    ("model.waist=64", "model.waist: must be < width=64, got 64"),
    ("scheduler._target_=stranger.broken.A", "scheduler._target_: stranger.broken.A: ZeroDivisionError: division by zero"),
    ("scheduler._target_=stranger.odd.Nameless", "scheduler._target_: stranger.odd.Nameless has no name, for tables"),
    ("scheduler._target_=stranger.odd.Untyped", "scheduler._target_: stranger.odd.Untyped: name 'Nowhere' is not defined"),
    ("strategy._target_=stranger.planners.Late", "strategy._target_: stranger.planners.Late has no method choose or plan"),
]


@pytest.mark.parametrize(("overrides", "line"), MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(tmp_path, train, overrides, line):
    done = train(*CHOSEN, *SMALL, *overrides.split())
    assert (done.returncode, done.stderr) == (2, line + "\n")
    assert not list(tmp_path.rglob("launch.json"))


def test_a_fault_of_theirs_is_a_line_with_class_file_line_and_job(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(THEIRS / "package"))
    profile = Path(__file__).with_name("profile.json")
    arguments = ["--config-dir", str(THEIRS / "conf"), "strategy=every_nth", "scheduler=late", f"profile.path={profile}"]
    sweep = ["-m", *arguments, "scheduler._target_=stranger.odd.Careless,stranger.planners.Late", "hydra.sweep.dir=out"]
    done = one_process.call(plan_program, tmp_path, *sweep)
    file = THEIRS / "package/stranger/odd.py"
    at = file.read_text().splitlines().index('        return {}["plan"]') + 1
    line = f"failed: scheduler stranger.odd.Careless, {file}:{at}: KeyError: 'plan' (its logs are in {tmp_path}/out/0)\n"
    assert done.returncode == 1 and done.stderr.startswith(line + "1 of 2 jobs failed: ")
    assert done.stderr.endswith("scheduler._target_=stranger.odd.Careless\n") and "Traceback" not in done.stderr
    assert "1 plans in" in done.stdout  # the other one is made
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback" in one_process.call(plan_program, tmp_path, *sweep).stderr


def test_a_package_that_is_not_there_is_one_line(tmp_path):
    done = apart(tmp_path, *CHOSEN, *SMALL, installed=False)
    line = "model._target_: stranger.model.Hourglass: no module stranger; is it installed, or on PYTHONPATH?\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_folder_that_is_not_there_is_one_line(train):
    done = train("--config-dir", "nowhere")
    assert (done.returncode, done.stderr) == (2, "--config-dir: no such folder: nowhere\n")


def test_help_tells_of_them(train):
    done = train("--help", *CHOSEN, "strategy.n=5")
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("strategy=every_nth* Every nth unit is whole.", "strategy.n=5 one unit in so many is whole (>= 1)",
                 "scheduler=late* Gathers just in time.", "model.waist=16 hidden size in the middle (>= 1)"):  # fmt: skip
        assert line in " ".join(done.stdout.split()), line


def test_a_search_path_does_as_well(train):
    done = train(f"hydra.searchpath=[file://{THEIRS / 'conf'}]", "strategy=every_nth", "--cfg", "job")
    assert done.returncode == 0 and "_target_: stranger.planners.EveryNth" in done.stdout


def test_the_strategy_and_the_scheduler_of_the_guide_make_a_plan():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    [strategy] = [block for block in blocks if "def choose" in block]
    [schedule] = [block for block in blocks if "def schedule" in block]
    known = (Checked, ClassVar, Message, Plan, PlanningProblem, Strategy, StrategyAssignment, StrategyDecision)
    space = {"dataclass": dataclasses.dataclass, "option": option, **{each.__name__: each for each in known}}
    exec(f"{strategy}\nclass Mine:\n    name = 'mine'\n{schedule}", space)
    plan = make_plan(job(3), space["EveryNth"](2), space["Mine"]())
    assert plan.scheduler == "mine" and plan.prediction.step_s > 0
