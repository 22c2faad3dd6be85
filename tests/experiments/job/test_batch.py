"""The largest batch within a budget and the fastest, from profiles of equal jobs with other batches."""

import dataclasses
import functools
from pathlib import Path

import pytest

from experiments import plan as program
from experiments.config import checks, rules
from experiments.config.schema import Config, ConfigError
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import floor_bytes
from mdcs.profile.schema import Profile
from tests.experiments.batch import QUIET
from tests.experiments.batch import composed as composed_job
from tests.mdcs.profiles import recomputable

FOUR = Profile.from_json((Path(__file__).parents[1] / "profile.json").read_text())


def of_batch(size: int) -> Profile:
    """Bytes grow with the batch, seconds as well beyond half of those of four samples."""
    sized = [(s, {"live": s.live * size // 4, "peak": s.peak * size // 4}) for s in FOUR.slots]
    slots = (dataclasses.replace(s, seconds=s.seconds * (0.5 + 0.125 * size), **bytes_) for s, bytes_ in sized)
    return dataclasses.replace(FOUR, slots=tuple(slots))


@functools.cache
def composed(*overrides: str) -> Config:
    return composed_job("strategy=greedy", *overrides)


def found(tmp_path: Path, budget: int, *overrides: str, **profiles: Profile) -> tuple[program.Found, str, Config]:
    """Result of the job when these profiles are known, by `of_N`."""
    known, base = Profiles(), composed("recompute=planned")  # auto measures it, too: some batch needs it
    for name, profile in profiles.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(profile.to_json())
        size = int(name.removeprefix("of_"))
        known.keep(dataclasses.replace(base, data=dataclasses.replace(base.data, batch_size=size)), tmp_path / name)
    config = composed("batch.find=largest", f"budget='{budget}'", *overrides)
    return *program.find(config, tmp_path / "job", QUIET, known=known), config


def planned_again(folder: Path) -> Plan:
    """The plan of the job in this folder, made with the profile that is there."""
    job = checks.load(folder / "config.yaml")
    rules.check(job)  # the profile is accepted as one of this batch
    assert jobs.prepare("plan", job, folder.parent / "again", QUIET) == ""
    return Plan.from_json((folder.parent / "again/plan.json").read_text())


def test_the_largest_batch_is_that_of_the_budget_and_the_job_can_go_on_with_it_and_its_profile(tmp_path):
    budget = floor_bytes(of_batch(11))
    batches, reason, config = found(tmp_path, budget, of_4=of_batch(4), of_16=of_batch(16))
    assert (reason, batches.largest.batch, batches.profiled) == ("", 11, (4, 16))
    prediction = batches.largest.plan.prediction
    assert prediction.peak_bytes <= budget < floor_bytes(of_batch(12))
    assert batches.wanted(config) is batches.largest
    kept = Plan.from_json((tmp_path / "job/plan.json").read_text())
    written = checks.load(tmp_path / "job/config.yaml")
    assert (written.data.batch_size, written.batch.find) == (11, None)
    made = planned_again(tmp_path / "job")
    assert kept.prediction == made.prediction == prediction
    assert made.profile.about["calculated"] == "from batches of 4 and 16" and "inputs" not in made.profile.about
    assert kept.profile.about == made.profile.about


@pytest.mark.parametrize("rule", ["planned", "auto"])
def test_a_batch_with_room_by_recomputation_goes_on_with_all_that_its_profile_knows(tmp_path, rule):
    profiles = {f"of_{n}": recomputable(of_batch(n), 0, freed=20 * n, seconds=0.01) for n in (4, 16)}
    batches, reason, _ = found(tmp_path, floor_bytes(of_batch(11)), f"recompute={rule}", **profiles)
    largest = batches.largest
    assert reason == "" and largest.batch > 11 and "full" in largest.plan.recompute
    made = planned_again(tmp_path / "job")
    assert (made.recompute, made.prediction) == (largest.plan.recompute, largest.plan.prediction)


def test_a_profile_that_is_named_counts_as_proportional(tmp_path):
    (tmp_path / "profile.json").write_text(FOUR.to_json())
    batches, reason, _ = found(tmp_path, 10**9, f"profile.path={tmp_path / 'profile.json'}", "batch.at_most=8")
    assert reason == "" and batches.profiled == (4,)
    assert batches.largest.plan.prediction.compute_s == pytest.approx(2 * sum(s.seconds for s in FOUR.slots), rel=0.3)


def test_the_profile_that_is_named_is_never_replaced(tmp_path):
    path = tmp_path / "job/profile.json"
    path.parent.mkdir()
    path.write_text(of_batch(4).to_json())
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir.*over profile\.path"):
        found(tmp_path, 2**30, f"profile.path={path}")
    assert Profile.from_json(path.read_text()) == of_batch(4)


def test_a_budget_below_one_sample_is_one_error(tmp_path):
    with pytest.raises(jobs.Infeasible, match="^batch.find=largest: ") as error:
        found(tmp_path, 10**4, of_4=of_batch(4), of_16=of_batch(16))
    assert str(error.value).count("smallest budget is") == 1 and not (tmp_path / "job/plan.json").exists()


def test_programs_that_train_take_a_number(tmp_path):
    config = composed("batch.find=largest", "budget=1GiB")
    for job in (jobs.run, functools.partial(jobs.prepare, "profile")):
        with pytest.raises(ConfigError, match=r"batch\.find: is for mdcs plan; other commands take data\.batch_size"):
            job(config, tmp_path, QUIET)
    assert not list(tmp_path.iterdir())
