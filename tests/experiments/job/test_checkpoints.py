"""A job goes on from the checkpoints of another, and mixes them with nobody's."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import analysis
from analysis.events import read_events
from experiments.config.schema import ConfigError
from experiments.job import checkpoints
from launch.elastic import Warm
from tests.experiments.batch import composed, run_job

JOB = (
    *("model=mlp", "data=synthetic", "optimizer.schedule=linear", "strategy=fsdp", "scheduler=dear", "run.accumulation=2"),
    *("run.steps=6", "run.unmeasured_steps=1", "run.profile_iterations=2", "cluster.threads=1"),
)


def losses(folder: Path, warm: Warm, *overrides: str) -> dict[int, float]:
    outcome = run_job(composed(*JOB, *overrides), folder, start=warm.run)
    assert outcome.ok, outcome.reason
    steps = analysis.load_run(folder).steps
    return dict(zip(steps["step"], steps["loss"], strict=True))


def test_the_last_step_has_a_checkpoint_whatever_save_every_is(tmp_path):
    """And no step two."""
    config = composed(*JOB)
    for every, wanted in ((4, [4, 6]), (3, [3, 6]), (100, [6]), (None, [])):
        saved: list[int] = []
        engine = SimpleNamespace(checkpoint=lambda *_, **__: None)
        config.run.save_every = every
        kept = checkpoints.Checkpoints(config, tmp_path, engine, SimpleNamespace(state_dict=dict), None)
        for step in range(1, 7):
            engine.checkpoint = lambda *_, step=step, saved=saved, **__: saved.append(step)
            if kept.due(step):
                kept.save(step)
        assert saved == wanted


@pytest.mark.slow
def test_a_job_goes_on_as_if_it_had_not_stopped(tmp_path, warm):
    whole = losses(tmp_path / "whole", warm, "run.save_every=3", "run.keep=5")
    own = tmp_path / "whole" / checkpoints.FOLDER
    assert sorted(path.name for path in own.iterdir()) == ["step-00000003", "step-00000006"]
    written = [event for event in read_events(tmp_path / "whole" / "metrics.jsonl") if event["event"] == "checkpoint"]
    assert [event["step"] for event in written] == [3, 6] and all(event["staged_bytes"] > 0 for event in written)
    profile = f"profile.path={tmp_path / 'whole' / 'profile.json'}"
    rest = losses(tmp_path / "rest", warm, f"run.resume={own / 'step-00000003'}", profile)
    assert rest == {step: whole[step] for step in (4, 5, 6)}


def test_checkpoints_of_a_former_run_are_not_mixed_with_new_ones_and_what_is_resumed_must_be_there(tmp_path):
    (tmp_path / checkpoints.FOLDER / "step-00000003").mkdir(parents=True)
    config = composed(*JOB, "run.save_every=2")
    with pytest.raises(ConfigError, match="run.resume: .*/checkpoints has checkpoints of a former run: go on with auto, or "):
        checkpoints.require(config, tmp_path)
    config.run.resume = "auto"
    checkpoints.require(config, tmp_path)
    config.run.resume = f"{tmp_path}/nothing"
    with pytest.raises(ConfigError, match="run.resume: no such folder: .*/nothing"):
        checkpoints.require(config, tmp_path)
    config.run.resume = config.run.save_every = None
    checkpoints.require(config, tmp_path)


def test_a_checkpoint_of_other_shapes_is_refused_before_anything_is_measured(tmp_path, warm):
    losses(tmp_path / "first", warm, "run.save_every=3", "run.steps=3")
    asked = composed(*JOB, f"run.resume={tmp_path / 'first/checkpoints'}", "model.width=64")
    outcome = run_job(asked, tmp_path / "second", start=warm.run)
    assert "run.resume: " in outcome.reason and "before step 1" in outcome.reason
    assert not (tmp_path / "second/profile.json").exists()
