"""Results: the page is made of the measurements that are kept, and says who wins only where no round says otherwise."""

import copy
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

import benchmarks.pictures
from analysis import pictures
from benchmarks import results
from benchmarks.results_page import divisions, newest, page, predictions, runs

DOCS = Path(__file__).resolve().parents[2] / "docs"
MIB = 2**20


def candidate(name, steps, peak_mib, budget=None, plans=False, predicted=None):
    same = {"peak_bytes": peak_mib * MIB, "predicted_step_s": predicted, "processor_s": 0.5}
    rounds = [{"step_s": step, "steps_s": [step], **same} for step in steps]
    words = {"budget_bytes": budget, "budget": None if not plans else "floor+50%" if budget else "none"}
    return {"name": name, "overrides": [f"engine={name}"], "plans": plans, "rounds": rounds, **words}


@pytest.fixture
def result():
    part = {"budget_bytes": 60 * MIB, "budget": "floor+50%"}, {"budget_bytes": None, "budget": "none"}
    made = [
        candidate("mdcs", [1.0, 1.2, 1.1], 58, 60 * MIB, True, 1.0),
        candidate("mdcs", [0.9, 1.0, 1.0], 80, None, True, 1.0),
        candidate("ddp", [0.9, 0.9, 1.1], 90),
        candidate("fsdp2", [1.5, 1.8, 1.1], 50),
    ]
    return {
        "name": "slow_link", "about": "Slow.", "date": "2026-11-26 18:00", "commit": "abc", "seed": 0,
        "machine": {"processor": "a CPU"}, "load": [[1, 1, 1], [2, 2, 2]], "versions": {"torch": "2.13"},
        "comparison": {
            "model": "12 × 6 MB, timed compute", "parameters": 18e6, "world": 2,
            "batch_size": 4, "shaped_link": "0.5 Gbit/s", "rounds": 3,
            "losses": {"differences": {"ddp": 1e-7}}, "left_out": {"zero-1": "is not installed"}, "budgets": part,
            "candidates": made,
        },
    }  # fmt: skip


def rows(text, *words):
    return [line for line in text.splitlines() if line.startswith("|") and all(word in line for word in words)]


def test_who_wins_is_said_with_its_interval(result):
    [limited, unlimited] = rows(page([result]), "12 × 6 MB, timed compute, 2 ranks, 0.5 Gbit/s")[:2]
    assert limited.endswith("| 1,100 [1,000 to 1,200] | fsdp2 | 1.50 [1.00 to 1.50] | cannot be told apart |")
    assert unlimited.endswith("| none | 1,000 [900 to 1,000] | ddp | 1.00 [0.90 to 1.10] | cannot be told apart |")
    slow = copy.deepcopy(result)
    for run in slow["comparison"]["candidates"][1]["rounds"]:
        run["step_s"] = 2.0
    assert rows(page([slow]), "| none |", "**loses**")
    for run in slow["comparison"]["candidates"][3]["rounds"]:
        run["step_s"] = 2.0
    assert rows(page([slow]), "| 60 MiB (floor+50%) |", "1.82 [1.67 to 2.00] | wins |")
    for other in slow["comparison"]["candidates"][2:]:
        for run in other["rounds"]:
            run["step_s"] = 1.0003 * 2.0
    assert rows(page([slow]), "| none |", "1.00 [1.00 to 1.00] | cannot be told apart |")


def test_a_plane_has_a_row_for_each_share_of_the_schedule(result):
    shares = [(0.0, 0.0), (0.0, 0.5), (0.4, 0.0), (0.4, 0.5)]
    made = [candidate(f"shares {s:g} {a:g}", [1.0 + s, 1.0 + a, 2.0], 50, 60 * MIB, True, 1.5) for s, a in shares]
    made.append(candidate("joint", [1.0], 60, 60 * MIB, True, 1.0))
    result |= {"name": "plane", "comparison": result["comparison"] | {"candidates": made}}
    text = page([result])
    assert rows(text, "share for the schedule", "| 0 of the rest for activations | 0.5 of the rest for activations |")
    assert rows(text, "| 0.4 | 1,400 (1,500) | 1,500 (1,500) |")
    assert "`joint`: 1,000 [1,000 to 1,000] ms, 1,000 predicted." in text
    points = divisions(result)
    assert points[["schedule", "activations", "strategies"]].sum(axis=1).round(9).eq(1).all() and len(points) == 4
    assert points["strategies"].tolist() == pytest.approx([1, 0.5, 0.6, 0.3])


