"""The table of a sweep is readable in a terminal, in a pipe, and as CSV."""

import io

import pandas as pd
import pytest

from analysis.load import load_sweep
from analysis.table import WIDTH, print_table, write_csv


@pytest.fixture
def printed(sweep):
    file = io.StringIO()
    print_table(load_sweep(sweep), file)
    return file.getvalue()


def line_of(text, *words):
    (line,) = [line for line in text.splitlines() if all(word in line.split() for word in words)]
    return line


def test_a_row_has_the_run_s_numbers(sweep, printed):
    row = load_sweep(sweep).query("scheduler == 'memory_aware' and schedule_share == 0.25").iloc[0]
    cells = line_of(printed, "memory_aware", "640", "0.25").split()
    step, low, high = (f"{row[key] * 1e3:.0f}" for key in ("step_s", "step_s_p10", "step_s_p90"))
    assert cells[:6] == ["ilp", "memory_aware", "640", "0.25", step, f"[{low}–{high}]"]
    assert f"{row['predicted_step_s'] * 1e3:.0f}" == cells[6]
    assert f"{row['overlap_ratio']:.2f}" == cells[7]
    assert f"{row['peak_bytes'] / 2**20:.0f}" == cells[10]


def test_it_fits_and_has_no_colours_in_a_pipe(printed):
    assert max(len(line) for line in printed.splitlines()) <= WIDTH
    assert "\x1b" not in printed


def test_failed_runs_give_their_reason(printed):
    assert "failed [1]" in printed
    assert "infeasible: the budget of 384 MiB is below the floor of 402 MiB" in printed


def test_rows_are_sorted_and_the_fastest_is_marked(sweep, printed):
    lines = [line.split() for line in printed.splitlines() if line.startswith("ilp")]
    keys = [(cells[1], float(cells[2]), float(cells[3])) for cells in lines]
    assert keys == sorted(keys)
    frame = load_sweep(sweep)
    best = frame.loc[frame["step_s"].idxmin()]
    assert line_of(printed, "fastest").split()[1:3] == [
        best["scheduler"],
        f"{best['budget_bytes'] / 2**20:.0f}",
    ]


def test_long_names_and_reasons_fit(run_writer):
    run_writer("0", scheduler="a_scheduler_with_a_very_long_name", cross_iteration=False)
    folder = run_writer("1", ending="failed")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(
        text.replace("peer closed", "peer [bold] " + "very " * 40 + "closed")
    )
    file = io.StringIO()
    print_table(load_sweep(run_writer.sweep), file)
    assert max(len(line) for line in file.getvalue().splitlines()) <= WIDTH
    assert "[bold]" in file.getvalue()


def test_a_run_that_does_not_know_its_workload_is_listed(run_writer):
    run_writer("0", model="a")
    run_writer("1", model="b")
    folder = run_writer("2")
    (folder / "metrics.jsonl").write_text('{"event":"failure","status":"failed","reason":"no port"}\n')
    file = io.StringIO()
    print_table(load_sweep(run_writer.sweep), file)
    assert "workload not known" in file.getvalue()
    assert "no port" in file.getvalue()


def test_the_csv_has_every_column(sweep, tmp_path):
    frame = load_sweep(sweep)
    again = pd.read_csv(write_csv(frame, tmp_path / "new" / "table.csv"))
    assert list(again.columns) == list(frame.columns)
    assert again["step_s"].tolist() == pytest.approx(frame["step_s"].tolist(), nan_ok=True)
