"""metrics.jsonl survives crashes; what a run's tracker is shown, in which order."""

import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.events import read_events
from experiments.config.schema import Config
from experiments.job.record import identity_of
from experiments.job.sweep import sweep_name
from experiments.job.tracking import Follower, JsonLines, show_sweep
from experiments.trackers.tracker import Mirror, Shown, Tracker, flat
from tests.experiments import batch

ROOT = Path(__file__).resolve().parents[3]
STEP = {"event": "step", "step": 1, "loss": 2.5}
composed = functools.cache(batch.composed)


# ---- the file


def test_each_event_is_on_disk_when_it_was_written_and_numbers_that_json_does_not_know_are_null(tmp_path):
    with JsonLines(tmp_path / "metrics.jsonl") as metrics:
        metrics.write({"event": "step", "loss": math.nan, "bytes": {"AR": math.inf}, "list": [1.0, -math.inf]})
        written = read_events(tmp_path / "metrics.jsonl")  # not closed yet
    assert written == [{"event": "step", "loss": None, "bytes": {"AR": None}, "list": [1.0, None]}]
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": None, "f": 0}) == {"a/b": 1, "a/c/d": 2, "f": 0}


def test_a_line_cut_off_by_a_crash_is_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    with pytest.warns(UserWarning, match=f"^{path}: the last line is cut off"):
        assert read_events(path) == [{"event": "step", "step": 1}]
    with JsonLines(path) as metrics:
        metrics.write({"event": "failure"})
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["step", "failure"]
    path.write_text('{"event": "st')
    with JsonLines(path) as metrics:
        metrics.write({"event": "failure"})
    assert path.read_text() == '{"event": "failure"}\n'


FULL = """
import pathlib, resource, sys
from experiments.job.tracking import JsonLines
metrics = JsonLines(pathlib.Path(sys.argv[1]))
metrics.write({"event": "step", "step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))  # the disk takes half of the next line
metrics.write({"event": "step", "step": 2})
"""


def test_a_line_that_does_not_fit_on_the_disk_is_not_begun(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert str(path) in done.stderr.splitlines()[-1]  # the error names the file
    assert path.read_text() == '{"event": "step", "step": 1}\n'


# ---- what a tracker is shown


class Listening(Mirror):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def event(self, event):
        name = event["event"]
        self.heard.append((name, event["step"]) if name == "eval" else event.get("step", name))

    def document(self, kind, file, used):
        self.heard.append((kind, file.name, used))

    def table(self, columns, rows):
        self.heard.append(dict(zip(columns, rows[0], strict=True)))

    def finish(self, ok):
        self.heard.append(ok)


@dataclasses.dataclass(frozen=True)
class Heard(Tracker):
    name = "heard"
    runs: dict = dataclasses.field(default_factory=dict)

    def mirror(self, run: Shown) -> Mirror:
        return self.runs.setdefault(run.id, (run, Listening()))[1]


@pytest.fixture
def config() -> Config:
    made = composed("model=mlp", "data=synthetic", "run.name=mine", "run.sweep=today-12345678")
    return dataclasses.replace(made, tracker=Heard())


def heard(config: Config) -> tuple[Shown, list[Any]]:
    [(run, mirror)] = config.tracker.runs.values()  # type: ignore[attr-defined]
    return run, mirror.heard


def follow(config: Config, folder: Path, *events: dict, kind: str = "train") -> tuple[Shown, list[Any]]:
    follower = Follower(config, folder, kind, identity_of(config))
    for event in events:
        follower.event(event)
    follower.finish(True)
    return heard(config)


def test_a_run_goes_by_its_hash_and_its_sweep_with_its_plan(tmp_path, config):
    (tmp_path / "plan.json").write_text("{}")
    run, said = follow(config, tmp_path, {"event": "job"}, STEP, {"event": "summary"})
    assert said == ["job", 1, "summary", ("plan", "plan.json", False), True]
    assert run.id.rpartition("-")[0] == identity_of(config)
    assert (run.group, run.kind, run.name) == ("today-12345678", "train", "mine")
    assert run.config["model"]["depth"] == 4


@pytest.mark.parametrize(("of", "before"), [("", [1, ("eval", 1), 2, ("eval", 2)]), ("/elsewhere", [])])
def test_steps_and_evaluations_from_before_are_shown_again_once_a_run_goes_on(tmp_path, config, of, before):
    with JsonLines(tmp_path / "metrics.jsonl") as metrics:
        for step in (1, 2, 3, 4):
            metrics.write({"event": "step", "step": step})
            metrics.write({"event": "eval", "step": step, "loss": 2.0})
    resumed = {"event": "resumed", "folder": f"{of or tmp_path}/checkpoints/step-00000002"}
    assert follow(config, tmp_path, STEP)[1] == [1, True]  # a run that begins anew has no past
    config.tracker.runs.clear()
    _, said = follow(config, tmp_path, resumed, {"event": "step", "step": 3}, {"event": "step", "step": 4})
    assert said == ["resumed", *before, 3, 4, True]


def test_ids_of_equal_jobs_begin_alike_and_no_run_overwrites_another(tmp_path, config):
    moved = dataclasses.replace(config, run=dataclasses.replace(config.run, sweep=None, resume="auto"))
    assert identity_of(moved) == identity_of(config)
    longer = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=31))
    assert identity_of(longer) != identity_of(config)
    for turn in ("0-mdcs @ 10%", "1-mdcs @ 10%"):
        Follower(config, tmp_path / turn, "compare", identity_of(config)).finish(True)
    runs = config.tracker.runs  # type: ignore[attr-defined]
    assert [each.rpartition("-")[0] for each in runs] == [f"{identity_of(config)}-compare-{turn}-mdcs-10-" for turn in (0, 1)]
    for again in ("first", "second"):  # as in a sweep's folder elsewhere
        Follower(config, tmp_path / again, "train", identity_of(config)).finish(True)
    assert len(runs) == 4


