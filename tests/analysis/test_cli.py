"""python -m analysis."""

import json

import pytest

from analysis.__main__ import main
from tests.analysis.conftest import toy_timelines


def test_a_sweep_becomes_a_table_pictures_and_a_trace(sweep, tmp_path, capsys):
    assert main([str(sweep), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "table.csv", "tradeoff.png", "curve-budget-640-mib.png", "step_time.png", "timeline.png", "memory.png", "trace.json",
        "report.html",
    }
    assert "memory_aware" in capsys.readouterr().out
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    processes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert processes == {"predicted", "rank 0", "rank 1"}
    lasts = {e["name"]: e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2}
    for interval in toy_timelines()[0].ranks[0].intervals:
        assert lasts[interval.name] == pytest.approx(interval.duration_s * 1e6)


def test_pictures_and_table_for_a_paper(run_writer, tmp_path):
    for share in (0.25, 0.75):
        run_writer(f"{share}", scheduler="priority", share=share)
    sweep = run_writer.sweep
    assert main([str(sweep), "--out", str(tmp_path), "--format", "svg,tex", "--columns", "1"]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"step_time.svg", "curve-budget-640-mib.svg", "table.tex"} <= names and "step_time.png" not in names
    table = (tmp_path / "table.tex").read_text()
    assert "\\toprule" in table and "ilp · priority & 640 & 0.25" in table


def test_two_sweeps_are_compared(sweep, tmp_path, capsys):
    assert main([str(sweep), str(sweep), "--out", str(tmp_path)]) == 0
    assert "1.000 to 1.000" in capsys.readouterr().out and (tmp_path / "comparison.csv").is_file()


def test_several_models_get_pictures_of_their_own(run_writer):
    for model in ("a", "b"):
        for budget in (480, 640):
            run_writer(f"{model}{budget}", model=model, budget_mib=budget, share=None)
    assert main([str(run_writer.sweep)]) == 0
    names = {path.name for path in run_writer.sweep.glob("*.png")}
    assert "tradeoff.png" in names
    assert "tradeoff-b-2-ranks-emulated-link.png" in names
    assert "step_time.png" not in names  # the overview shows it whole


def test_a_sweep_in_which_all_failed_still_has_its_table(run_writer, capsys):
    run_writer("0", ending="infeasible")
    assert main([str(run_writer.sweep)]) == 0
    assert "infeasible" in capsys.readouterr().out
    assert {path.name for path in run_writer.sweep.iterdir()} == {"0", "table.csv", "report.html"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{empty}"], "has no runs"),
        (["wandb:a-project-alone"], "expected wandb:ENTITY/PROJECT"),
        (["{run}", "{run}", "{run}"], "got 3"),
        (["{run}", "--format", "gif"], "no such format gif"),
        (["{empty}/nowhere"], "is not a folder"),
        (["layer", "{run}"], "layer is neither a folder nor a command; did you mean layers?"),
        (["wandb:mdcs"], "wandb:mdcs: expected wandb:ENTITY/PROJECT or wandb:ENTITY/PROJECT/GROUP"),
        (["notebooks", "{empty}"], "has no runs"),
        (["layers", "wandb:some/runs"], "wandb:some/runs has no run with a plan"),
    ],
)
def test_what_cannot_be_read_is_one_line_on_stderr(arguments, complaint, tmp_path, run_writer, capsys):
    (tmp_path / "empty").mkdir()
    places = {"empty": tmp_path / "empty", "run": run_writer("0")}
    assert main([argument.format(**places) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
