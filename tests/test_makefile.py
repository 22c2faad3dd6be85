"""No target of make deletes what runs wrote."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path):
    """A folder with the Makefile, a Python that does nothing, and a sweep that has ended."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("setup.cfg", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    os.symlink("/bin/true", tmp_path / ".venv/bin/python")
    (tmp_path / ".venv/.installed").touch()
    for name in ("outputs/run/metrics.jsonl", "multirun/day/0/metrics.jsonl", "results/sweep/0/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("measured")
    for name in ("multirun.yaml", "sweep.json"):
        (tmp_path / "results/sweep" / name).touch()
    return tmp_path


def make(folder, *arguments):
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def measured(folder):
    return len(list(folder.rglob("metrics.jsonl")))


def test_clean_leaves_results(project):
    make(project, "clean")
    assert measured(project) == 3 and not (project / ".venv").exists()


@pytest.mark.parametrize("out", ["results/sweep", "results/sweep/"])
def test_a_sweep_moves_one_that_has_ended_out_of_its_way(project, out):
    said = make(project, "sweep", f"OUT={out}")
    [before] = project.glob("results/sweep-*")
    assert f"the sweep before is in results/{before.name}" in said
    assert (before / "0/metrics.jsonl").read_text() == "measured" and not (project / "results/sweep").exists()


def test_a_sweep_that_was_interrupted_goes_on_where_it_is(project):
    (project / "results/sweep/sweep.json").unlink()
    make(project, "sweep")
    assert measured(project) == 3 and (project / "results/sweep/0").exists()