def test_sweeps_in_folders_of_one_name_are_groups_of_their_own(tmp_path):
    names = [sweep_name(tmp_path / folder / "sweep") for folder in "aba"]
    assert names[0] == names[2] != names[1] and all(name.startswith("sweep-") for name in names)


def test_a_sweep_is_a_run_of_its_own_with_its_table(tmp_path, config):
    import analysis

    (tmp_path / "0").mkdir()
    with JsonLines(tmp_path / "0/metrics.jsonl") as metrics:
        metrics.write({"event": "job", "schema": 3, "name": "mine", "budget_bytes": 2**29})
        metrics.write({"event": "step", "step": 1, "step_s": 0.1})
        metrics.write({"event": "summary", "status": "ok"})
    show_sweep(config, "today-12345678", tmp_path, analysis.runs(tmp_path), [])
    run, [row, ok] = heard(config)
    assert (run.kind, run.id.rpartition("-")[0], ok) == ("sweep", f"sweep-{run.group}", True)
    assert run.group == "today-12345678"
    show_sweep(config, "today-12345678", tmp_path, analysis.runs(tmp_path), [])  # it goes on
    assert len(config.tracker.runs) == 1  # type: ignore[attr-defined]
    forced = dataclasses.replace(config, sweep=dataclasses.replace(config.sweep, force=True))
    show_sweep(forced, "today-12345678", tmp_path, analysis.runs(tmp_path), [])
    assert len(config.tracker.runs) == 2  # type: ignore[attr-defined]
    assert (row["name"], row["budget_bytes"], row["step_s"], row["overlap_ratio"]) == ("mine", 2**29, 0.1, None)


def test_without_a_tracker_nothing_is_imported_or_shown(tmp_path):
    code = """import sys, experiments.job.tracking, experiments.trackers.wandb, experiments.trackers.tracker
sys.exit(bool({'wandb', 'torch', 'tensorboard'} & set(sys.modules)))"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    config = composed("model=mlp", "data=synthetic")
    follower = Follower(config, tmp_path, "train", "own")
    follower.event(STEP)
    follower.finish(False)
    assert list(tmp_path.iterdir()) == []
