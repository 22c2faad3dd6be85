"""TensorBoard's event files, read back."""

import json
from pathlib import Path

import pytest

from experiments.trackers.tracker import FOLDER, Shown, TensorBoard

pytest.importorskip("tensorboard")

STEP = {"event": "step", "step": 1, "loss": 2.5, "step_s": 0.2, "warmup": True, "bytes": {"AR": 10}, "peak_bytes": None}


def told(folder: Path, *calls: tuple):
    """The events of a run that was told so."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mirror = TensorBoard().mirror(Shown(folder, "abc123", "mine", "today", "train", {"model": {"depth": 4}}))
    for method, *arguments in calls:
        getattr(mirror, method)(*arguments)
    mirror.finish(True)
    read = EventAccumulator(str(folder / FOLDER))
    read.Reload()
    return read


def test_steps_evaluations_texts_and_pictures(tmp_path):
    from PIL import Image

    Image.new("RGB", (6, 4)).save(tmp_path / "timeline.png")
    read = told(
        tmp_path, ("event", {"event": "job", "model": "mlp"}),
        ("event", {"event": "start", "predicted": {"step_s": 0.3}}), ("event", STEP),
        ("event", {**STEP, "step": 2, "step_s": 0.1}),
        ("event", {"event": "eval", "step": 2, "loss": 2.0}), ("event", {"event": "summary", "step_s": {"median": 0.1}}),
        ("pictures", [tmp_path / "timeline.png"]), ("document", "plan", tmp_path / "plan.json", False),
        ("table", ("name", "step_s"), [["a", 0.2], ["b", None]]),
    )  # fmt: skip
    assert [(e.step, e.value) for e in read.Scalars("train/step_s")] == [(1, pytest.approx(0.2)), (2, pytest.approx(0.1))]
    assert [e.value for e in read.Scalars("predicted/step_s")] == pytest.approx([0.3, 0.3])
    assert [e.value for e in read.Scalars("train/bytes/AR")] == [10, 10]
    assert [(e.step, e.value) for e in read.Scalars("eval/loss")] == [(2, 2.0)]
    assert "train/peak_bytes" not in read.Tags()["scalars"]

    def text(name: str) -> str:
        [event] = read.Tensors(f"{name}/text_summary")
        return event.tensor_proto.string_val[0].decode()

    assert json.loads(text("config").strip("`json\n")) == {"model": {"depth": 4}}
    assert json.loads(text("summary").strip("`json\n"))["step_s"] == {"median": 0.1}
    assert text("runs").splitlines()[2] == "| a | 0.2 |"
    [picture] = read.Images("timeline")
    assert (picture.width, picture.height) == (6, 4)


def test_a_run_that_goes_on_is_written_anew(tmp_path):
    told(tmp_path, ("event", STEP))
    read = told(tmp_path, ("past", [STEP]), ("event", {**STEP, "step": 2}))
    assert [event.step for event in read.Scalars("train/loss_rank0")] == [1, 2]
