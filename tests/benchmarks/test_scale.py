"""Scale on paper: the page is made of its data, the data is what the program predicts, and gains are what they are called."""

import dataclasses
import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks import scale
from benchmarks.published_runs import calibrated, read
from benchmarks.scale import LEVERS, decides, page
from mdcs.sizes import GIB

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def document():
    return json.loads((DOCS / "scale.json").read_text(encoding="utf-8"))


def test_the_page_is_made_of_its_data(document):
    assert page(document) == benchmarks.part(DOCS, "scale"), "make scale writes another page"
    assert document["settings"] == json.loads(json.dumps(dataclasses.asdict(scale.Settings())))
    assert len(document["curves"]) == len(scale.curves(scale.Settings()))


def test_the_data_is_what_is_predicted(document):
    """One point of 90, the first."""
    again = scale.curves(scale.Settings())[0].point(scale.Settings.budgets_gib[0])
    kept = document["curves"][0]["points"][0]
    for lever in ("base", *LEVERS, "all"):
        assert again[lever] == pytest.approx(kept[lever]), lever


def test_plans_fit_and_no_lever_loses(document):
    feasible = [point for curve in document["curves"] for point in curve["points"] if point["base"]]
    assert len(feasible) > 50
    for point in feasible:
        steps = {name: point[name]["step_s"] for name in ("base", *LEVERS, "all")}
        assert min(steps.values()) == steps["all"] and max(steps.values()) == steps["base"]
        assert max(point[name]["bytes"] for name in steps) <= point["gib"] * GIB
        assert {point["base"]["strategy"], point["base"]["recompute"]}.isdisjoint({"mixed"})


def test_what_decides_gains_most():
    steps = {"base": 2.0, "sharding": 2.0, "scheduling": 1.99, "recomputation": 1.0, "all": 1.0}
    point = {name: {"step_s": seconds} for name, seconds in steps.items()}
    assert decides(point) == "recomputation"
    assert decides(point | {"recomputation": {"step_s": 1.99}}) == "only together"
    assert decides(point | {"recomputation": {"step_s": 1.99}, "all": {"step_s": 1.97}}) == "1.0 ×"


def test_devices_compute_as_fast_as_in_a_published_run():
    runs = [group.runs[0] for group in read() if group.title.startswith("torchtitan, Llama 3.1 8B on H100")]
    [compiled] = [case for case in runs if case.note == "compile"]
    assert calibrated(compiled) / 1e12 == pytest.approx(scale.Settings.tflops, abs=1)


def test_a_cluster_of_less_than_two_full_nodes_is_refused():
    with pytest.raises(ValueError, match=r"two nodes of 8 devices or more, got 20"):
        scale.curves(scale.Settings(devices=(20,)))
