"""A run's folder becomes a row, whatever state the run was left in."""

import json

import pandas as pd
import pytest

import analysis
from analysis.events import SCHEMA
from analysis.load import COLUMNS, load_run

MIB = 2**20


def row_of(folder):
    frame = analysis.runs(folder)
    assert len(frame) == 1 and tuple(frame.columns) == COLUMNS
    return frame.iloc[0]


def test_a_finished_run_is_a_row_with_the_numbers_of_its_steps_and_its_summary(run_writer):
    folder = run_writer("0", strategy="fsdp", scheduler="dear", budget_mib=512, share=0.25)
    summary = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    start = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    row = row_of(folder)
    assert (row["name"], row["model"], row["strategy"], row["scheduler"]) == ("0", "gpt-small", "fsdp", "dear")
    assert (row["budget_bytes"], row["schedule_share"]) == (512 * MIB, 0.25)
    assert (row["world"], row["emulated"], row["cross_iteration"], row["status"]) == (2, True, True, "ok")
    steps = load_run(folder).measured_steps["step_s"]
    assert (row["step_s"], row["step_s_p90"]) == (steps.median(), steps.quantile(0.9))
    assert row["extra_communication_s"] == summary["extra_communication_s"]
    assert row["predicted_step_s"] == start["predicted"]["step_s"]
    assert row["measured_memory_optimizer"] == summary["memory"]["measured"]["optimizer"]
    assert row["predicted_memory_activations"] == summary["memory"]["predicted"]["activations"]
    assert row["peak_bytes"] == summary["memory"]["measured"]["total"]
    assert (row["bytes_RS"], row["bytes_AR"], row["bytes_total"]) == (76 * MIB, 0, 222 * MIB)
    assert row["messages_total"] == 222
    assert row["loss"] == pytest.approx(5 / 12)


def test_runs_are_found_at_any_depth_in_natural_order(run_writer):
    for name in ("10", "2", "nested/deeper/1"):
        run_writer(name)
    assert list(analysis.runs(run_writer.sweep)["name"]) == ["2", "10", "1"]


def test_a_failed_run_has_its_reason_and_the_steps_it_made(run_writer):
    row = row_of(run_writer("0", ending="failed"))
    assert row["status"] == "failed"
    assert row["reason"] == "peer closed the connection (rank 1, step 7)"
    assert row["steps"] == 12
    assert row["step_s"] > 0


def test_half_a_last_line_is_what_a_killed_run_leaves(run_writer):
    row = row_of(run_writer("0", ending="killed", steps=9))
    assert (row["status"], row["steps"]) == ("incomplete", 9)
    assert "9 steps" in row["reason"]
    steps = load_run(run_writer.sweep / "0").steps
    assert row["step_s"] == steps[~steps["warmup"]]["step_s"].median()


def test_a_corrupt_middle_line_fails_that_row_only(run_writer):
    folder = run_writer("0")
    run_writer("1")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = lines[3][:20]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 4"):
        load_run(folder)
    frame = analysis.runs(run_writer.sweep)
    assert list(frame["status"]) == ["failed", "ok"]
    assert "line 4" in frame["reason"][0]


@pytest.mark.parametrize(
    ("of", "tells", "expected"),
    [("/runs/mine", True, [9.0, 8.0, 6.0]), ("here", False, [9.0, 8.0, 6.0]), ("/runs/another", True, [6.0])],
)
def test_a_run_that_was_gone_on_with_has_the_steps_of_before(tmp_path, of, tells, expected):
    """The first attempt's two steps that its checkpoint has, and not the third, which was made again; none of another run's."""
    steps = [{"event": "step", "step": step, "loss": loss} for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0))]
    job = {"event": "job", "schema": SCHEMA, "name": "mine"}
    saved = {"event": "checkpoint", "step": 2, "folder": "/runs/mine/checkpoints/step-00000002"}
    of = tmp_path.resolve() if of == "here" else of
    from_there = {"event": "resumed", "step": 2, "world": 2, "folder": f"{of}/checkpoints/step-00000002"}
    again = [from_there, {"event": "step", "step": 3, "loss": 6.0}]
    saved = [saved] if tells else []
    events = [job, *steps, *saved, {"event": "failure", "status": "failed", "reason": "preempted"}, job, *again]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = load_run(tmp_path)
    assert list(run.steps["loss"]) == expected and list(run.steps["step"]) == [1, 2, 3][-len(expected) :]
    assert run.status == "incomplete" and run.row()["steps"] == len(expected)


def test_times_of_a_run_are_of_its_last_attempt(tmp_path):
    """The first, on another node, took a second a step, the second a tenth."""
    job = {"event": "job", "schema": SCHEMA, "name": "mine"}
    steps = [{"event": "step", "step": s, "warmup": s == 3, "step_s": 1.0 if s < 3 else 0.1} for s in range(1, 6)]
    resumed = {"event": "resumed", "step": 2, "world": 2, "folder": f"{tmp_path.resolve()}/checkpoints/step-00000002"}
    events = [job, *steps[:2], job, resumed, *steps[2:]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    row = load_run(tmp_path).row()
    assert (row["steps"], row["step_s"], row["step_s_p90"]) == (5, 0.1, 0.1)


def test_a_run_that_failed_before_its_plan_says_what_was_asked_for(run_writer):
    row = row_of(run_writer("0", strategy="fsdp", scheduler="wfbp", budget_mib=512, share=0.25, ending="infeasible", world=4))
    assert (row["model"], row["strategy"], row["scheduler"], row["world"]) == ("gpt-small", "fsdp", "wfbp", 4)
    assert (row["budget_bytes"], row["schedule_share"], row["emulated"]) == (512 * MIB, 0.25, True)
    assert row["cross_iteration"] and pd.isna(row["floor_bytes"])


def test_what_ran_in_the_folder_before_is_not_this_job_s(run_writer):
    former = (run_writer("0", steps=5) / "metrics.jsonl").read_text()
    folder = run_writer("0", strategy="fsdp", ending="infeasible")
    (folder / "metrics.jsonl").write_text(former + (folder / "metrics.jsonl").read_text())
    row = row_of(folder)
    assert (row["status"], row["steps"], row["strategy"]) == ("failed", 0, "fsdp")
    assert pd.isna(row["plan_hash"]) and pd.isna(row["step_s"]) and pd.isna(row["predicted_step_s"])


def test_a_file_of_another_schema_is_refused(run_writer):
    folder = run_writer("0")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace(f'"schema": {SCHEMA}', '"schema": 99'))
    with pytest.raises(ValueError, match="schema 99, this version reads schema 3"):
        load_run(folder)


def test_no_memory_measurement_is_no_number(run_writer):
    row = row_of(run_writer("0", peak=False, budget_mib=None, share=None))
    assert pd.isna(row["peak_bytes"]) and pd.isna(row["measured_memory_optimizer"])
    assert pd.isna(row["budget_bytes"]) and pd.isna(row["schedule_share"])


def test_timelines_are_read_where_they_exist(run_writer):
    with_timelines = load_run(run_writer("0", timelines=True))
    assert [r.rank for r in with_timelines.timeline().ranks] == [0, 1]
    assert [r.rank for r in with_timelines.predicted_timeline().ranks] == [-1]
    assert load_run(run_writer("1")).timeline() is None
    (run_writer.sweep / "0" / "timeline.json").write_text("{}")
    with pytest.raises(ValueError, match=r"timeline\.json: not a timeline"):
        with_timelines.timeline()
