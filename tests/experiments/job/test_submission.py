"""A job that was handed in and cannot begin says so in its folder; one that has lost a host is to go on."""

import copy
import dataclasses
import functools
import shlex
import shutil
from pathlib import Path

import pytest

from analysis.events import METRICS, read_events
from experiments.config import checks
from experiments.config.checks import Started
from experiments.config.identity import identity
from experiments.config.schema import BudgetConfig
from experiments.job import record, submission
from experiments.job.events import provenance
from experiments.job.resolved import with_absolute_paths
from experiments.tasks.hub import Text
from hydra_plugins import _mdcs_jobs as submitted
from launch import preemption
from launch.elastic import Outcome, claim
from mdcs.planner.pipeline import floor_bytes
from mdcs.planner.recompute import Planned
from mdcs.planner.strategies import Uniform
from mdcs.profile.schema import Profile
from tests.experiments import batch
from tests.mdcs.profiles import recomputable

PROFILE = Path(__file__).parents[1] / "profile.json"
SLURM = {"nodes": 1, "ranks_per_node": 2}
LOST = Outcome(False, "host n1 has not answered for 60 s", 2, 7, lost=True)
composed = functools.cache(batch.composed)


@pytest.fixture
def config():
    return copy.deepcopy(composed("model=mlp", "data=synthetic", "run.steps=3", "run.unmeasured_steps=1"))


def run(folder, what=submission.TRAIN, start=lambda *_, **__: Outcome(False, "as told")):
    """Exit code of a job that was submitted. `start` stands in for its ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.elastic.run", start)
        return submission.run(folder, what)


def test_why_a_job_cannot_begin_is_in_its_folder(tmp_path, monkeypatch, config):
    submission.freeze(config, tmp_path, SLURM, tmp_path)
    monkeypatch.setattr("experiments.config.checks.here", Started("srun", 3, 1, "", pytest.fail))
    assert run(tmp_path) == 2
    said = record.read(tmp_path)
    assert (said.state, said.reason) == (record.FAILED, "cluster.ranks: must be 3, as many as are started; got 2")


def test_a_job_is_recorded_with_the_command_that_has_submitted_it(tmp_path, monkeypatch, config):
    asked = ["experiments/train.py", "-m", "model=mlp", "run.name=it's"]
    monkeypatch.setattr("sys.argv", asked)
    submission.freeze(config, tmp_path, SLURM, tmp_path)
    python = shlex.split((tmp_path / submitted.COMMAND).read_text())
    assert python == ["-P", "-m", "experiments.job.submission", str(tmp_path), "train", *asked]
    monkeypatch.setattr("launch.elastic.run", lambda *_, **__: Outcome(False, "as told"))
    provenance.cache_clear()
    assert submission.main(*python[3:]) == 1
    provenance.cache_clear()
    assert read_events(tmp_path / METRICS)[0]["command"] == "mdcs train -m model=mlp 'run.name=it'\"'\"'s'"


@pytest.mark.parametrize(("again", "state"), [("1", record.PREEMPTED), (None, record.FAILED)])
def test_a_job_that_has_lost_a_host_is_not_over_where_it_is_to_go_on(tmp_path, monkeypatch, config, again, state):
    if again is not None:
        monkeypatch.setenv(preemption.REQUEUE, again)
    outcome = batch.run_job(config, tmp_path, start=lambda *_, **__: LOST)
    assert not outcome.ok and record.read(tmp_path).state == state


def test_a_job_that_has_lost_a_host_is_handed_in_again(tmp_path, monkeypatch, config, capsys):
    monkeypatch.setenv(preemption.REQUEUE, "1")
    monkeypatch.setattr(preemption, "requeue", lambda: "")
    submission.freeze(config, tmp_path, SLURM, tmp_path)
    assert run(tmp_path, start=lambda *_, **__: LOST) == 1
    assert f"failed: {LOST.reason}; queued again" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["this", "another"])
def test_a_job_that_slurm_starts_again_plans_with_the_profile_that_it_has_measured(tmp_path, monkeypatch, config, device):
    """Unless it was measured on a node of another kind."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    config.profile.cache = False
    profile, about = Profile.from_json(PROFILE.read_text()), identity(config)
    about |= {} if device == "this" else {"device": device}
    (tmp_path / "profile.json").write_text(dataclasses.replace(profile, about=about).to_json())
    submission.freeze(config, tmp_path, SLURM, tmp_path)
    assert run(tmp_path) == 1
    resolved = checks.load(tmp_path / "config.yaml")
    found = str(tmp_path / "profile.json") if device == "this" else None
    assert (resolved.profile.path, resolved.run.resume) == (found, "auto")


