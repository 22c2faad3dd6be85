"""`mdcs curve` from a user's side: what is predicted, what is measured, and what is left when a job fails."""

import json
import subprocess
from pathlib import Path

import pytest

from experiments import curve as program
from experiments.config.schema import BudgetConfig
from tests.experiments import one_process
from tests.experiments.batch import composed

PROFILE = Path(__file__).with_name("profile.json")
SMALL = (
    "hydra.run.dir=out", "budget=floor+30%", "curve.shares=5", "curve.budgets=[floor+0%,floor+30%]", "run.steps=3",
    "run.unmeasured_steps=1", "strategy=greedy", "scheduler=dear", f"profile.path={PROFILE}",
)  # fmt: skip


def traded(folder: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    return one_process.call(program, folder, *SMALL, *overrides, worker="tests.experiments.stub_worker")


def points(folder: Path, part: str) -> list[dict]:
    document = json.loads((folder / "out/curve.json").read_text())
    assert document["schema"] == 2 and document["floor_bytes"] > 0
    return [point for point in document["points"] if point["part"] == part]


def test_curve_and_front_are_predicted_without_starting_a_rank(tmp_path):
    done = traded(tmp_path, "strategy=greedy,dp", "scheduler=wfbp,dear")
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.rglob("launch.json"))
    curve, front = points(tmp_path, "curve"), points(tmp_path, "front")
    assert (len(curve), len(front)) == (4 * 5, 4 * 2)
    assert {(p["strategy"], p["scheduler"]) for p in front} == {(s, c) for s in ("greedy", "dp") for c in ("wfbp", "dear")}
    for own in (front[i : i + 2] for i in range(0, 8, 2)):
        steps = [p["predicted"]["step_s"] if p["predicted"] else float("inf") for p in own]
        assert steps == sorted(steps, reverse=True)
    assert all(p["measured"] is None for p in curve + front)
    assert all("does not fit" in p["reason"] for p in curve + front if p["predicted"] is None)
    greedy = [p for p in curve if (p["strategy"], p["scheduler"]) == ("greedy", "dear")]
    [stop] = [p for p in greedy if p["stop_point"]]
    assert stop["predicted"]["step_s"] == min(p["predicted"]["step_s"] for p in greedy)
    assert "predicted" in done.stdout and "measured" not in done.stdout
    assert "stop point of greedy · dear: schedule_share " in done.stdout
    assert (tmp_path / "out/tradeoff.png").stat().st_size > 1000
    assert (tmp_path / "out/table.csv").read_text().count("\n") == 1 + 28


@pytest.mark.slow
def test_without_a_budget_there_is_a_front_and_no_curve(tmp_path, no_pictures):
    done = traded(tmp_path, "budget.limit=none")
    assert done.returncode == 0
    assert (points(tmp_path, "curve"), len(points(tmp_path, "front"))) == ([], 2)


def test_every_point_has_the_measurement_of_its_own_plan_and_a_plan_runs_once(tmp_path, no_pictures):
    """In a front, too, where a smaller budget may have been faster; plans of several shares may be equal."""
    assert traded(tmp_path, "curve.measure=all").returncode == 0
    predicted: dict[str, set[float]] = {}
    for point in points(tmp_path, "curve") + points(tmp_path, "front"):
        if point["measured"]:
            predicted.setdefault(point["measured"]["run"], set()).add(point["predicted"]["step_s"])
    assert len(predicted) > 1 and all(len(of_run) == 1 for of_run in predicted.values())
    assert traded(tmp_path, "curve.measure=curve", "strategy=fsdp", "scheduler=sequential").returncode == 0
    assert [point["measured"]["run"] for point in points(tmp_path, "curve")] == ["runs/0"] * 5


def test_a_job_that_fails_ends_nothing_and_is_said(tmp_path, no_pictures):
    done = traded(tmp_path, "curve.measure=front", "run.name=raise")
    assert done.returncode == 1
    assert done.stderr.startswith("failed: ") and "jobs failed: 0 (greedy · dear): " in done.stderr
    assert [p["measured"]["status"] for p in points(tmp_path, "front")][0] == "failed"
    assert len(points(tmp_path, "curve")) == 5


def test_an_unknown_option_is_one_line(tmp_path):
    done = traded(tmp_path, "curve.schedulers=[dear,deer]")
    assert done.returncode == 2
    assert done.stderr.startswith("scheduler: no such option deer; options: dear, ")
    assert not (tmp_path / "out/curve.json").exists()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["budget.limit=none"], "needs a budget to divide: add budget=40GiB or budget=floor+10%"),
        ([], "needs recompute=planned, got auto"),
        (["recompute=planned", "curve.strategies=[greedy,joint]"],
         "has no effect with strategy=joint, which divides the budget itself"),
    ],
)  # fmt: skip
def test_a_plane_needs_something_to_divide(tmp_path, overrides, why):
    done = traded(tmp_path, "curve.plane=3", *overrides)
    assert (done.returncode, done.stderr) == (2, f"curve.plane: {why}\n")


def test_a_point_s_job_keeps_the_rest_of_the_budget():
    config = composed("budget=floor+50%", "budget.exceeded=raise", "budget.reserve_mib=3")
    job = program.Planner(config, None, 0).job(2**30, 0.25, 0.5)
    assert job.budget == BudgetConfig("1GiB", schedule_share=0.25, activation_share=0.5, reserve_mib=3, exceeded="raise")


def test_of_a_plane_its_corners_middle_and_stop_point_are_measured(tmp_path):
    profile = json.loads(PROFILE.read_text())
    use = {"forward": 1, "backward": 0, "freed": 90, "seconds": 0.001, "peak": 190}
    profile["recompute"] = [{"unit": 1, "choice": "full", "uses": [use]}]
    (tmp_path / "recomputing.json").write_text(json.dumps(profile))
    asked = ("recompute=planned", "curve.plane=4", "curve.measure=plane", "curve.budgets=[]")
    done = traded(tmp_path, *asked, "profile.path=recomputing.json")
    assert (done.returncode, done.stderr) == (0, "")
    plane = points(tmp_path, "plane")
    measured = {(p["schedule_share"], p["activation_share"]): p for p in plane if p["measured"]}
    corners_and_middle = {(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1 / 3, 0.5)}
    assert len(plane) == 10 and corners_and_middle <= set(measured)
    assert set(measured) - corners_and_middle <= {(p["schedule_share"], p["activation_share"]) for p in plane if p["stop_point"]}
    assert all(p["predicted"] and p["measured"]["step_s"] == 0.1 for p in measured.values())
    assert not any(p["measured"] for p in points(tmp_path, "curve"))
    assert done.stdout.count(" 100.0 ") == len(measured) and (tmp_path / "out/plane.png").stat().st_size > 1000
