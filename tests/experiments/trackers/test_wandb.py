"""The real W&B, offline: what it has written is read back. What it does online is asked of a stand-in."""

import dataclasses
import hashlib
import json
import platform
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from experiments.trackers import wandb as tracked
from experiments.trackers.tracker import Aside, Shown
from experiments.trackers.wandb import Wandb, default_mode
from tests.experiments.trackers.offline import Read

STEP = {"event": "step", "step": 1, "loss": 2.5, "step_s": 0.2, "overlap_ratio": 0.5, "bytes": {"AR": 10}, "peak_bytes": None}
PREDICTED = {"step_s": 0.1, "memory": {"total": 7}}
OFFLINE = Wandb(mode="offline", timeout_s=120)
SECRET = "0123456789abcdef" * 2 + "deadbeef"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("artifacts")))


def shown(folder: Path, kind: str = "train", **config) -> Shown:
    return Shown(folder, "abc123", "mine", "today-1f3a9c0d", kind, {"model": {"depth": 4}, **config})


def told(run: Shown, tracker: Wandb, *calls: tuple, ok: bool = True) -> None:
    """The calls, aside, as in a job; no warning may come of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        aside = Aside(tracker.title, tracker.timeout_s, lambda: tracker.mirror(run))
        for method, *arguments in calls:
            aside.call(method, *arguments)
        aside.finish(ok)


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """A whole run, read back."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("run")
    Image.new("RGB", (4, 4)).save(folder / "timeline.png")
    for name in ("plan.json", "profile.json"):
        (folder / name).write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", SECRET)
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("artifacts")))
        told(
            shown(folder), OFFLINE, ("event", {"event": "job", "model": "mlp"}),
            ("event", {"event": "start", "predicted": PREDICTED, "tried": [{"strategy": "dp", "measured_ms": 2.0}]}),
            ("event", STEP), ("event", {**STEP, "step": 2}),
            ("event", {"event": "eval", "step": 2, "loss": 2.0}),
            ("event", {"event": "summary", "status": "ok", "step_s": {"median": 0.1}}),
            ("pictures", [folder / "timeline.png"]), ("document", "profile", folder / "profile.json", True),
            ("document", "plan", folder / "plan.json", False),
        )  # fmt: skip
    return folder, Read(folder)


def test_a_run_has_its_id_group_type_config_and_summary(read):
    run = read[1].run
    assert (run.run_id, run.run_group, run.job_type, run.display_name) == ("abc123", "today-1f3a9c0d", "train", "mine")
    assert read[1].exit_code == 0 and read[1].summary["step_s/median"] == 0.1
    assert read[1].config["model"] == {"depth": 4}
    assert read[1].config["start"] == {"predicted": PREDICTED} and read[1].config["job"] == {"model": "mlp"}


def test_steps_and_evaluations_are_over_the_training_step(read):
    steps = [row for row in read[1].history if "train/step_s" in row]
    curves = [(row["train/step"], row["train/overlap_ratio"], row["train/bytes/AR"]) for row in steps]
    assert curves == [(1, 0.5, 10), (2, 0.5, 10)]
    assert [row["train/loss_rank0"] for row in steps] == [2.5, 2.5] and not {"train/peak_bytes", "train/loss"} & steps[0].keys()
    assert [{key: row[key] for key in row if key.startswith("predicted/")} for row in steps] == [{"predicted/step_s": 0.1}] * 2
    [evaluated] = [row for row in read[1].history if "eval/loss" in row]
    assert (evaluated["train/step"], evaluated["eval/loss"]) == (2, 2.0)
    assert read[1].metrics == {"train/step": "", "train/*": "train/step", "eval/*": "train/step", "predicted/*": "train/step"}


def test_plan_and_profile_are_artifacts_named_by_content_with_pictures_and_a_table_of_what_was_tried(read):
    folder, run = read
    content = hashlib.sha256(b"{}").hexdigest()[:12]
    assert {kind: own for kind, own in run.artifacts.items() if kind != "run_table"} == {
        "profile": (f"profile-{content}", ["profile.json"], True), "plan": (f"plan-{content}", ["plan.json"], False)
    }  # fmt: skip
    assert list(folder.glob("wandb/*/files/media/images/timeline_*.png"))
    tables = [json.loads(path.read_text()) for path in folder.glob("wandb/*/files/media/table/candidates_*.json")]
    assert tables and all((t["columns"], t["data"]) == (["strategy", "measured_ms"], [["dp", 2.0]]) for t in tables)


def test_no_key_is_in_any_file(read):
    folder, _ = read
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 4
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_the_commit_the_command_and_the_host_are_told(read):
    here = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    run = read[1]
    assert (run.run.git.commit, run.run.host) == (here, platform.node())
    assert list(run.environment[0].args) == sys.argv[1:] and "stats" in run.kinds


