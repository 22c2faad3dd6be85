"""`plan.py` shows a plan; it takes one job."""

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from experiments import plan as program
from mdcs.planner import make_plan
from mdcs.profile import Profile
from mdcs.schedulers import Wfbp
from mdcs.strategies import Uniform

ROOT = Path(__file__).resolve().parents[2]


def test_a_plan_is_shown_with_its_units_prediction_and_memory():
    profile = Profile.from_json(Path(__file__).with_name("profile.json").read_text())
    console = Console(width=100, record=True, file=io.StringIO())
    program.show(make_plan(profile, Uniform("dp"), Wfbp(), budget=10**6), console)
    shown = console.export_text()
    assert "embed" in shown and "block" in shown
    assert "1 AR" in shown
    assert "step ms" in shown
    assert "floor: smallest feasible" in shown
    assert f"{10**6 / 2**20:.2f}" in shown


def test_plan_takes_no_sweep(tmp_path):
    command = [sys.executable, str(ROOT / "experiments/plan.py"), "-m", "strategy=dp", "hydra.sweep.dir=out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "--multirun: this program takes one job\n"