def test_a_job_that_starts_again_goes_on_with_its_own_checkpoints_once_it_has_some(tmp_path, monkeypatch, config):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "former").mkdir()
    (tmp_path / "run").mkdir()
    config.run.resume, resumed = "former", []
    submission.freeze(config, tmp_path / "run", SLURM, tmp_path)
    for step in (0, 1):
        if step:
            (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
        run(tmp_path / "run")
        resumed.append(checks.load(tmp_path / "run/config.yaml").run.resume)
    assert resumed == [str(tmp_path / "former"), "auto"]


def test_files_are_found_from_the_folder_that_a_job_runs_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(PROFILE, "profile.json")
    (tmp_path / "words.txt").write_text("word")
    data = ("data=text", "data.path=words.txt")
    config = batch.composed("model=gpt2-tiny", *data, "profile.path=profile.json", "link=emulated")
    (tmp_path / "run").mkdir()
    submission.freeze(config, tmp_path / "run", SLURM, tmp_path)
    monkeypatch.chdir("/")
    found = checks.load(tmp_path / "run" / submission.CONFIG)
    assert [found.profile.path, found.data.path] == [str(tmp_path / "profile.json"), str(tmp_path / "words.txt")]
    on_the_hub = dataclasses.replace(config, data=Text(path="Salesforce/wikitext", tokenizer="gpt2"))
    assert with_absolute_paths(on_the_hub).data == on_the_hub.data


def test_a_job_whose_folder_is_in_use_leaves_what_is_said_there(tmp_path, config):
    submission.freeze(config, tmp_path, SLURM, tmp_path)
    with claim(tmp_path):
        assert run(tmp_path) == 2
    assert record.read(tmp_path).state == record.SUBMITTED


def test_a_job_that_slurm_does_not_start_again_has_failed(tmp_path, monkeypatch, config):
    monkeypatch.setenv(preemption.REQUEUE, "1")
    monkeypatch.setattr(preemption, "requeue", lambda: "job 3 is over")
    submission.freeze(config, tmp_path, SLURM, tmp_path)
    assert run(tmp_path, start=lambda *_, **__: LOST) == 1
    said = record.read(tmp_path)
    assert (said.state, said.reason) == (record.FAILED, f"{LOST.reason}; job 3 is over")


@pytest.fixture
def sweep(tmp_path, config):
    """A sweep's folder with two jobs that were handed in, and the folder of the one profile that they need."""
    config.profile.cache = False
    for name, strategy in (("0", "dp"), ("1", "fsdp")):
        (tmp_path / name).mkdir()
        submission.freeze(dataclasses.replace(config, strategy=Uniform(strategy)), tmp_path / name, SLURM, tmp_path)
    [first] = {*submitted.before(tmp_path / "0"), *submitted.before(tmp_path / "1")}
    return tmp_path, first


def start(folder, *_, **__):
    """Ranks that leave a profile of this machine."""
    profile, config = Profile.from_json(PROFILE.read_text()), checks.load(folder / "config.yaml")
    (folder / "profile.json").write_text(dataclasses.replace(profile, about=identity(config)).to_json())
    return Outcome(True)


def test_jobs_of_a_sweep_plan_with_the_profile_that_one_job_has_measured_for_them(sweep):
    folder, first = sweep
    assert run(first, submission.MEASURE, start) == 0 and not (first / "metrics.jsonl").exists()
    for name in ("0", "1"):
        run(folder / name, start=start)
        assert checks.load(folder / name / "config.yaml").profile.path == str(first / "profile.json")


def test_recomputation_is_measured_once_for_all_jobs_whose_budgets_need_it(sweep, config):
    folder, first = sweep
    plain = Profile.from_json(PROFILE.read_text())
    measured = []

    def ranks(place, *_, **__):
        asked = checks.load(place / "config.yaml")
        measured.append(asked.recompute.name)
        made = recomputable(plain, freed=8) if asked.recompute == Planned() else plain
        (place / "profile.json").write_text(dataclasses.replace(made, about=identity(asked)).to_json())
        return Outcome(True)

    for name, over in (("2", -8), ("3", -16), ("4", 2**20)):
        (folder / name).mkdir()
        limit = f"{floor_bytes(plain) + over}"
        submission.freeze(dataclasses.replace(config, budget=BudgetConfig(limit)), folder / name, SLURM, folder)
        assert submitted.before(folder / name) == [first]
    assert run(first, submission.MEASURE, ranks) == 0 and measured == ["auto", "planned"]
    for name in "01234":
        run(folder / name, start=start)
        assert checks.load(folder / name / "config.yaml").profile.path == str(first / "profile.json")


def test_a_job_whose_profile_could_not_be_measured_says_why_and_measures_none(sweep):
    folder, first = sweep
    submitted.write(first, submitted.Job("1_0", "logs"))
    assert run(first, submission.MEASURE, lambda *_, **__: Outcome(False, "rank 1 failed: no memory", 1, 0)) == 1
    assert run(folder / "0", start=lambda *_, **__: pytest.fail("no rank may start")) == 2
    said = record.read(folder / "0")
    why = f"profile: the sweep's profile was not measured: rank 1 failed: no memory (its logs are in {first})"
    assert (said.state, said.reason) == (record.FAILED, why)


def test_a_job_alone_measures_its_own_and_leaves_it_to_later_ones(sweep):
    folder, first = sweep
    run(folder / "0", start=start)
    assert checks.load(folder / "0/config.yaml").profile.path is None
    assert (first / "profile.json").read_text() == (folder / "0/profile.json").read_text()
    run(folder / "1", start=start)
    assert checks.load(folder / "1/config.yaml").profile.path == str(first / "profile.json")


def test_a_profile_of_another_kind_of_node_is_not_planned_with_and_that_is_said(sweep, monkeypatch):
    folder, first = sweep
    run(first, submission.MEASURE, start)
    monkeypatch.setattr("experiments.config.identity.device_name", lambda config: "another")
    with pytest.warns(UserWarning, match="or with other libraries: this job measures its own"):
        run(folder / "0", start=start)
    assert checks.load(folder / "0/config.yaml").profile.path is None


def test_a_profile_is_measured_for_what_it_depends_on_and_anew_when_forced(tmp_path, config):
    """Not for every plan, and for none where the engine needs none."""
    def first(launcher=SLURM, **changed):
        submission.freeze(dataclasses.replace(config, **changed), tmp_path, launcher, tmp_path)
        return submitted.before(tmp_path)

    plain = first()
    assert first(strategy=Uniform("fsdp")) == plain and len(plain) == 1
    assert first(launcher={**SLURM, "nodes": 2}) != plain and first(data=dataclasses.replace(config.data, batch_size=3)) != plain
    forced = first(sweep=dataclasses.replace(config.sweep, force=True))
    assert forced != plain and first() == forced
    peer = batch.composed("model=mlp", "data=synthetic", "engine=ddp")
    assert first(engine=peer.engine) == []
