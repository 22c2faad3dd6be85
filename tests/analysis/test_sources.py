"""Runs are one table, whether they are folders or W&B's."""

import time
import warnings
from types import SimpleNamespace

import pytest

from analysis import wandb_runs
from analysis.__main__ import main
from analysis.events import read_events
from analysis.load import load_run
from analysis.page.contents import contents
from analysis.sources import runs

SAME = ("name", "model", "strategy", "scheduler", "budget_bytes", "schedule_share", "status", "steps", "step_s", "step_s_p90",
        "overlap_s", "loss", "predicted_step_s", "predicted_memory_activations", "bytes_RS", "messages_total")  # fmt: skip


def test_a_folder_of_runs(sweep):
    assert len(runs(sweep)) == 15


def test_offline_runs_of_wandb_are_read_as_the_folder_is(run_writer, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from experiments.trackers.tracker import Shown
    from experiments.trackers.wandb import Wandb, WandbMirror

    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = run_writer("0", steps=40)
    shown = Shown(tmp_path / "out", "0", name="0", group="toy", kind="train", config={})
    shown.folder.mkdir()
    mirror = WandbMirror(Wandb(mode="offline"), shown)
    for event in read_events(folder / "metrics.jsonl"):
        mirror.event(event)
    mirror.finish(True)

    with warnings.catch_warnings():  # W&B's own process may write the end a little later
        warnings.simplefilter("ignore", UserWarning)
        deadline = time.monotonic() + 60
        while (row := runs(tmp_path / "out").to_dict("records")[0])["status"] != "ok" and time.monotonic() < deadline:
            time.sleep(0.1)
    known = load_run(folder).row()
    assert {key: row[key] for key in SAME} == pytest.approx({key: known[key] for key in SAME})

    # Of it there is all but the pictures of a period.
    assert main([str(tmp_path / "out"), "--out", str(tmp_path / "pictures")]) == 0
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"table.csv", "tradeoff.png", "step_time.png"}
    assert contents(runs(tmp_path / "out"))["periods"] == []

    # A run that is killed leaves half a record.
    [file] = (tmp_path / "out").rglob("*.wandb")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.warns(UserWarning, match="cut off"):
        [row] = runs(tmp_path / "out").to_dict("records")
    assert (row["strategy"], row["status"]) == ("ilp", "incomplete")
    assert 2 < row["steps"] < 40


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

    found = [run.row() for run in wandb_runs.project_runs("me/mdcs", "toy", api=Api())]
    assert asked == {"project": "me/mdcs", "filters": {"group": "toy"}, "order": "+created_at"}
    for row, folder in zip(found, folders, strict=True):
        known = load_run(folder).row()
        assert {key: row[key] for key in SAME} == {key: known[key] for key in SAME}
    assert found[1]["reason"] == "peer closed the connection (rank 1, step 7)"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("wandb:mdcs", "expected wandb:ENTITY/PROJECT"), ("{empty}", "has no runs"), ("{empty}/nowhere", "is not a folder")],
)
def test_a_source_without_runs_is_refused(source, complaint, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        runs(source.format(empty=tmp_path))
