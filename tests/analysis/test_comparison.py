"""Engines side by side: arithmetic on made-up runs, and the picture of a made-up comparison."""

import math

import matplotlib.image
import pytest

import analysis
from analysis import pictures
from analysis.comparison import compare, lines, loss_differences
from tests.analysis.conftest import write_run


def test_two_sweeps_are_compared_plan_by_plan(tmp_path):
    """Three runs of each of two plans; of a third plan each sweep has one, of a fourth only one sweep has any."""
    for name, factor in (("one", 1.0), ("other", 1.25)):
        for strategy, runs in (("fsdp", 3), ("greedy", 3), ("joint", 1), ("ilp" if factor == 1 else "dp", 1)):
            for seed in range(runs):
                slower = factor if strategy != "greedy" else 1.0
                write_run(tmp_path / name / f"{strategy}{seed}", strategy, times={"step_s": slower * (1 + seed / 100)},
                          settings={"run.seed": seed})  # fmt: skip
    table = compare(*(analysis.runs(tmp_path / name) for name in ("one", "other"))).set_index("plan")
    assert len(table) == 4 and table.index[-1] == "all"
    fsdp, greedy, joint = (table[table.index.str.startswith(name)].iloc[0] for name in ("fsdp", "greedy", "joint"))
    assert (fsdp["runs"], fsdp["other_runs"]) == (3, 3) and fsdp["ratio"] == pytest.approx(1.25, rel=0.02)
    assert 1.2 < fsdp["low"] <= fsdp["ratio"] <= fsdp["high"] < 1.3 and greedy["low"] < 1 < greedy["high"]
    assert math.isnan(joint["low"]) and joint["ratio"] == pytest.approx(1.25, rel=0.03)
    assert table.loc["all", "ratio"] == pytest.approx((fsdp["ratio"] * greedy["ratio"] * joint["ratio"]) ** (1 / 3))
    with pytest.raises(ValueError, match="no measured plan in common"):
        compare(analysis.runs(tmp_path / "one"), analysis.runs(tmp_path / "other").query("strategy == 'dp'"))


def test_a_rate_that_each_of_two_sweeps_has_measured_is_told_of_both(tmp_path):
    for name in ("one", "other"):
        write_run(tmp_path / name / "0", emulated=False)
    one, other = (analysis.runs(tmp_path / name).assign(link_gbit=rate) for name, rate in (("one", 1.25), ("other", 0.8)))
    assert compare(one, other)["workload"].iloc[0] == "gpt-small · 2 ranks · link of 1.25 Gbit/s and link of 0.8 Gbit/s"
    assert compare(one, one)["workload"].iloc[0] == "gpt-small · 2 ranks · link of 1.25 Gbit/s"


def row(step_s, peak_bytes=100, **known):
    other = dict.fromkeys(("compute_s", "communication_s", "exposed_s", "stalled_s", "overlap_ratio", "bytes_total"))
    return other | {"step_s": step_s, "peak_bytes": peak_bytes} | known


RUNS = {
    # The machine is slower in the second round; a ratio of medians would be 4 / 3.
    "mdcs": [row(2.0, exposed_s=0.5), row(4.0, exposed_s=1.5), row(3.0, exposed_s=1.0)],
    "ddp": [row(3.0, 120), row(6.0, 150), row(4.0, 110)],
    "fsdp2": [row(5.0, 90, exposed_s=1.0), row(5.0, 90), row(5.0, 90, exposed_s=1.0)],
}


def test_a_ratio_is_taken_within_a_round_and_what_is_not_told_of_every_round_is_not_known():
    found = lines(RUNS, "mdcs", {})
    assert [(line["engine"], line["exposed_s"]) for line in found] == [("mdcs", 1.0), ("ddp", None), ("fsdp2", None)]
    assert found[1]["step_s"] == {"median": 4.0, "low": 3.0, "high": 6.0}
    assert found[1]["ratio"] == {"median": 1.5, "low": 4 / 3, "high": 1.5} and set(found[0]["ratio"].values()) == {1.0}


