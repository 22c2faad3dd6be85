"""Whether activations are recomputed is decided by two plans, each of its own profile."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from experiments.config import checks
from experiments.config.schema import Config, ConfigError
from experiments.job import checkpointing, record
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from mdcs.planner.pipeline import floor_bytes
from mdcs.profile.schema import Profile

PROFILE = Profile.from_json((Path(__file__).parents[1] / "profile.json").read_text())


def recomputing(profile: Profile) -> Profile:
    """Half of the activations, and a backward that takes longer."""
    slots = tuple(
        dataclasses.replace(s, seconds=s.seconds * (1.5 if s.phase == "B" else 1), live=s.live // 2, peak=s.peak // 2)
        for s in profile.slots
    )
    return dataclasses.replace(profile, slots=slots)


FLOORS = {"without": floor_bytes(PROFILE), "with": floor_bytes(recomputing(PROFILE))}


def composed(*overrides: str) -> Config:
    with checks.composing():
        return checks.compose_config(["strategy=greedy", *overrides])


def decided(tmp_path: Path, budget: int | None) -> tuple[Config, str, str]:
    known = Profiles()
    for name, setting, profile in (("off", "false", PROFILE), ("on", "true", recomputing(PROFILE))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(profile.to_json())
        known.keep(composed(f"model.checkpointing={setting}"), tmp_path / name)
    said = Console(width=200, file=io.StringIO(), record=True)
    limit = [] if budget is None else [f"budget.gib={budget / 2**30!r}"]
    job = composed("model.checkpointing=auto", *limit)

    def plan(config: Config, folder: Path) -> str:
        return jobs.plan(config, folder, said, known=known)

    return *checkpointing.decide(job, tmp_path / "job", said, plan), said.export_text()


def test_what_needs_no_recomputation_does_without(tmp_path):
    config, reason, said = decided(tmp_path, None)
    assert (config.model.checkpointing, reason) == (False, "")
    assert "model.checkpointing=auto: without, because without: " in said and " ms predicted" in said
    assert (tmp_path / "job/checkpointing-with/plan.json").exists()


def test_what_fits_in_no_other_way_recomputes(tmp_path):
    assert FLOORS["with"] < FLOORS["without"]
    config, reason, said = decided(tmp_path, (FLOORS["with"] + FLOORS["without"]) // 2)
    assert (config.model.checkpointing, reason) == (True, "")
    assert "with, because without: " in said and "budget" in said


def test_if_neither_fits_the_reason_has_both(tmp_path):
    config, reason, _ = decided(tmp_path, FLOORS["with"] // 2)
    assert config.model.checkpointing == "auto"
    assert reason.startswith("model.checkpointing=auto: no plan either way. without: ") and "; with: " in reason


@pytest.mark.parametrize("setting", ["true", "false"])
def test_what_is_said_is_left_as_it_is(tmp_path, setting):
    config = composed(f"model.checkpointing={setting}")
    nothing = Console(file=io.StringIO())
    assert checkpointing.decide(config, tmp_path, nothing, lambda *_: pytest.fail("no plan is needed")) == (config, "")


def test_a_job_whose_plans_both_fail_has_failed(tmp_path, monkeypatch):
    """Nothing is started, and a sweep that is repeated knows of it."""
    config = composed("model.checkpointing=auto")
    monkeypatch.setattr(jobs, "plan", lambda *_, **__: "no memory")
    start = {"start": lambda *_, **__: pytest.fail("no rank may start")}
    outcome = jobs.run(config, tmp_path, Console(file=io.StringIO()), **start)
    assert outcome.reason == "model.checkpointing=auto: no plan either way. without: no memory; with: no memory"
    said = record.read(tmp_path)
    assert (said.state, said.reason, said.identity) == (record.FAILED, outcome.reason, record.identity_of(config))


def test_a_profile_takes_no_auto(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.checkpointing: only a plan decides auto"):
        jobs.profile(composed("model.checkpointing=auto"), tmp_path, Console(file=io.StringIO()))
    assert not list(tmp_path.iterdir())
