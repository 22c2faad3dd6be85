"""Runs are one table, whether they are folders or W&B's."""

from types import SimpleNamespace

import pytest

from analysis import sources
from analysis.events import read_events
from analysis.load import load_run
from analysis.sources import runs, steps

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


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("wandb:mdcs", "expected wandb:ENTITY/PROJECT"), ("{empty}", "has no runs"), ("{empty}/nowhere", "is not a folder")],
)
def test_a_source_without_runs_is_refused(source, complaint, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        runs(source.format(empty=tmp_path))
