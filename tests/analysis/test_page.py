"""The page of a sweep: what it tells, and what a browser makes of it."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

import analysis
from analysis.__main__ import main
from analysis.page import best_plans, commands, engines, provenance, write_page
from analysis.pictures import gantt, tradeoff_curve
from analysis.pictures.style import svg
from analysis.questions import milliseconds
from tests.analysis import browser

SWEEP = Path(__file__).parent / "sweep"

in_a_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium")


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


def test_a_sweep_without_anything_measured_has_its_page(run_writer, tmp_path):
    run_writer("0", ending="infeasible")
    text = write_page(analysis.runs(run_writer.sweep), tmp_path / "page.html").read_text()
    assert "1 failed" in text and "infeasible: the budget" in text and "<svg" not in text and "Best plan" not in text


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


def test_engines_without_mdcs_are_compared_with_nothing():
    frame = analysis.runs(SWEEP / "engines")
    assert engines(frame[frame["engine"] != "mdcs"]).columns[1] == "budget\nMiB"


def test_points_of_a_curve_and_bars_of_a_timeline_tell_their_values(timelines, sweep):
    frame = analysis.runs(sweep)
    row = frame[(frame["scheduler"] == "priority") & (frame["schedule_share"] == 0.25)].iloc[0]
    curve = svg(tradeoff_curve(frame))
    for column, how in (("step_s", "measured"), ("predicted_step_s", "predicted"), ("overlap_s", "measured")):
        assert f"<title>ilp · priority, 0.25: {milliseconds(row[column])} ms {how}</title>" in curve
    message = timelines[0].ranks[0].lane("message")[0]
    assert f": {message.duration_s * 1e3:.4g} ms, from {message.start * 1e3:.4g}</title>" in svg(gantt(*timelines))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser; its errors are looked at by each test."""
    with browser.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@in_a_browser
@pytest.mark.slow
def test_a_browser_shows_sorts_and_filters_runs(page, tmp_path, capsys):
    assert main([str(SWEEP / "plans"), "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path / 'report.html'}\n")
    page.open(tmp_path / "report.html")
    cells = "[...document.querySelectorAll('.runs tbody tr')].filter(r => !r.hidden).map(r => r.cells[{}].textContent)"
    click = "document.querySelectorAll('.runs th')[{}].click()"
    page.value(click.format(4))
    steps = [step for step in page.value(cells.format(4)) if step]
    assert page.value(cells.format(4))[: len(steps)] == sorted(steps, key=float)  # the run that failed is last
    page.value("document.querySelectorAll('.runs th')[4].dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
    assert page.value(cells.format(4))[: len(steps)] == sorted(steps, key=float, reverse=True)

    page.value("search.value = 'greedy dear 24.0'; search.dispatchEvent(new Event('input'))")
    assert page.value(cells.format(1)) == ["dear"] and page.value(cells.format(2)) == ["24.0"]
    assert "scheduler=dear budget=floor+10%" in page.value(cells.format(12))[0]
    hidden, shown = (f"document.querySelector('body > details{of} svg').checkVisibility()" for of in (":not([open])", "[open]"))
    assert (page.value(hidden), page.value(shown)) == (False, True)
    assert page.value("document.querySelectorAll('title').length") > 100
    assert page.errors == []


def test_the_page_tells_where_runs_come_from_and_shows_other_engines_beside_the_fastest_plans():
    frame = analysis.runs(SWEEP / "engines").assign(commit="abc", host=["a", "b", "a"])
    made = provenance(frame)
    assert made["date"].startswith("2026-11-22 21:") and made["command"] == "not recorded"
    assert (made["commit"], made["host"]) == ("abc", "a, b")
    own, ddp, _fsdp = engines(frame).to_dict("records")
    assert (own["engine"], own["× fastest\nof mdcs"], ddp["engine"]) == ("mdcs, dp · wfbp", "1.00", "ddp")
    assert float(ddp["× fastest\nof mdcs"]) == pytest.approx(float(ddp["step\nms"]) / float(own["step\nms"]), abs=0.01)
    peak = frame["peak_bytes"][frame["engine"] == "ddp"].item() / 2**20
    assert (ddp["peak MiB\nmeas. / pred."], ddp["runs"]) == (f"{peak:.1f} / –", "1")


@in_a_browser
def test_a_page_fits_a_phone_needs_no_network_and_shows_what_runs_say_as_text(page, run_writer, tmp_path):
    run_writer("0", strategy="</script><b>", scheduler='say "hi", so')
    write_page(analysis.runs(run_writer.sweep), tmp_path / "page.html", "<i>")
    page.open(tmp_path / "page.html")
    assert page.value("document.title") == "<i>"
    assert '</script><b>say "hi", so' in page.value("document.querySelector('.runs tbody').textContent")
    assert page.value("performance.getEntriesByType('resource').filter(e => e.name.startsWith('http')).length") == 0
    page.ask("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    page.open(tmp_path / "page.html")
    assert page.value("document.documentElement.scrollWidth") == 390
    assert page.value("document.querySelector('svg text').getBoundingClientRect().height") > 8  # letters, scrolled to
    page.ask("Emulation.clearDeviceMetricsOverride")
    assert page.errors == []


@in_a_browser
@pytest.mark.slow
def test_a_thousand_runs(page, tmp_path):
    frame = analysis.runs(SWEEP / "plans")
    path = write_page(pd.concat([frame] * 67).head(1000), tmp_path / "page.html")
    assert path.stat().st_size < 4e6
    page.open(path)
    assert page.value("document.querySelectorAll('.runs tbody tr').length") == 1000
    page.value("document.querySelectorAll('.runs th')[1].click()")
    assert page.value("document.querySelector('.runs td:nth-child(2)').textContent") == "dear"
    assert page.errors == []