def test_a_budget_is_kept_by_the_highest_peak_of_all_rounds():
    fits = {line["engine"]: (line["fits"], line["peak_bytes"]) for line in lines(RUNS, "mdcs", dict.fromkeys(RUNS, 149))}
    assert fits == {"mdcs": (True, 100), "ddp": (False, 150), "fsdp2": (True, 90)}
    assert all(line["fits"] for line in lines(RUNS, "mdcs", dict.fromkeys(RUNS, 150)))
    assert [line["fits"] for line in lines(RUNS, "mdcs", {"mdcs": 99, "ddp": 150})] == [False, True, True]  # each its own


def test_without_a_measured_peak_nobody_knows_whether_it_fits():
    [line] = lines({"ddp": [row(1.0, None)]}, "mdcs", {"ddp": 10})
    assert line["fits"] is None and line["ratio"] is None
    [line] = lines({"ddp": [row(1.0, None)]}, "mdcs", {})
    assert line["fits"] is True


def test_a_bound_is_of_every_run_or_not_known():
    bounded = {"mdcs": [row(2.0, bound_s=1.5), row(3.0, bound_s=1.7)], "ddp": [row(3.0), row(3.0)]}
    assert {line["engine"]: line["bound_s"] for line in lines(bounded, "mdcs", {})} == {"mdcs": 1.6, "ddp": None}


def test_losses_are_compared_step_by_step_with_the_base_s_first_run():
    curves = {"mdcs": [[2.0, 1.0], [2.0, 1.1]], "ddp": [[2.0, 1.0], [2.002, 1.0]], "short": [[2.0]], "broken": [[2.0, math.nan]]}
    found = loss_differences(curves, "mdcs")
    assert found == pytest.approx({"mdcs": 0.1, "ddp": 0.001, "short": math.inf, "broken": math.inf})


def line(engine, median, stalled_s=None, exposed_s=None, fits=True, overlap=0.5):
    return {
        "engine": engine, "fits": fits, "step_s": {"median": median, "low": median * 0.9, "high": median * 1.2},
        "ratio": {"median": median / 0.1, "low": 1.0, "high": 2.0}, "stalled_s": stalled_s, "exposed_s": exposed_s,
        "overlap_ratio": overlap, "peak_bytes": 40e6,
    }  # fmt: skip


def document(*budgets):
    job = {"model": "gpt2", "world": 2, "shaped_link": "1 Gbit/s", "rounds": 3, "base": "mdcs", "parameters": 124e6}
    return {**job, "losses": {"differences": {"ddp": 1e-7}, "equal": True}, "budgets": list(budgets)}


def test_the_picture_has_a_panel_for_every_budget(tmp_path):
    of_all = [
        line("mdcs", 0.1, 0.02, 0.015),
        line("fairscale", 0.15, 0.03, overlap=None),
        line("zero-2", 0.2, fits=False, overlap=None),
    ]
    bounds = {"traffic": 0.06, "structural": 0.08}
    figure = pictures.engine_comparison(
        document(
            {"budget_bytes": 50e6, "budget": "floor+10%", "bounds": bounds, "lines": of_all},
            {"budget_bytes": None, "budget": "none", "bounds": {}, "lines": of_all[:1]},
        )
    )
    assert len(figure.axes) == 2
    assert figure.get_suptitle() == "gpt2, 124 M parameters · 2 ranks · link of 1 Gbit/s · medians of 3 rounds"
    steps = figure.axes[0]
    assert [label.get_text() for label in steps.get_yticklabels()] == ["mdcs", "fairscale", "zero-2"]
    # computing, exposed and idle; computing and the rest; what cannot be divided
    assert [patch.get_width() for patch in steps.patches] == pytest.approx([80, 15, 5, 120, 30, 200])
    assert [text.get_text() for text in steps.texts] == [
        "1.00 ×, overlap ratio 0.50, peak 38.1 MiB", "1.50 ×, peak 38.1 MiB", "does not fit, peak 38.1 MiB",
    ]  # fmt: skip
    assert steps.get_title(loc="left") == "budget 47.7 MiB (floor+10%)"
    path = pictures.save(figure, tmp_path / "comparison.png")
    assert matplotlib.image.imread(path).std() > 0.1
