"""metrics.jsonl survives crashes; W&B can fail anywhere without stopping a run."""

import json
import math
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from analysis.events import read_events
from experiments.job.tracking import JsonLines, NoMirror, NoTracker, Wandb, WandbMirror, default_mode, flat

ROOT = Path(__file__).resolve().parents[3]
STEP = {"event": "step", "step": 1, "loss": 2.5, "bytes": {"AR": 10}, "peak_bytes": None}


# ---- the file


def test_each_event_is_on_disk_when_it_was_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = JsonLines(path)
    metrics.write(STEP)
    assert read_events(path) == [STEP]  # not closed yet
    metrics.close()


def test_a_line_cut_off_by_a_crash_is_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    with pytest.warns(UserWarning, match=f"^{path}: the last line is cut off"):
        assert read_events(path) == [{"event": "step", "step": 1}]
    with JsonLines(path) as metrics:
        metrics.write({"event": "failure"})
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["step", "failure"]


def test_a_file_that_is_nothing_but_a_cut_off_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
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


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    with JsonLines(tmp_path / "m") as metrics:
        metrics.write(
            {"event": "step", "loss": math.nan, "bytes": {"AR": math.inf}, "list": [1.0, -math.inf]}
        )
    assert read_events(tmp_path / "m") == [
        {"event": "step", "loss": None, "bytes": {"AR": None}, "list": [1.0, None]}
    ]


# ---- W&B


class Broken(Exception):
    pass


def fake_wandb(fails_at: str = "", error: type[BaseException] = Broken) -> types.ModuleType:
    """A module like wandb that records its calls, and raises in the call named `fails_at`."""
    calls: list[tuple[str, tuple, dict]] = []

    def call(name):
        def called(*args, **kwargs):
            calls.append((name, args, kwargs))
            if name == fails_at:
                raise error("as told,\nin two lines")
            return types.SimpleNamespace(name=name, args=args)

        return called

    run = types.SimpleNamespace(
        define_metric=call("define_metric"),
        log=call("log"),
        finish=call("finish"),
        config=types.SimpleNamespace(update=call("config")),
        summary=types.SimpleNamespace(update=call("summary")),
    )

    def init(**kwargs):
        call("init")(**kwargs)
        return run

    module = types.ModuleType("wandb")
    module.init, module.Settings, module.Image = init, call("settings"), call("image")  # type: ignore[attr-defined]
    module.calls = calls  # type: ignore[attr-defined]
    return module


def whole_run(module, folder, tracker=None) -> list[str]:
    """Everything a run does with its mirror; returns the warnings."""

    def load():
        if isinstance(module, Exception):
            raise module
        return module

    (folder / "timeline.png").write_bytes(b"")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracker = tracker or Wandb()
        mirror = WandbMirror(tracker, folder, name="n", group="the sweep", config={"a": 1}, load=load)
        mirror.event({"event": "start", "plan_hash": "x"})
        for step in (1, 2, 3):
            mirror.event({**STEP, "step": step})
        mirror.event({"event": "summary", "step_s": {"median": 0.1}})
        mirror.pictures([folder / "timeline.png"])
        mirror.finish(True)
    return [str(warning.message) for warning in caught]


def test_a_run_is_mirrored(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/no/such/file")
    wandb = fake_wandb()
    assert whole_run(wandb, tmp_path) == []
    calls = {}
    for name, args, kwargs in wandb.calls:
        calls.setdefault(name, []).append((args, kwargs))
    [(_, init)] = calls["init"]
    assert (init["mode"], init["group"], init["project"], init["config"]) == (
        "offline",
        "the sweep",
        "mdcs",
        {"a": 1},
    )
    assert [args[0] for args, _ in calls["log"][:3]] == [
        {"step": s, "loss": 2.5, "bytes/AR": 10} for s in (1, 2, 3)
    ]
    assert calls["summary"] == [(({"step_s/median": 0.1},), {})]
    assert ((), {"exit_code": 0}) in calls["finish"]
    assert [list(args[0]) for args, _ in calls["log"][3:]] == [["timeline"]]


@pytest.mark.parametrize(
    "point", ["settings", "init", "define_metric", "config", "log", "summary", "image", "finish"]
)
def test_wandb_may_fail_anywhere_and_is_warned_about_once(tmp_path, point):
    wandb = fake_wandb(point)
    [warning] = whole_run(wandb, tmp_path)
    assert warning.startswith("W&B could not ")
    assert "the run goes on without it: Broken: as told, in two lines" in warning
    if point in ("init", "log"):
        assert [name for name, *_ in wandb.calls].count(point) == 1  # and is left alone afterwards


@pytest.mark.parametrize("error", [ImportError("No module named 'wandb'"), OSError("no space left")])
def test_wandb_may_be_missing(tmp_path, error):
    [warning] = whole_run(error, tmp_path)
    assert "could not start" in warning


def test_ctrl_c_is_not_swallowed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        whole_run(fake_wandb("log", KeyboardInterrupt), tmp_path)


def test_the_configured_group_and_mode_win(tmp_path):
    wandb = fake_wandb()
    whole_run(wandb, tmp_path, Wandb(group="mine", mode="disabled", entity="us"))
    [init] = [kwargs for name, _, kwargs in wandb.calls if name == "init"]
    assert (init["group"], init["mode"], init["entity"]) == ("mine", "disabled", "us")


def test_without_wandb_nothing_is_imported(tmp_path):
    mirror = NoTracker().mirror(tmp_path, name="n", group=None, config={})
    assert isinstance(mirror, NoMirror)
    mirror.event(STEP)
    mirror.pictures([])
    mirror.finish(False)


def test_offline_unless_there_is_an_account(tmp_path):
    netrc = tmp_path / "netrc"
    nothing = {"NETRC": str(netrc)}
    assert default_mode(nothing) == "offline"
    assert default_mode(nothing | {"WANDB_MODE": "disabled"}) == "disabled"
    assert default_mode(nothing | {"WANDB_API_KEY": "0" * 40}) == "online"
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert default_mode(nothing) == "online"
    netrc.write_text("machine example.org login user password x\n")
    assert default_mode(nothing) == "offline"
    netrc.write_text("nonsense")
    assert default_mode(nothing) == "offline"


def test_the_real_wandb_records_a_run_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tracker = Wandb(mode="offline")
        mirror = WandbMirror(tracker, tmp_path, name="n", group="g", config={"a": {"b": [1]}})
        mirror.event({"event": "start", "predicted": {"step_s": 0.1}})
        mirror.event(STEP)
        mirror.event({"event": "summary", "step_s": {"median": 0.1}})
        Image.new("RGB", (4, 4)).save(tmp_path / "timeline.png")
        mirror.pictures([tmp_path / "timeline.png"])
        mirror.finish(True)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert wandb.run is None


def test_nested_values_are_flat_and_nulls_are_left_out():
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": None, "f": 0}) == {"a/b": 1, "a/c/d": 2, "f": 0}


def test_importing_tracking_does_not_import_wandb():
    import subprocess

    code = "import sys, experiments.job.tracking; sys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False).returncode == 0
