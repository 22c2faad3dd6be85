"""Profiles are measured once: the cache, what its keys hold, and the programs that need no ranks."""

import dataclasses
import functools
import io
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from experiments import plan
from experiments import profile as program
from experiments.config.identity import code_of
from experiments.job.profiles import Profiles, emulated
from mdcs.planner.pipeline import floor_bytes
from mdcs.profile.cache import cache_folder
from mdcs.profile.link import Contention
from mdcs.profile.schema import Profile
from tests.experiments import batch, one_process
from tests.mdcs.profiles import recomputable

PROFILE = Path(__file__).parents[1] / "profile.json"
composed = functools.cache(batch.composed)


@pytest.fixture
def folder(tmp_path):
    """Folder of a job that has measured a profile."""
    shutil.copy(PROFILE, tmp_path)
    return tmp_path


def test_an_equal_job_of_another_program_finds_the_profile(folder):
    Profiles().keep(composed("strategy=dp"), folder)
    found = Profiles().find(composed("strategy=fsdp", "scheduler=dear", "run.steps=7", "optimizer.lr=1"))
    assert found is not None and found.parent == cache_folder()
    assert Profile.from_json(found.read_text()) == Profile.from_json((folder / "profile.json").read_text())


def test_a_folder_has_the_profile_of_its_last_job_and_one_that_is_gone_is_not_found(folder):
    known, asked, other = Profiles(), composed("profile.cache=false"), composed("profile.cache=false", "model.layers=3")
    known.keep(asked, folder)
    assert known.find(asked) == folder / "profile.json"
    known.keep(other, folder)
    assert known.find(asked) is None and known.find(other) == folder / "profile.json"
    (folder / "profile.json").unlink()
    assert known.find(other) is None


@pytest.mark.parametrize("override", ["profile.cache=true", "profile.cache=false"])
def test_a_profile_with_recomputation_serves_jobs_without_and_not_the_other_way_round(folder, override):
    known, plain, recomputing = Profiles(), composed(override), composed(override, "recompute=planned")
    known.keep(recomputing, folder)
    assert known.find(plain) == known.find(recomputing) == folder / "profile.json"
    assert (Profiles().find(plain) is not None) == plain.profile.cache
    known.keep(plain, folder)
    assert known.find(recomputing) is None or plain.profile.cache


def test_a_job_measures_recomputation_where_its_budget_needs_it_and_leaves_it_to_others(folder):
    plain = Profile.from_json((folder / "profile.json").read_text())
    known, roomy, tight = Profiles(), composed("budget=floor+0%"), composed(f"budget='{floor_bytes(plain) - 8}'")
    known.keep(roomy, folder)
    assert known.find(roomy) is not None and known.find(tight) is None and Profiles().find(tight) is None
    other = folder / "other"
    other.mkdir()
    (other / "profile.json").write_text(recomputable(plain, freed=8).to_json())
    known.keep(tight, other)
    for jobs_known in (known, Profiles()):
        found = jobs_known.find(tight)
        assert found is not None and found == jobs_known.find(composed("recompute=planned")) != jobs_known.find(roomy)


def test_another_job_measures_its_own(folder):
    Profiles().keep(composed(), folder)
    for override in (
        "model.layers=3", "model.wrap=leaf", "data.batch_size=2", "run.precision=fp64", "cluster.ranks=3",
        "cluster.threads=7", "optimizer=sgd", "optimizer.fused=true", "link=emulated", "link.depth=3",
        "profile.refresh=true", "profile.cache=false",
    ):  # fmt: skip
        assert Profiles().find(composed(override)) is None, override


def test_another_version_or_device_measures_its_own(folder, monkeypatch):
    Profiles().keep(composed(), folder)
    for name, other in (("experiments.config.identity.device_name", "another"), ("importlib.metadata.version", "0.0")):
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda _, other=other: other)
            assert Profiles().find(composed()) is None


@pytest.mark.parametrize("group", ["model", "data", "optimizer"])
def test_a_job_whose_code_has_changed_measures_its_own(folder, monkeypatch, group):
    """An edited copy of a model is not planned for as if it were the other one."""
    config = composed()
    Profiles().keep(config, folder)
    changed = type(getattr(config, group))
    known = code_of
    monkeypatch.setattr("experiments.config.identity.code_of", lambda cls: "changed" if cls is changed else known(cls))
    assert Profiles().find(composed()) is None


