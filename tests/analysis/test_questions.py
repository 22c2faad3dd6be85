"""Rows that are one curve, and where it is lowest."""

import json

import numpy as np
import pandas as pd
import pytest

import analysis
from analysis.load import WORKLOAD
from analysis.questions import (
    alike,
    best_run,
    best_within_budgets,
    has_memory_axis,
    interval,
    label,
    labels,
    over_share,
    plateau,
    repeated,
    series,
    setting,
    setting_axis,
    share_curves,
    stop_point,
    swept,
    workloads,
)  # fmt: skip


def test_the_stop_point_is_the_share_of_least_measured_step_time(run_writer):
    for name, (share, step_s) in enumerate([(0.0, 1.4), (0.25, 1.1), (0.5, 1.0), (1.0, 1.3)]):
        run_writer(f"{name}", share=share, times={"step_s": step_s})
    point = stop_point(analysis.runs(run_writer.sweep))
    assert point["schedule_share"] == 0.5
    assert point["step_s"] == pytest.approx(1.0, rel=0.05)


def test_shares_that_are_as_fast_as_the_stop_point_are_its_plateau():
    times = {0.0: 2.0, 0.25: 1.0, 0.5: 1.0005, 0.75: 1.2, 1.0: 1.0}
    unknown = dict.fromkeys(("step_s", "step_s_p10", "step_s_p90", "execution_hash", *WORKLOAD))
    frame = pd.DataFrame({"status": "predicted", "schedule_share": x, "predicted_step_s": t, **unknown} for x, t in times.items())
    assert plateau(frame, "predicted_step_s") == (0.25, 0.5)
    measured = frame.assign(status="ok", step_s=list(times.values()), step_s_p10=0.9, step_s_p90=1.3)
    assert plateau(measured) == (0.25, 1.0)


def test_repeats_of_a_share_count_by_their_median_and_failed_runs_do_not(run_writer):
    for name, (share, step_s) in enumerate([(0.0, 1.0), (0.5, 0.7), (0.5, 1.5), (0.5, 1.6)]):
        run_writer(f"{name}", share=share, times={"step_s": step_s})
    run_writer("failed", share=1.0, times={"step_s": 0.1}, ending="failed")
    assert stop_point(analysis.runs(run_writer.sweep))["schedule_share"] == 0.0
    with pytest.raises(ValueError, match="no curve"):
        stop_point(analysis.runs(run_writer.sweep).assign(schedule_share=None))


def test_a_curve_has_one_budget_and_several_shares(frame):
    curves = share_curves(frame)
    assert [set(c["budget_bytes"]) for c in curves] == [{640 * 2**20}]
    assert len(curves[0]) == 10
    assert has_memory_axis(frame)
    assert not has_memory_axis(curves[0])


def test_models_and_links_are_not_mixed(run_writer):
    run_writer("0", model="a")
    run_writer("1", model="b")
    run_writer("2", model="b", emulated=False)
    run_writer("3", model="b")
    groups = workloads(analysis.runs(run_writer.sweep))
    assert [(title, len(rows)) for title, rows in groups] == [
        ("b · 2 ranks · emulated link", 2),
        ("a · 2 ranks · emulated link", 1),
        ("b · 2 ranks", 1),
    ]


def test_labels_name_strategy_and_scheduler_once(run_writer):
    run_writer("0", strategy="joint", scheduler="joint")
    run_writer("1", strategy="fsdp", scheduler="wfbp", cross_iteration=False)
    assert [label(row) for _, row in analysis.runs(run_writer.sweep).iterrows()] == ["joint", "fsdp · wfbp · barrier"]


def test_the_best_run_is_the_fastest_that_finished(run_writer):
    run_writer("0", times={"step_s": 1.4}, share=0.0)
    run_writer("1", times={"step_s": 1.1})
    run_writer("2", times={"step_s": 0.1}, ending="killed")
    frame = analysis.runs(run_writer.sweep)
    assert best_run(frame)["name"] == "1"
    assert best_run(frame[frame["name"] == "2"]) is None


def buckets(run_writer, *sizes, seeds=(0,)):
    """Runs of one plan with buckets of these sizes, each with these seeds: the larger, the slower."""
    for size in sizes:
        for seed in seeds:
            told = {"scheduler.bucket_mib": size, "run.seed": seed, "run.steps": 12}
            options = {"budget_mib": None, "share": None, "times": {"step_s": 1.0 + size / 10 + seed / 100}}
            run_writer(f"{size}-{seed}", strategy="dp", scheduler="fusion", settings=told, **options)
    return analysis.runs(run_writer.sweep)


def test_a_swept_setting_tells_runs_apart_and_what_is_alike_does_not(run_writer):
    frame = buckets(run_writer, 0.5, 25.0)
    assert swept(frame) == ["scheduler.bucket_mib"]
    assert list(series(frame)) == ["dp · fusion · bucket_mib=0.5", "dp · fusion · bucket_mib=25"]
    assert set(labels(frame, without="scheduler.bucket_mib")) == {"dp · fusion"}
    assert repeated(frame) == [] and setting_axis(frame) == "scheduler.bucket_mib"


def test_an_option_of_a_group_is_named_as_it_is_typed_and_none_is_not_told(run_writer):
    for rule in ("none", "planned"):
        run_writer(rule, strategy="fsdp", scheduler="dear", settings={"recompute.name": rule, "run.steps": 12})
    assert list(series(analysis.runs(run_writer.sweep))) == ["fsdp · dear", "fsdp · dear · recompute=planned"]


