"""The page of a sweep: what it tells, and what a browser makes of it."""

import json
from pathlib import Path

import pandas as pd
import pytest

import analysis
from analysis.__main__ import main
from analysis.page import contents, write_page
from tests.analysis import browser

SWEEP = Path(__file__).parent / "sweep"

in_a_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium")


def test_the_best_plan_of_a_budget_may_be_that_of_a_smaller_one():
    frame = analysis.runs(SWEEP)
    told = contents(frame)["best"]
    assert [(entry["budget"], entry["label"]) for entry in told] == [
        ("budget 24.02 MiB", "greedy · priority"), ("budget 26.2 MiB", "joint"), ("budget 30.57 MiB", "joint"),
        ("no budget", "dp · wfbp"), ("no budget", "ddp"),
    ]  # fmt: skip
    assert told[1]["run"] == told[2]["run"]
    steps = frame["step_s"][[entry["run"] for entry in told]]
    assert steps.iloc[3] == frame[frame["emulated"].eq(True)]["step_s"].min()


def test_a_job_s_command_runs_that_job_alone(run_writer):
    folders = [run_writer(name, share=None) for name in ("0", "1", "2")]
    overrides = [["strategy=fsdp"], ["experiment=quick", "model.wrap=[a, b]"], ["strategy=bad"]]
    jobs = [{"overrides": o, "folder": n} for o, n in zip(overrides, ("0", "1", None), strict=True)]
    (run_writer.sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    assert contents(analysis.runs(run_writer.sweep))["commands"] == [
        "mdcs train strategy=fsdp",
        "mdcs train experiment=quick 'model.wrap=[a, b]' hydra.mode=RUN",
        None,
    ]
    assert folders


def test_a_sweep_without_anything_measured_has_its_page(run_writer, tmp_path):
    run_writer("0", ending="infeasible")
    told = contents(analysis.runs(run_writer.sweep))
    assert (told["counts"], told["best"], told["figures"], told["periods"]) == ({"failed": 1}, [], [], [])
    assert told["reasons"][0].startswith("infeasible")


def test_the_fastest_of_all_shown_is_a_star_on_the_curve():
    [curve] = [each for each in contents(analysis.runs(SWEEP))["figures"] if "trade-off" in each["title"]]
    [star] = [trace for trace in curve["figure"]["data"] if trace["name"] == "fastest of all shown"]
    assert star["x"] == [0.5] and curve["told"].startswith("fastest: greedy · priority, share 0.5: 114.6 ms (p10 to p90: ")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser; its errors are looked at by each test."""
    with browser.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@in_a_browser
@pytest.mark.slow
def test_a_browser_shows_sorts_and_filters_runs(page, tmp_path, capsys):
    assert main(["report", str(SWEEP), "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report.html'}\n"
    page.open(tmp_path / "report.html", "document.body.dataset.ready")
    cells = "[...document.querySelectorAll('#runs-table tbody tr:not(.detail)')].map(r => r.children[{}].textContent)"
    steps = page.value(cells.format(5))
    assert steps[-1] == "–"
    assert [float(step) for step in steps[:-1]] == sorted(float(step) for step in steps[:-1])
    page.value("document.querySelectorAll('#runs-table th')[5].click()")
    assert page.value(cells.format(5)) == [*steps[-2::-1], "–"]

    page.value("search.value = 'greedy dear'; search.dispatchEvent(new Event('input'))")
    assert set(page.value(cells.format(2))) == {"dear"}
    page.value("l = document.querySelector('[data-column=budget]'); l.value = '24.02'; l.dispatchEvent(new Event('change'))")
    assert page.value(cells.format(3)) == ["24.02"]
    page.value("document.querySelector('#runs-table tbody tr').click()")
    assert "scheduler=dear budget.over_floor=0.1" in page.value("document.querySelector('tr.detail').textContent")

    page.value("document.getElementById('curves').scrollIntoView()")
    page.wait("document.querySelector('#figures .js-plotly-plot')")
    assert page.value("timeline.querySelectorAll('.point').length") > 50
    whole = page.value("timeline.layout.xaxis.range")
    assert page.value("Plotly.relayout(timeline, {'xaxis.range': [10, 20]}).then(() => timeline.layout.xaxis.range)") != whole
    assert "total, predicted" in page.value("memory.data.map(trace => trace.name)")
    assert page.errors == []


def test_the_page_tells_where_runs_come_from_and_shows_other_engines_beside_the_fastest_plans():
    frame = analysis.runs(SWEEP / "engines").assign(commit="abc", host=["a", "b", "a"])
    told = contents(frame)
    made = dict(told["provenance"])
    assert made["date"].startswith("2026-11-22 21:") and made["command"] == "not recorded"
    assert (made["commit"], made["host"]) == ("abc", "a, b")
    [table] = told["engines"]
    own, ddp, _fsdp = table["rows"]
    assert (own[0], own[5], ddp[0]) == ("mdcs, dp · wfbp", 1, "ddp") and ddp[5] == pytest.approx(ddp[2] / own[2])
    assert ddp[3] < ddp[2] < ddp[4] and ddp[9] == frame["peak_bytes"][frame["engine"] == "ddp"].item() / 2**20 and ddp[10] == 1


@in_a_browser
def test_a_page_fits_a_phone_needs_no_network_and_shows_what_runs_say_as_text(page, run_writer, tmp_path):
    run_writer("0", strategy="</script><b>", scheduler='say "hi", so')
    write_page(analysis.runs(run_writer.sweep), tmp_path / "page.html", "<i>")
    page.open(tmp_path / "page.html", "document.body.dataset.ready")
    assert page.value("document.title") == "<i>"
    assert "</script><b>" in page.value("document.querySelector('#runs-table tbody').textContent")
    assert page.value("performance.getEntriesByType('resource').filter(e => e.name.startsWith('http')).length") == 0
    line = page.value("csv()").splitlines()[1]
    assert line.startswith('0,</script><b>,"say ""hi"", so",640,0.5,')
    page.ask("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    page.open(tmp_path / "page.html", "document.body.dataset.ready && document.querySelector('#figures .js-plotly-plot')")
    assert page.value("document.documentElement.scrollWidth") == 390
    page.ask("Emulation.clearDeviceMetricsOverride")
    assert page.errors == []


@in_a_browser
@pytest.mark.slow
def test_a_thousand_runs(page, tmp_path):
    frame = analysis.runs(SWEEP / "plans")
    path = write_page(pd.concat([frame] * 67).head(1000), tmp_path / "page.html")
    assert path.stat().st_size < 8e6
    page.open(path, "document.body.dataset.ready")
    count = "document.querySelectorAll('#runs-table tbody tr').length"
    assert page.value(count) == 200
    assert page.value(f"document.querySelector('#shown button:last-of-type').click(), {count}") == 1000
    assert page.value("sortBy(1); document.querySelector('#runs-table tbody tr').children[1].textContent") == "dear"
    assert page.errors == []


def test_swept_settings_are_columns_and_repetitions_one_point(run_writer):
    for number, (size, seed) in enumerate([(None, 0), (None, 1), (4.0, 0), (4.0, 1)]):
        settings = {"scheduler.block_mib": size, "run.seed": seed}
        run_writer(f"{number}", share=None, settings=settings, times={"step_s": 1 + seed / 10})
    told = contents(analysis.runs(run_writer.sweep))
    at = {column["name"]: (index, column["text"]) for index, column in enumerate(told["columns"])}
    assert [at[name][1] for name in ("block_mib", "seed")] == [True, False]  # null is no number
    assert [[run[at[name][0]] for name in ("block_mib", "seed")] for run in told["runs"]] == [
        ["null", 0.0], ["null", 1.0], ["4", 0.0], ["4", 1.0],
    ]  # fmt: skip
    [over_memory] = [each["figure"] for each in told["figures"] if each["title"].startswith("step time over memory")]
    lines = {trace["name"]: trace["y"] for trace in over_memory["data"] if trace["name"].startswith("ilp")}
    measured = {name: y for name, y in lines.items() if not name.endswith("predicted")}
    steps = analysis.runs(run_writer.sweep)["step_s"] * 1e3
    assert measured["ilp · memory_aware · block_mib=4"] == [pytest.approx(steps[2:].median())] and len(measured) == 2
