"""The notebooks, on the small sweep beside this file: as plain Python for their tables, and by Jupyter."""

import json
import runpy
import warnings
from pathlib import Path

import matplotlib
import pytest

import analysis
from analysis.__main__ import main

SWEEP = Path(__file__).parent / "sweep"
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "analysis/notebooks"
MIB = 2**20


def run(name, monkeypatch):
    """Outputs of a notebook, with the parameters that it has."""
    monkeypatch.chdir(ROOT)
    matplotlib.use("agg")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return runpy.run_path(str(NOTEBOOKS / f"{name}.py"))


def test_stop_points(monkeypatch):
    table = run("tradeoff", monkeypatch)["table"]
    frame = analysis.runs(SWEEP / "plans")
    curve = frame[(frame["scheduler"] == "priority") & (frame["budget_bytes"] == frame["budget_bytes"][0])]
    best = curve.loc[curve["step_s"].idxmin()]
    first = table.iloc[0]
    assert (first["plan"], first["share"]) == ("greedy · priority", best["schedule_share"])
    assert first["step ms"] == best["step_s"] * 1e3
    assert first["all for the schedule"] == curve[curve["schedule_share"] == 1]["step_s"].item() / best["step_s"]
    assert (table[["all for the strategy", "all for the schedule"]] >= 1).all(axis=None)


def test_strategies_schedulers_and_budgets(monkeypatch):
    made = run("strategies", monkeypatch)
    assert list(made["table"].columns) == ["budget 24.02 MiB", "budget 26.2 MiB", "budget 30.57 MiB", "no budget"]
    assert made["table"].loc["joint", "budget 26.2 MiB"] == "86 (80–91)*"
    assert [sum(cell.endswith("*") for cell in made["table"][column]) for column in made["table"]] == [1, 1, 1, 1]
    assert list(made["best_plans"]["scheduler"]) == ["priority", "joint", "joint", "wfbp"]
    assert list(made["failed"]["status"]) == ["failed"]


def test_one_run(monkeypatch):
    made = run("one_run", monkeypatch)
    table, row = made["table"], made["row"]
    assert table.loc["step", "measured"] == row["step_s"] * 1e3 == analysis.runs(SWEEP / "plans")["step_s"].min() * 1e3
    parts = table.loc["overlap"] + table.loc["exposed"]
    assert list(parts) == pytest.approx(list(table.loc["communication"]), rel=0.05)
    assert list(table.columns[2:]) == ["rank 0, this period", "rank 1, this period"]
    assert made["messages"]["count"].sum() == row["messages_total"]
    assert made["memory"].loc["total", "measured"] == pytest.approx(made["memory"].loc["total", "predicted"], rel=0.01)


def test_predictions_and_measurements(monkeypatch):
    table = run("prediction", monkeypatch)["table"]
    frame = analysis.runs(SWEEP / "plans")
    [joint] = frame[frame["scheduler"] == "joint"].to_dict("records")
    assert table.loc["joint", "step: median"] == pytest.approx(joint["predicted_step_s"] / joint["step_s"] - 1)
    assert dict(table["runs"]) == {"dear": 5, "joint": 1, "priority": 6, "wfbp": 2}
    assert (table["peak memory: greatest"] < 0.001).all()


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_text_cells_are_text_and_no_cell_has_a_marker(notebook):
    jupytext = pytest.importorskip("jupytext")
    cells = jupytext.read(notebook, fmt="py:percent").cells
    assert {cell.cell_type for cell in cells} == {"code", "markdown"}
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1  # papermill's
    assert not [cell.source for cell in cells if "%% [" in cell.source or cell.source.startswith("# %%")]
    assert len(cells) == 1 + sum(line.startswith("# %%") for line in notebook.read_text().splitlines())


@pytest.mark.slow
def test_jupyter_runs_them_all(run_writer, tmp_path, capsys, monkeypatch):
    """A sweep without curves, timelines and engines."""
    run_writer("0", share=None)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert main(["notebooks", str(run_writer.sweep), "--out", str(tmp_path / "out")]) == 0
    assert set(capsys.readouterr().out.splitlines()) == {
        *(f"wrote {tmp_path / 'out' / name}.ipynb" for name in ("prediction", "strategies")),
        "left out one_run.ipynb: no run that ended well has a timeline",
        "left out tradeoff.ipynb: no curve: that needs runs of one budget with two schedule shares or more",
    }
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}
    notebook = json.loads((tmp_path / "out/strategies.ipynb").read_text())
    shown = [output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert any("image/png" in data for data in shown)
    assert any("budget 640 MiB" in "".join(data.get("text/html", "")) for data in shown)
