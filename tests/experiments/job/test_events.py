"""Words of a run about itself: whether its predictions are to be believed."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from experiments.job import record
from experiments.job.events import command_began, departures, doubt, job_event, provenance, start_event
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from tests.experiments.batch import composed
from tests.mdcs.profiles import chain, link, recomputable


def test_a_step_that_is_more_than_half_off_is_a_doubt_and_a_calibration_run_only_with_it() -> None:
    plan = make_plan(chain(3), Uniform("dp"), Wfbp())
    assert plan.prediction is not None
    seconds = plan.prediction.step_s
    assert doubt(plan, 1.9 * seconds) == doubt(plan, seconds / 1.4) == ""
    said = doubt(plan, 2.1 * seconds)
    figures = f"a step was predicted to take {seconds * 1e3:.1f} ms, and took {2.1 * seconds * 1e3:.1f}"
    assert said == f"{figures}; profile.refresh=true measures anew"
    assert doubt(plan, seconds / 1.6).startswith("a step was predicted")
    off_in_calibration = make_plan(dataclasses.replace(chain(3), calibration_runs={"dp wfbp": (4.0, 1.0)}), Uniform("dp"), Wfbp())
    assert doubt(off_in_calibration, seconds) == ""
    assert "took" in doubt(off_in_calibration, 3 * seconds) and "calibration run" in doubt(off_in_calibration, 3 * seconds)


@pytest.mark.parametrize("said", ["", "a step took 9 times as long as predicted"])
def test_a_doubt_stays_with_the_status_of_the_run(tmp_path, said: str) -> None:  # type: ignore[no-untyped-def]
    record.write(tmp_path, "identity", record.OK, doubt=said)
    read = record.read(tmp_path)
    assert read is not None and (read.state, read.doubt, read.reason) == (record.OK, said, "")


def test_a_command_began_before_its_job_and_other_jobs_when_they_are_prepared() -> None:
    config = composed()
    now = time.time()
    assert now - 24 * 3600 < job_event(config, command_began())["began"] < now <= job_event(config)["began"] <= time.time()


def test_a_run_tells_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/mdcs/experiments/train.py", "model=mlp", "model.wrap=[a, b]"])
    provenance.cache_clear()
    told = provenance()
    provenance.cache_clear()
    assert set(told) == {"commit", "command", "host", "torch"} and all(told.values())
    assert told["command"] == "mdcs train model=mlp 'model.wrap=[a, b]'"


def test_a_start_tells_parameters_rate_and_what_is_recomputed() -> None:
    profile = recomputable(chain(3, 4, 5, link=link(1e-9)), 0, 1, freed=100)
    paced = composed("model=mlp", "data=synthetic", "link=emulated", "link.rate_gbit=0.5")
    real = composed("model=mlp", "data=synthetic", "budget=75% of ddp")
    told = start_event(paced, make_plan(profile, Uniform("dp"), Wfbp(), recompute="all"), None)
    assert (told["parameters"], told["link_gbit"], told["recomputed"]) == (12, 0.5, ["a", "b"])
    recomputing, plain = (make_plan(profile, Uniform("dp"), Wfbp(), recompute=rule) for rule in ("all", "none"))
    told = start_event(real, plain, None, parameters=7)
    assert told["budget_bytes"] == start_event(real, recomputing, None)["budget_bytes"]  # DDP recomputes nothing
    assert (told["parameters"], told["link_gbit"], told["recomputed"]) == (7, pytest.approx(8), [])


def test_departing_steps_are_counted_and_cost_what_they_take_beyond_the_median_of_the_others() -> None:
    def told(*steps: tuple[float, dict[str, int]]) -> dict[str, object]:
        return departures([SimpleNamespace(times=SimpleNamespace(step_s=seconds), departures=what) for seconds, what in steps])

    assert told((1.0, {}), (1.2, {}), (9.0, {}), (2.0, {"left out a": 2}), (0.7, {"left out a": 1, "ran b once more": 1})) == {
        "departures": ["2 of 5 steps left out a", "1 of 5 steps ran b once more"],
        "departures_cost_s": pytest.approx(2.7 - 2 * 1.2),
    }
    assert told((1.0, {"left out a": 1})) == {"departures": ["1 of 1 steps left out a"], "departures_cost_s": None}
    assert told((1.0, {})) == {}
