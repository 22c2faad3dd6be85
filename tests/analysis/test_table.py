"""The table of a sweep is readable in a terminal, in a pipe, and as CSV."""

import io

import pandas as pd
import pytest

import analysis
from analysis.table import WIDTH, print_table, write_csv


def printed(frame):
    file = io.StringIO()
    print_table(frame, file)
    return file.getvalue()


def line_of(text, *words):
    (line,) = [line for line in text.splitlines() if all(word in line.split() for word in words)]
    return line


def test_a_row_has_the_run_s_numbers_and_a_failed_one_its_reason(frame):
    row, text = frame.query("scheduler == 'memory_aware' and schedule_share == 0.25").iloc[0], printed(frame)
    cells = line_of(text, "memory_aware", "640", "0.25").split()
    step, low, high = (f"{row[key] * 1e3:.0f}" for key in ("step_s", "step_s_p10", "step_s_p90"))
    assert cells[:6] == ["ilp", "memory_aware", "640", "0.25", step, f"[{low}–{high}]"]
    assert f"{row['predicted_step_s'] * 1e3:.0f}" == cells[6]
    assert f"{row['overlap_ratio']:.2f}" == cells[7]
    assert f"{row['peak_bytes'] / 2**20:.0f}" == cells[10]
    assert "failed [1]" in text and "infeasible: the budget of 384 MiB is below the floor of 402 MiB" in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH and "\x1b" not in text  # a pipe has no colours


def test_predictions_in_doubt_are_said_beside_the_status(run_writer):
    folder = run_writer("0")
    text = (folder / "metrics.jsonl").read_text()
    doubted = text.replace('"event": "summary"', '"event": "summary", "doubt": "took 9 times as long"')
    (folder / "metrics.jsonl").write_text(doubted)
    text = printed(analysis.runs(run_writer.sweep))
    assert "ok, off [1]" in text and "[1] " in text and "took 9 times as long" in text


def test_rows_are_sorted_and_the_fastest_is_marked(frame):
    text = printed(frame)
    lines = [line.split() for line in text.splitlines() if line.startswith("ilp")]
    keys = [(cells[1], float(cells[2]), float(cells[3])) for cells in lines]
    assert keys == sorted(keys)
    best = frame.loc[frame["step_s"].idxmin()]
    assert line_of(text, "fastest").split()[1:3] == [best["scheduler"], f"{best['budget_bytes'] / 2**20:.0f}"]


def test_long_names_and_reasons_fit(run_writer):
    run_writer("0", scheduler="a_scheduler_with_a_very_long_name", cross_iteration=False)
    folder = run_writer("1", ending="failed")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace("peer closed", "peer [bold] " + "very " * 40 + "closed"))
    text = printed(analysis.runs(run_writer.sweep))
    assert max(len(line) for line in text.splitlines()) <= WIDTH and "[bold]" in text


def test_a_run_that_does_not_know_its_workload_is_listed(run_writer):
    run_writer("0", model="a")
    run_writer("1", model="b")
    folder = run_writer("2")
    (folder / "metrics.jsonl").write_text('{"event":"failure","status":"failed","reason":"no port"}\n')
    text = printed(analysis.runs(run_writer.sweep))
    assert "workload not known" in text and "no port" in text


def test_the_csv_has_every_column(frame, tmp_path):
    again = pd.read_csv(write_csv(frame, tmp_path / "new" / "table.csv"))
    assert list(again.columns) == list(frame.columns)
    assert again["step_s"].tolist() == pytest.approx(frame["step_s"].tolist(), nan_ok=True)


def test_every_swept_setting_is_a_column_and_repetitions_have_their_spread(run_writer, tmp_path):
    for size in (0.5, 25.0, None):
        for seed in (0, 1):
            settings = {"scheduler.bucket_mib": size, "run.seed": seed}
            step_s = {0.5: 1.0, 25.0: 2.0, None: 3.0}[size] + seed / 5
            run_writer(f"{size}-{seed}", scheduler="fusion", budget_mib=None, share=None, settings=settings,
                       times={"step_s": step_s})  # fmt: skip
    frame = analysis.runs(run_writer.sweep)
    text = printed(frame)
    assert [cells[2:4] for line in text.splitlines() if (cells := line.split())[:2] == ["ilp", "fusion"]] == [
        ["0.5", "0"], ["0.5", "1"], ["25", "0"], ["25", "1"], ["null", "0"], ["null", "1"],
    ]  # fmt: skip
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    low, middle, high = (f"{s * 1e3:.0f}" for s in (frame["step_s"][0], frame["step_s"][:2].median(), frame["step_s"][1]))
    assert f"2 runs of ilp · fusion · bucket_mib=0.5, no budget: median {middle} ms, {low} to {high}" in text
    assert "ok, fastest median" in text
    again = pd.read_csv(write_csv(frame, tmp_path / "table.csv"), keep_default_na=False)
    assert list(again["scheduler.bucket_mib"]) == ["0.5", "0.5", "25.0", "25.0", "null", "null"]
    assert list(again["run.seed"]) == [0, 1] * 3


@pytest.mark.parametrize("groups", [("data", "model"), ("data", "model", "optimizer", "scheduler", "run", "link")])
def test_a_table_with_many_swept_settings_fits(run_writer, groups):
    for number in (0, 1):
        run_writer(f"{number}", settings={f"{group}.a_name_of_{group}": number for group in groups})
    text = printed(analysis.runs(run_writer.sweep))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert len(groups) > 2 or "a_name_of_model" in text  # more of them are folded