def test_settings_are_compared_among_runs_that_choose_alike(run_writer):
    """Each strategy has its own way to be told; a null that was asked for is not the same as no such key."""
    run_writer("0", strategy="greedy", settings={"strategy.trials": 1})
    run_writer("1", strategy="joint", settings={"strategy.trials": None, "strategy.seconds": 30})
    assert swept(analysis.runs(run_writer.sweep)) == []
    run_writer("2", strategy="joint", settings={"strategy.trials": None, "strategy.seconds": None})
    frame = analysis.runs(run_writer.sweep)
    assert swept(frame) == ["strategy.seconds"]
    assert [label(row).rpartition(" · ")[2] for _, row in frame.iterrows()] == ["memory_aware", "seconds=30", "seconds=null"]


def test_keys_that_end_alike_are_told_in_full(run_writer):
    for name, (data, model) in enumerate([(1, 1), (1, 2), (2, 1)]):
        run_writer(f"{name}", settings={"data.size": data, "model.size": model})
    labels = list(series(analysis.runs(run_writer.sweep)))
    assert labels[0] == "ilp · memory_aware · data.size=1 · model.size=1"


def test_seeds_are_repetitions_and_other_settings_are_not(run_writer):
    frame = buckets(run_writer, 0.5, 25.0, seeds=(0, 1, 2))
    assert swept(frame) == ["scheduler.bucket_mib", "run.seed"] and setting_axis(frame) == "scheduler.bucket_mib"
    assert [(name, sorted(runs["run.seed"])) for name, runs in repeated(frame)] == [
        ("dp · fusion · bucket_mib=0.5, no budget", [0, 1, 2]), ("dp · fusion · bucket_mib=25, no budget", [0, 1, 2]),
    ]  # fmt: skip


def test_a_plan_is_best_by_the_median_of_its_repetitions(run_writer):
    for number, step_s in enumerate((0.9, 1.3, 1.4)):
        run_writer(f"a{number}", share=0.5, settings={"run.seed": number}, times={"step_s": step_s})
    for number, step_s in enumerate((1.1, 1.1, 1.2)):
        run_writer(f"b{number}", share=0.25, settings={"run.seed": number}, times={"step_s": step_s})
    frame = analysis.runs(run_writer.sweep)
    best = best_run(frame)
    assert (best["schedule_share"], setting(best)) == (0.25, "ilp · memory_aware · share 0.25")
    assert best["step_s"] == frame[frame["schedule_share"] == 0.25]["step_s"].median()
    assert list(best_within_budgets(frame)["schedule_share"]) == [0.25]


def test_the_range_of_runs_of_one_plan_is_the_noise_that_the_star_uses(run_writer):
    """Three shares; those of 1.2 and 1.6 s are of one plan, and neither is faster than the third, of 1.3."""
    for share, step_s, plan in ((0.0, 1.2, "a"), (0.5, 1.6, "a"), (1.0, 1.3, "b")):
        folder = run_writer(f"s{share}", share=share, times={"step_s": step_s})
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["event"] == "start":
                line["execution_hash"], line["predicted"]["step_s"] = plan, 1.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    frame = analysis.runs(run_writer.sweep)
    [runs] = alike(frame)
    assert [*runs["schedule_share"]] == [0.0, 0.5]
    points = over_share(frame)
    assert points["step_s"].iloc[0] == points["step_s"].iloc[1] == pytest.approx(1.4, rel=0.03)
    assert points["step_s_p10"].iloc[0] < 1.3 and points["step_s_p90"].iloc[0] >= 1.6
    assert best_run(frame)["schedule_share"] == stop_point(frame)["schedule_share"] == 1.0


def test_the_interval_of_a_median_holds_it_and_is_narrower_the_more_runs_there_are():
    rng = np.random.default_rng(1)
    truth = [interval(rng.normal(1.0, 0.1, 9)) for _ in range(200)]
    assert sum(low <= 1.0 <= high for low, high in truth) > 175
    few, many = (interval(rng.normal(1.0, 0.1, n)) for n in (5, 500))
    assert many[1] - many[0] < few[1] - few[0] and interval([2.0]) == (2.0, 2.0)


def test_a_title_has_the_model_s_parameters_and_the_rate_of_its_link(run_writer):
    run_writer("0")
    frame = analysis.runs(run_writer.sweep)
    told = {"parameters": [32.4e6, None], "link_gbit": [0.5, None]}
    assert workloads(pd.concat([frame, frame]).reset_index(drop=True).assign(**told))[0][0] == (
        "gpt-small, 32.4 M parameters · 2 ranks · emulated link of 0.5 Gbit/s"
    )
    measured = frame.assign(emulated=False, link_gbit=20.0)
    assert workloads(measured)[0][0].endswith("2 ranks · link of 20 Gbit/s")
    both = pd.concat([measured, measured.assign(link_gbit=26.0)]).reset_index(drop=True)
    assert workloads(both)[0][0].endswith("link of 20 to 26 Gbit/s")
    assert workloads(measured.assign(shaped_gbit=0.8, link_gbit=0.8))[0][0].endswith("link shaped to 0.8 Gbit/s")