def test_jobs_of_one_sweep_share_what_its_first_has_measured_anew(folder):
    profiles = Profiles()
    refreshed = composed("profile.refresh=true")
    assert profiles.find(refreshed) is None
    profiles.keep(refreshed, folder)
    assert profiles.find(refreshed) == folder / "profile.json"


def test_what_is_no_profile_or_has_no_activations_is_not_kept(folder):
    profile = Profile.from_json((folder / "profile.json").read_text())
    empty = tuple(dataclasses.replace(slot, live=0, peak=0) for slot in profile.slots)
    for text in ("{", dataclasses.replace(profile, slots=empty).to_json()):
        (folder / "profile.json").write_text(text)
        Profiles().keep(composed(), folder)
    (folder / "profile.json").unlink()
    Profiles().keep(composed(), folder)
    assert not cache_folder().exists()


def test_a_damaged_file_in_the_cache_is_measured_again(folder):
    Profiles().keep(composed(), folder)
    [file] = cache_folder().iterdir()
    file.write_text("{")
    assert Profiles().find(composed()) is None


@pytest.mark.parametrize(
    ("environment", "where"),
    [({"MDCS_CACHE": "/a"}, "/a/profiles"), ({"XDG_CACHE_HOME": "/b"}, "/b/mdcs/profiles"), ({}, "~/.cache/mdcs/profiles")],
)
def test_where_the_cache_is(monkeypatch, environment, where):
    for name in ("MDCS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(where).expanduser()


def run(folder: Path, program: ModuleType, *overrides: str) -> "subprocess.CompletedProcess[str]":
    return one_process.call(program, folder, *overrides, worker="tests.experiments.stub_worker")


def test_planning_starts_no_ranks_when_the_profile_is_known(folder):
    Profiles().keep(composed(), folder)
    done = run(folder, plan, "strategy=zero2", "hydra.run.dir=out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"profile reused from {cache_folder()}/")
    assert "predicted for one step" in done.stdout
    assert (folder / "out/plan.json").is_file() and (folder / "out/predicted_timeline.json").is_file()
    assert not (folder / "out/ran").exists()
    infeasible = run(folder, plan, "budget=1e-9GiB", f"profile.path={PROFILE}")
    assert infeasible.returncode == 1
    assert infeasible.stderr.startswith("failed: budget: ") and "the smallest budget is" in infeasible.stderr


def test_profiling_measures_once_and_shows(tmp_path):
    first = run(tmp_path, program, "hydra.run.dir=first")
    assert (first.returncode, first.stderr) == (0, "")
    assert (tmp_path / "first/ran").read_text() == "--profile-only"
    assert not (tmp_path / "first/metrics.jsonl").exists()  # what does not train is a run only if it fails
    assert "computing loses per message" in first.stdout
    again = run(tmp_path, program, "hydra.run.dir=again")
    assert again.stdout.startswith("profile reused from ")
    assert not (tmp_path / "again/ran").exists()


def test_a_profile_is_shown_with_its_spread():
    profile = Profile.from_json(PROFILE.read_text())
    profile = dataclasses.replace(
        profile,
        contention=Contention(0.002, 3e-9, 1.0, 0.004, 5e-9, skew_seconds=0.006, dispatch_seconds=0.007),
        spread={f"slot {i}": (0.0, 1.0) for i in range(len(profile.slots))},
        calibration_runs={"zero2 dear": (1.02, 1.0), "dp wfbp": (0.95, 1.0)},
        errors={"compute_per_message": 1e-5},
    )
    console = Console(width=120, record=True, file=io.StringIO())
    program.show(profile, console)
    shown = console.export_text()
    assert "(0.0, 1000.0)" in shown
    assert "predicted against measured in calibration runs: zero2 dear +2.0%, dp wfbp -5.0%" in shown
    for value in ("2000 µs ± 10", "3 ms (assumed)", "100 %", "4000 µs", "5 ms", "6000 µs", "7000 µs"):
        assert value in shown


def test_an_emulated_link_has_as_many_messages_in_flight_as_the_backend():
    """NCCL has one: a plan for two would be predicted faster than it runs."""
    for device, depth in (("cpu", 2), ("cuda", 1)):
        config = composed("link=emulated", "link.depth=2")
        made = emulated(dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device=device)))
        assert made is not None and made[0].depth == depth
