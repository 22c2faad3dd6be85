"""Runs are one table, whether they are folders or W&B's; which runs a source names, and what a report on W&B shows."""

import json
from types import SimpleNamespace

import pytest

from analysis import sources
from analysis.__main__ import main
from analysis.events import read_events
from analysis.load import load_run
from analysis.sources import Group, group_of, runs, steps

SAME = ("name", "model", "strategy", "scheduler", "budget_bytes", "schedule_share", "status", "steps", "step_s", "step_s_p90",
        "overlap_s", "loss", "predicted_step_s", "predicted_memory_activations", "bytes_RS", "messages_total")  # fmt: skip


def test_steps_are_rows_with_what_tells_their_runs_apart(run_writer):
    for size in (1, 2):
        run_writer(f"{size}", scheduler="fusion", settings={"scheduler.bucket_mib": size})
    run_writer("3", ending="infeasible")
    frame = steps(run_writer.sweep)
    assert len(frame) == 24 and list(frame["scheduler.bucket_mib"].unique()) == [1, 2]
    medians = frame[~frame["warmup"].astype(bool)].groupby("name")["step_s"].median()
    assert list(medians) == list(runs(run_writer.sweep)["step_s"].dropna())
    assert {"loss", "bytes_RS", "strategy", "budget_bytes"} <= set(frame.columns)


def test_runs_of_a_project_are_asked_of_wandb(run_writer):
    from experiments.trackers.tracker import flat

    def of_wandb(folder):
        config, history, summary = {}, [], {}
        for event in read_events(folder / "metrics.jsonl"):
            values = {key: value for key, value in event.items() if key != "event"}
            if event["event"] in ("job", "start"):
                config[event["event"]] = values
            elif event["event"] == "step":
                history.append(flat(values, "train/"))
            else:
                summary |= flat(values)
        return SimpleNamespace(
            url=f"https://wandb.ai/me/mdcs/runs/{folder.name}", name=folder.name, config=config, summary=summary,
            scan_history=lambda: iter(history),
        )  # fmt: skip

    folders = [run_writer("0"), run_writer("1", ending="failed")]
    asked = {}

    class Api:
        def runs(self, project, **how):
            asked.update(how, project=project)
            return [of_wandb(folder) for folder in folders]

    found = [run.row() for run in sources.project_runs("me/mdcs", "toy", api=Api())]
    assert asked == {"project": "me/mdcs", "filters": {"group": "toy"}, "order": "+created_at"}
    for row, folder in zip(found, folders, strict=True):
        known = load_run(folder).row()
        assert {key: row[key] for key in SAME} == {key: known[key] for key in SAME}
    assert found[1]["reason"] == "peer closed the connection (rank 1, step 7)"


API = SimpleNamespace(
    run=lambda path: SimpleNamespace(group="today-1f3a9c0d" if path == "us/mdcs/abc" else None), default_entity="us",
    runs=lambda where, filters: [1] if (where, filters) == ("us/mdcs", {"group": "today-1f3a9c0d"}) else [],
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A sweep's folder, as the programs leave it."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0/config.yaml").write_text("tracker: {project: mdcs, entity: null, group: null}")
    (tmp_path / "tracked_as.json").write_text(json.dumps({"sweep": "sweep-today-1f3a9c0d-12345678"}))
    return tmp_path


def test_the_group_of_a_source(folder):
    us = Group("us", "mdcs", "today-1f3a9c0d")
    assert group_of(str(folder)) == Group(None, "mdcs", "today-1f3a9c0d")
    assert group_of("wandb:us/mdcs/today-1f3a9c0d") == us
    assert group_of("https://wandb.ai/us/mdcs/groups/today-1f3a9c0d/workspace?nw=x") == us
    assert group_of("https://wandb.ai/us/mdcs/runs/abc", api=API) == us


@pytest.mark.parametrize("source", ["https://wandb.ai/us", "https://wandb.ai/us/mdcs/runs/single", "wandb:us/mdcs", "nowhere"])
def test_other_sources_are_refused_by_name(source):
    with pytest.raises(ValueError, match=source):
        group_of(source, api=API)


def test_a_report_shows_the_sweep_s_runs_predictions_and_table(folder, monkeypatch, capsys):
    reports = pytest.importorskip("wandb_workspaces.reports.v2")
    saved = []

    class Report(SimpleNamespace):  # the real one asks the server for its address
        url = "https://wandb.ai/us/mdcs/reports/a-sweep"

        def save(self):
            saved.append(self)

    monkeypatch.setattr(reports, "Report", Report)
    monkeypatch.setattr(sources, "_api", lambda: API)
    assert main(["wandb", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == Report.url
    [[runs, table]] = [made.blocks for made in saved]
    assert "today-1f3a9c0d" in str(runs.runsets[0].filters) and "sweep" in str(table.runsets[0].filters)
    assert str(runs.panels[0].x) == str(reports.Config("start.budget_bytes"))
    assert {f"{of}/step_s" for of in ("train", "predicted")} == {getattr(each, "name", each) for each in runs.panels[3].y}
    assert main(["wandb", "wandb:us/mdcs/other"]) == 1
    assert "us/mdcs has no runs of other; offline runs are sent by wandb sync" in capsys.readouterr().err
