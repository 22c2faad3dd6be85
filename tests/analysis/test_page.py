"""The page of a sweep: what it tells, and what a browser makes of it."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

import analysis
from analysis.page import best_plans, commands, engines, provenance, write_page
from analysis.pictures import gantt, tradeoff_curve
from analysis.pictures.style import svg
from analysis.questions import milliseconds

SWEEP = Path(__file__).parent / "sweep"

def test_the_best_plan_of_a_budget_may_be_that_of_a_smaller_one():
    frame = analysis.runs(SWEEP / "plans")
    best = best_plans(frame)
    assert best[["within", "strategy", "scheduler"]].agg(" ".join, axis=1).tolist() == [
        "budget 24.02 MiB greedy priority", "budget 26.2 MiB joint joint", "budget 30.57 MiB joint joint", "no budget dp wfbp",
    ]  # fmt: skip
    assert best.index[1] == best.index[2]
    assert best["step\nms"].iloc[3] == f"{frame['step_s'].min() * 1e3:.1f}"


def test_a_job_s_command_runs_that_job_alone(run_writer):
    for name in ("0", "1", "2"):
        run_writer(name, share=None)
    overrides = [["strategy=fsdp"], ["experiment=quick", "model.wrap=[a, b]"], ["strategy=bad"]]
    jobs = [{"overrides": o, "folder": n} for o, n in zip(overrides, ("0", "1", None), strict=True)]
    (run_writer.sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    assert commands(analysis.runs(run_writer.sweep)) == [
        "mdcs train strategy=fsdp",
        "mdcs train experiment=quick 'model.wrap=[a, b]' hydra.mode=RUN",
        None,
    ]


def test_a_run_that_cannot_be_read_stands_beside_the_others(run_writer, tmp_path):
    for name in ("0", "1"):
        run_writer(name, timelines=True)
    (run_writer.sweep / "1/metrics.jsonl").write_text("no JSON\n{}\n")
    frame = analysis.runs(run_writer.sweep)
    text = write_page(frame.assign(command=["mdcs train", None]), tmp_path / "page.html").read_text()
    assert "<code>mdcs train</code>" in text and "its settings are in config.yaml" in text
    assert ">failed<" in text and f"<p>{frame['reason'][1]}</p>" in text  # the number of the terminal's note has no note here
    pictures = re.findall(r'role="img" aria-label="([^"]+)"><svg', text)
    assert len(pictures) == text.count("<svg") == 3 and "peak" in pictures[-1]


def test_points_of_a_curve_and_bars_of_a_timeline_tell_their_values(timelines, frame):
    row = frame[(frame["scheduler"] == "priority") & (frame["schedule_share"] == 0.25)].iloc[0]
    curve = svg(tradeoff_curve(frame))
    for column, how in (("step_s", "measured"), ("predicted_step_s", "predicted"), ("overlap_s", "measured")):
        assert f"<title>ilp · priority, 0.25: {milliseconds(row[column])} ms {how}</title>" in curve
    message = timelines[0].ranks[0].lane("message")[0]
    assert f": {message.duration_s * 1e3:.4g} ms, from {message.start * 1e3:.4g}</title>" in svg(gantt(*timelines))


def test_the_page_tells_where_runs_come_from_and_shows_other_engines_beside_the_fastest_plans():
    frame = analysis.runs(SWEEP / "engines").assign(commit="abc", host=["a", "b", "a"])
    made = provenance(frame)
    assert made["date"].startswith("2026-11-22 21:") and made["command"] == "not recorded"
    assert (made["commit"], made["host"]) == ("abc", "a, b")
    own, ddp, _fsdp = engines(frame).to_dict("records")
    assert engines(frame[frame["engine"] != "mdcs"]).columns[1] == "budget\nMiB"  # there is nothing to compare them with
    assert (own["engine"], own["× fastest\nof mdcs"], ddp["engine"]) == ("mdcs, dp · wfbp", "1.00", "ddp")
    assert float(ddp["× fastest\nof mdcs"]) == pytest.approx(float(ddp["step\nms"]) / float(own["step\nms"]), abs=0.01)
    peak = frame["peak_bytes"][frame["engine"] == "ddp"].item() / 2**20
    assert (ddp["peak MiB\nmeas. / pred."], ddp["runs"]) == (f"{peak:.1f} / –", "1")


def test_a_page_needs_no_network_and_shows_what_runs_say_as_text(run_writer, tmp_path):
    run_writer("0", strategy="</script><b>", scheduler='say "hi", so')
    text = write_page(analysis.runs(run_writer.sweep), tmp_path / "page.html", "<i>").read_text()
    assert "<title>&lt;i&gt;</title>" in text and "&lt;/script&gt;&lt;b&gt;" in text and "</script><b>" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text)


def test_hundreds_of_runs_are_a_small_page(tmp_path):
    frame = analysis.runs(SWEEP / "plans")
    path = write_page(pd.concat([frame] * 17).head(250), tmp_path / "page.html")
    assert path.stat().st_size < 1e6 and path.read_text().count("<tr>") > 250