def test_an_engine_has_one_row_and_its_ratio_within_every_budget_that_it_fits(result):
    text = page([result])
    assert rows(text, "| ddp | 900 [900 to 1,100] | 500 | 90 |  | – | 1.00 |")
    assert rows(text, "| fsdp2 | 1,500 [1,100 to 1,800] | 500 | 50 |  | 1.50 | 1.67 |")
    assert rows(text, "| mdcs, none | 1,000 [900 to 1,000] | 500 | 80 | 1,000 |  | 1.00 |")
    assert ": zero-1 (is not installed)." in text
    assert len(predictions([result])) == 6 and rows(text, "| all | 6 | 4.5% | -16.7 % |")


def test_each_plan_has_the_bytes_of_its_own_floor(result):
    result["comparison"]["candidates"].insert(2, candidate("zero2", [1.3, 1.4, 1.5], 64, 65 * MIB, True, 1.0))
    assert rows(page([result]), "| zero2, 65 MiB (floor+50%) | 1,400 [1,300 to 1,500] | 500 | 64 | 1,000 | 1.30 |  |")


def test_a_comparison_of_plans_alone_has_a_row_for_each_budget(result):
    of = result["comparison"]
    of["candidates"] = [each for each in of["candidates"] if each["plans"]]
    text = page([result])
    assert rows(text, "| 60 MiB (floor+50%) | mdcs | 1,100 [1,000 to 1,200] | 1.00 [1.00 to 1.00] | 58 | 1,000 |")
    assert rows(text, "| none | mdcs | 1,000 [900 to 1,000] | 1.11 [1.10 to 1.20] | 80 | 1,000 |")


def test_pictures_have_a_panel_per_measurement_and_a_point_per_run(result):
    figure = benchmarks.pictures.time_over_memory([("one", runs(result)), ("two", runs(result))])
    words = "fastest: ddp: 900.0 ms (95 % of 3 runs: 900.0 to 1100); 2 of 3 others within that: noise decides"
    assert [" ".join(axes.get_title("left").split("\n")) for axes in figure.axes] == [f"one {words}", f"two {words}"]
    points = pd.DataFrame(predictions([result]), columns=["series", "predicted", "measured"])
    [axes] = pictures.predictions("steps", "s", points).axes
    assert len(axes.lines[0].get_xdata()) == 6


def test_the_newest_file_of_a_name_counts(tmp_path):
    for day, value in (("2026-11-25", 1), ("2026-11-26", 2)):
        (tmp_path / day).mkdir()
        (tmp_path / day / "slow_link.json").write_text(json.dumps({"value": value}))
    (tmp_path / "2026-11-25/ablation.json").write_text(json.dumps({"value": 3}))
    assert newest(tmp_path) == [{"value": 3}, {"value": 2}]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["results", *map(str, arguments)])
    return results.main()


@pytest.mark.slow
def test_a_quick_run_keeps_every_repetition_and_writes_no_page(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    small = "compare.only=[mdcs,ddp]", "model.layers=2", "model.forward_ms=1", "model.backward_ms=1"
    assert run(monkeypatch, "slow_link", "--quick", "--out", tmp_path / "out", *small) == 0
    [file] = tmp_path.glob("out/*/slow_link.json")
    kept = json.loads(file.read_text())
    of = kept["comparison"]
    assert len(kept["load"]) == 2 and kept["versions"]["torch"] and kept["machine"]["processor"]
    assert [each["name"] for each in of["candidates"]] == ["mdcs"] * 2 + ["ddp"] and of["rounds"] == 1
    assert of["candidates"][0]["overrides"][0] == "strategy=joint"
    assert rows(page([kept]), "| mdcs, none |") and not (tmp_path / "results.md").exists()


def test_a_result_that_there_is_not_is_named(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "slow")
    assert "no such result slow; results: ablation, bert, " in capsys.readouterr().err


def test_the_page_is_made_of_what_is_kept_without_measuring(monkeypatch, tmp_path):
    """A figure that is changed by hand, in either, is found."""
    shutil.copytree(DOCS / "results", tmp_path / "results")
    assert run(monkeypatch, "--page", "--out", tmp_path / "results") == 0
    assert (tmp_path / "results.md").read_bytes() == (DOCS / "results.md").read_bytes(), "make results writes another page"
    kept = newest(DOCS / "results")
    assert kept and all(each["comparison"]["losses"]["equal"] and each["comparison"]["rounds"] >= 3 for each in kept)