def test_a_run_that_goes_on_offline_is_rebuilt(tmp_path):
    told(shown(tmp_path), OFFLINE, ("event", STEP), ok=False)
    assert Read(tmp_path).exit_code == 1
    resumed = shown(tmp_path, run={"resume": "auto"})
    told(resumed, OFFLINE, ("past", [STEP]), ("event", {**STEP, "step": 2}))
    read = Read(tmp_path)  # of which there is one
    assert [row["train/step"] for row in read.history if "train/step" in row] == [1, 2]
    assert read.exit_code == 0


def test_a_sweep_has_a_table_and_budget_against_step_time(tmp_path):
    columns, rows = ("name", "budget_bytes", "step_s"), [["a", 0.5, 0.2], ["b", None, 0.1], ["c", 1.0, 0.1]]
    job = {"event": "job", "model": "mlp", "host": "here", "command": "mdcs train", "commit": "1f3a"}
    told(shown(tmp_path, "sweep"), dataclasses.replace(OFFLINE, private=True), ("event", job), ("table", columns, rows))
    read = Read(tmp_path)
    assert read.config["job"] == {"model": "mlp"}
    assert (read.run.host, read.run.git.commit) == ("private", "") and not {"environment", "stats"} & read.kinds
    assert not list(tmp_path.glob("wandb/*/files/requirements.txt"))
    assert read.run.job_type == "sweep"
    tables = {row["runs._type"]: row["runs.nrows"] for row in read.history if "runs._type" in row}
    assert tables == {"table-file": 3}
    [chart] = [value for key, value in read.config.items() if key == "_wandb.visualize.step time over budget"]
    assert chart["panel_config"]["fieldSettings"] == {"x": "budget_bytes", "y": "step_s"}


# ---- online, of a stand-in


def fake_wandb(monkeypatch) -> list[dict]:
    calls: list[dict] = []

    def nothing(*args, **kwargs):
        return types.SimpleNamespace(**kwargs)

    def init(**kwargs):
        calls.append(kwargs)
        return types.SimpleNamespace(define_metric=nothing, log=lambda values: calls.append(values), finish=nothing)

    module = types.ModuleType("wandb")
    module.init, module.Settings = init, nothing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_a_run_that_goes_on_online_keeps_its_steps(tmp_path, monkeypatch):
    calls = fake_wandb(monkeypatch)
    run = shown(tmp_path, run={"resume": "auto"})
    told(run, Wandb(group="ours", entity="us", id="own"), ("past", [STEP]), ("event", {**STEP, "step": 2}))
    init, *logged = calls
    assert (init["mode"], init["resume"], init["id"], init["group"], init["entity"]) == ("online", "allow", "own", "ours", "us")
    assert [values["train/step"] for values in logged] == [2]
    calls.clear()
    told(shown(tmp_path), Wandb())  # one that runs again takes the place of its run
    assert (calls[0]["id"], calls[0]["resume"], calls[0]["job_type"]) == ("abc123", None, "train")


def test_a_run_that_cannot_be_online_is_offline_and_so_are_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(tracked, "_UNREACHED", [])
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    tracker = Wandb(timeout_s=4)
    with pytest.warns(UserWarning) as said:
        mirror = tracker.mirror(shown(tmp_path))
    [warning] = [str(each.message) for each in said]
    send = f"wandb sync {tmp_path}/wandb/offline-run-*"
    assert warning.startswith(f"W&B cannot be reached, runs are kept offline ({send} sends this one): CommError")
    assert SECRET not in warning and "\n" not in warning
    mirror.event(STEP)
    mirror.finish(True)
    assert Read(tmp_path).run.run_id == "abc123-offline"
    calls = fake_wandb(monkeypatch)
    told(shown(tmp_path), tracker)
    assert calls[0]["mode"] == "offline"


def test_offline_unless_there_is_an_account(tmp_path):
    netrc = tmp_path / "netrc"
    nothing = {"NETRC": str(netrc)}
    assert default_mode(nothing) == "offline"
    assert default_mode(nothing | {"WANDB_MODE": "disabled"}) == "disabled"
    assert default_mode(nothing | {"WANDB_API_KEY": "0" * 40}) == "online"
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert default_mode(nothing) == "online"
    netrc.write_text("machine ml.example.org login user password x\n")
    assert default_mode(nothing) == "offline"
    assert default_mode(nothing | {"WANDB_BASE_URL": "https://ml.example.org/"}) == "online"
    (tmp_path / "settings").write_text("[default]\nbase_url = https://ml.example.org\n")  # by wandb login --host
    assert default_mode(nothing | {"WANDB_CONFIG_DIR": str(tmp_path)}) == "online"
    netrc.write_text("nonsense")
    assert default_mode(nothing) == "offline"
