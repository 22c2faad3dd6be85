"""Reports of sweeps on W&B: which runs a source names, and what a report shows."""

import json
from types import SimpleNamespace

import pytest

from analysis import sources
from analysis.__main__ import main
from analysis.sources import Group, group_of

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
