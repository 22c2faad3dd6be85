"""Which rows are one curve, and where it is lowest."""

import pytest

from analysis.load import load_sweep
from analysis.questions import best_run, has_budget_axis, label, share_curves, stop_point, workloads


def test_the_stop_point_is_the_share_of_least_measured_step_time(run_writer):
    for name, (share, step_s) in enumerate([(0.0, 1.4), (0.25, 1.1), (0.5, 1.0), (1.0, 1.3)]):
        run_writer(f"{name}", share=share, times={"step_s": step_s})
    point = stop_point(load_sweep(run_writer.sweep))
    assert point["schedule_share"] == 0.5
    assert point["step_s"] == pytest.approx(1.0, rel=0.05)


def test_a_failed_run_is_no_stop_point_however_fast_its_steps(run_writer):
    run_writer("0", share=0.0, times={"step_s": 1.4})
    run_writer("1", share=0.5, times={"step_s": 0.1}, ending="failed")
    assert stop_point(load_sweep(run_writer.sweep))["schedule_share"] == 0.0


def test_repeats_of_a_share_count_by_their_median(run_writer):
    for name, (share, step_s) in enumerate([(0.0, 1.0), (0.5, 0.7), (0.5, 1.5), (0.5, 1.6)]):
        run_writer(f"{name}", share=share, times={"step_s": step_s})
    assert stop_point(load_sweep(run_writer.sweep))["schedule_share"] == 0.0


def test_without_shares_there_is_no_stop_point(run_writer):
    run_writer("0", share=None)
    with pytest.raises(ValueError, match="no curve"):
        stop_point(load_sweep(run_writer.sweep))


def test_a_curve_has_one_budget_and_several_shares(sweep):
    frame = load_sweep(sweep)
    curves = share_curves(frame)
    assert [set(c["budget_bytes"]) for c in curves] == [{640 * 2**20}]
    assert len(curves[0]) == 10
    assert has_budget_axis(frame)
    assert not has_budget_axis(curves[0])


def test_models_and_links_are_not_mixed(run_writer):
    run_writer("0", model="a")
    run_writer("1", model="b")
    run_writer("2", model="b", emulated=False)
    run_writer("3", model="b")
    groups = workloads(load_sweep(run_writer.sweep))
    assert [(w.title, len(rows)) for w, rows in groups] == [
        ("b · 2 ranks · emulated link", 2),
        ("a · 2 ranks · emulated link", 1),
        ("b · 2 ranks", 1),
    ]


def test_labels_name_strategy_and_scheduler_once(run_writer):
    run_writer("0", strategy="joint", scheduler="joint")
    run_writer("1", strategy="fsdp", scheduler="wfbp", cross_iteration=False)
    assert [label(row) for _, row in load_sweep(run_writer.sweep).iterrows()] == [
        "joint",
        "fsdp · wfbp · barrier",
    ]


def test_the_best_run_is_the_fastest_that_finished(run_writer):
    run_writer("0", times={"step_s": 1.4})
    run_writer("1", times={"step_s": 1.1})
    run_writer("2", times={"step_s": 0.1}, ending="killed")
    frame = load_sweep(run_writer.sweep)
    assert best_run(frame)["name"] == "1"
    assert best_run(frame[frame["name"] == "2"]) is None


def test_runs_behind_links_of_different_rates_are_different_workloads(run_writer):
    for name in ("0", "1", "2"):
        run_writer(name, emulated=False)
    frame = load_sweep(run_writer.sweep)
    frame["shaped_gbit"] = [1.0, 0.5, None]
    titles = [workload.title for workload, _ in workloads(frame)]
    assert sorted(titles) == [
        "gpt-small · 2 ranks", "gpt-small · 2 ranks · link shaped to 0.5 Gbit/s", "gpt-small · 2 ranks · link shaped to 1 Gbit/s",
    ]  # fmt: skip
