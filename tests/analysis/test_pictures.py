"""The pictures show the numbers of the sweep, name their workload, and fit their figure."""

import io
import itertools
import warnings
from pathlib import Path

import matplotlib.text
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import StepPatch

import analysis
from analysis import questions as ask
from analysis.pictures import (
    engine_comparison,
    gantt,
    memory_over_period,
    overview,
    step_time_over_memory,
    step_time_over_setting,
    style,
    tradeoff_curve,
)
from analysis.pictures.comparisons import SHARES, three_shares
from analysis.pictures.style import shortened
from analysis.questions import fastest, share_curves
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import SlotMemory, Timeline

SWEEP = Path(__file__).parent / "sweep"


def drawn(figure):
    """Draw the figure; a layout that does not fit is a warning, and here an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png", dpi=60)
    return figure


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def rings_of(axes):
    return [line for line in axes.get_lines() if line.get_markersize() == 13]


def lines_of(axes, style="-"):
    return [line for line in axes.get_lines() if line.get_linestyle() == style and len(line.get_xdata()) > 1]


def test_the_trade_off_curve_has_three_panels_a_star_at_the_fastest_of_all_and_a_ring_at_each_stop_point(frame):
    figure = drawn(tradeoff_curve(frame))
    assert [axes.get_title("left").split("\n")[0] for axes in figure.axes] == [
        "time per iteration", "overlap duration", "extra communication",
    ]  # fmt: skip
    assert figure.get_suptitle() == "gpt-small · 2 ranks · emulated link · budget 640 MiB"
    rows = frame[(frame["budget_bytes"] == 640 * 2**20) & (frame["scheduler"] == "memory_aware")]
    for axes, column in zip(figure.axes, ("step_s", "overlap_s", "extra_communication_s"), strict=True):
        solid, dashed = lines_of(axes)[0], lines_of(axes, "--")[0]
        assert list(solid.get_xdata()) == [0, 0.25, 0.5, 0.75, 1]
        assert np.allclose(solid.get_ydata(), rows[column] * 1e3)
        assert np.allclose(dashed.get_ydata(), rows[f"predicted_{column}"] * 1e3)
    words = ["measured", "predicted", "fastest of all shown", "stop point: fastest of its curve", "plateau: shares as fast as it"]
    assert legend_of(figure) == ["ilp · memory_aware", "ilp · priority", *words]
    axes = figure.axes[0]
    best = frame[frame["budget_bytes"] == 640 * 2**20].sort_values("step_s").iloc[0]
    [star] = [line for line in axes.get_lines() if line.get_marker() == "*"]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (best["schedule_share"], best["step_s"] * 1e3)
    assert len(rings_of(axes)) == 2
    words = f"fastest: ilp · memory_aware, share {best['schedule_share']:.3g}: {best['step_s'] * 1e3:.0f} ms (p10 to p90: "
    assert axes.get_title("left").split("\n")[1].startswith(words)


def test_noise_decides_where_another_is_within_the_steps_of_the_fastest():
    points = pd.DataFrame({"label": ["a", "b", "c"], "schedule_share": np.nan, "step_s": [0.1, 0.104, 0.2],
                           "step_s_p10": 0.099, "step_s_p90": [0.105, 0.11, 0.21]})  # fmt: skip
    best, words = fastest(points, "step_s")
    assert (best["label"], words) == (
        "a", "fastest: a: 100.0 ms (p10 to p90: 99.0 to 105.0); 1 of 2 others within that: noise decides"
    )  # fmt: skip
    assert "noise" not in fastest(points[points["label"] != "b"], "step_s")[1]


def test_one_share_alone_is_no_curve_and_has_no_stop_point(run_writer):
    for share in (0.0, 0.5, 1.0):
        run_writer(f"{share}", share=share)
    run_writer("alone", share=0.5, strategy="random")
    axes = tradeoff_curve(analysis.runs(run_writer.sweep)).axes[0]
    assert len(rings_of(axes)) == 1


def test_a_share_that_failed_is_marked_but_not_drawn(run_writer):
    for share in (0.0, 0.5, 1.0):
        run_writer(f"{share}", share=share, ending="failed" if share == 0.5 else "ok")
    figure = drawn(tradeoff_curve(analysis.runs(run_writer.sweep)))
    assert list(lines_of(figure.axes[0])[0].get_xdata()) == [0.0, 1.0]
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[0.5]]
    assert "not measured" in legend_of(figure)


def test_step_time_over_memory_draws_each_budget_s_best_share_at_its_peak_predictions_hollow_and_bars_of_steps(frame):
    figure = drawn(step_time_over_memory(frame))
    axes = figure.axes[0]
    rows = frame[(frame["scheduler"] == "memory_aware") & (frame["status"] == "ok")]
    best = rows.loc[rows.groupby("budget_bytes")["step_s"].idxmin()]
    assert np.allclose(lines_of(axes)[0].get_xdata(), best["peak_bytes"] / 2**20)
    assert np.allclose(lines_of(axes)[0].get_ydata(), best["step_s"] * 1e3)
    assert axes.get_xlabel() == "peak memory per rank (MiB), measured; of each budget the stop point"
    dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert dotted[0].get_ydata()[0] == frame["compute_s"].min() * 1e3
    [front] = [line for line in axes.get_lines() if line.get_drawstyle() == "steps-post"]
    assert figure.legends[0].get_title().get_text().startswith("not shown: ilp · priority · share 0.5, budget 384 MiB")
    assert (np.diff(front.get_xdata()) >= 0).all() and (np.diff(front.get_ydata()) <= 0).all()
    hollow = [line for line in axes.get_lines() if line.get_markerfacecolor() == "white"]
    row = rows[rows["budget_bytes"] == 480 * MIB].iloc[0]
    assert hollow[0].get_ydata()[0] == row["predicted_step_s"] * 1e3
    bar = axes.containers[0].lines[2][0].get_segments()[0]
    assert np.allclose(bar[:, 1], [row["step_s_p10"] * 1e3, row["step_s_p90"] * 1e3])


def test_other_engines_are_black_at_their_own_memory():
    frame = analysis.runs(SWEEP / "engines")
    axes = drawn(step_time_over_memory(frame)).axes[0]
    looks = style.looks(frame)
    assert {label for label, look in looks.items() if look["color"] == style.INK} == {"ddp", "fsdp2 always own"}
    ddp = frame[frame["engine"] == "ddp"].iloc[0]
    black = [line for line in axes.get_lines() if line.get_color() == style.INK and line.get_marker() == looks["ddp"]["marker"]]
    assert (black[0].get_xdata()[0], black[0].get_ydata()[0]) == (ddp["peak_bytes"] / 2**20, ddp["step_s"] * 1e3)


def test_a_strategy_has_one_colour_and_a_scheduler_one_mark_in_every_sweep(run_writer):
    """Whatever else is in the sweep; what differs in another setting has another shade."""
    pairs = [(one, other) for one in ("dp", "fsdp", "greedy", "mine") for other in ("wfbp", "dear", "mine")]
    for strategy, scheduler in pairs:
        run_writer(f"{strategy}-{scheduler}", strategy=strategy, scheduler=scheduler)
    frame = analysis.runs(run_writer.sweep)
    both = style.looks(frame)
    assert len({tuple(look.values()) for look in both.values()}) == len(pairs)
    for (strategy, scheduler), label in zip(pairs, ask.labels(frame.sort_values("strategy")), strict=True):
        alone = style.looks(frame[(frame["strategy"] == strategy) & (frame["scheduler"] == scheduler)])
        assert alone == {f"{strategy} · {scheduler}" if strategy != scheduler else "mine": both[label]} or label not in alone
    assert len({both[f"dp · {other}"]["color"] for other in ("wfbp", "dear")}) == 1
    assert len({both[f"{one} · dear"]["marker"] for one in ("dp", "fsdp", "greedy")}) == 1
    for size in (1, 2, 4):
        run_writer(f"{size}", strategy="dp", scheduler="fusion", settings={"scheduler.bucket_mib": size})
    shades = style.looks(analysis.runs(run_writer.sweep).query("scheduler == 'fusion'"))
    assert len({look["color"] for look in shades.values()}) == 3 and len({look["marker"] for look in shades.values()}) == 1


def test_an_overview_names_the_front_and_the_baselines_and_the_rest_is_grey(run_writer):
    times = {"greedy": (480, 1.2), "joint": (640, 1.0), "ilp": (640, 1.4), "random": (480, 1.5), "fsdp": (640, 2.0)}
    for strategy, (budget, step_s) in times.items():
        run_writer(strategy, strategy=strategy, budget_mib=budget, share=None, times={"step_s": step_s})
    frame = analysis.runs(run_writer.sweep)
    words = {"greedy · memory_aware", "joint · memory_aware", "fsdp · memory_aware"}
    assert ask.named(frame) == words
    assert set(legend_of(drawn(overview(frame)))) >= {*words, "2 others"}
    assert "ilp · memory_aware" in legend_of(step_time_over_memory(frame))


def test_on_paper_a_picture_is_as_wide_as_a_column_and_its_text_is_text(frame, tmp_path):
    for columns, inches in style.COLUMNS.items():
        with style.paper(columns):
            figure = drawn(overview(frame))
        assert figure.get_figwidth() == inches and figure.get_suptitle() == ""
    assert b"/FontFile2" in style.save(figure, tmp_path / "picture.pdf").read_bytes()  # TrueType, which journals ask for
    assert "<text" in style.save(figure, tmp_path / "picture.svg").read_text()


def test_no_title_is_clipped(run_writer):
    for number, share in enumerate((0.0, 1.0)):
        for budget in (480, 640):
            settings = {"scheduler.bucket_mib": 12.5 + number, "optimizer.betas_and_others": "a" * 30 + str(number)}
            about = {"share": share, "budget_mib": budget, "model": "a" * 40 + " " + "b" * 40, "settings": settings}
            run_writer(f"{number}-{budget}", strategy="hsdp_no_reshard", **about)
    frame = analysis.runs(run_writer.sweep)
    for picture in (overview, step_time_over_memory, step_time_over_setting):
        figure = drawn(picture(frame))
        FigureCanvasAgg(figure).draw()
        renderer = figure.canvas.get_renderer()
        titles = [figure._suptitle, *(axes._left_title for axes in figure.axes)]
        others = [*figure.legends[0].findobj(matplotlib.text.Text), *(axes.xaxis.label for axes in figure.axes)]
        for text in (text for text in titles + others if text.get_text()):
            box = text.get_window_extent(renderer)
            assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, text.get_text()
        boxes = [text.get_window_extent(renderer) for text in titles if text.get_text()]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("budget", [640, None])
def test_a_single_run_can_be_drawn(run_writer, budget):
    run_writer("0", budget_mib=budget, share=None)
    drawn(overview(analysis.runs(run_writer.sweep)))


def test_the_overview_has_both_axes_or_the_one_that_varies(frame):
    assert len(drawn(overview(frame)).axes) == 4
    assert len(overview(frame[frame["budget_bytes"] == 640 * 2**20]).axes) == 3
    assert len(overview(frame[frame["schedule_share"] == 0.5]).axes) == 1


@pytest.mark.parametrize(
    ("picture", "ending", "complaint"),
    [
        (overview, "infeasible", "no run was measured"), (tradeoff_curve, "ok", "two schedule shares"),
        (step_time_over_setting, "ok", "no swept number"),
        (lambda _: memory_over_period(Timeline(1.0, (), ())), "ok", "no memory"),
        (lambda _: gantt(Timeline(1.0, (), ())), "ok", "no ranks"),
        (lambda _: engine_comparison({"budgets": [{"lines": []}]}), "ok", "no engine was measured"),
    ],
)  # fmt: skip
def test_what_there_is_nothing_of_is_not_drawn(run_writer, picture, ending, complaint):
    run_writer("0", ending=ending, share=None)
    with pytest.raises(ValueError, match=complaint):
        picture(analysis.runs(run_writer.sweep))


def test_many_series_still_fit(run_writer):
    for name, strategy in enumerate(("dp", "zero2", "sdp", "fsdp", "greedy", "random")):
        for other, scheduler in enumerate(("sequential", "wfbp", "partitioning")):
            for share in (0.0, 1.0):
                run_writer(f"{name}-{other}-{share}", strategy=strategy, scheduler=scheduler, share=share)
    frame = analysis.runs(run_writer.sweep)
    assert len(legend_of(drawn(tradeoff_curve(frame)))) == 23
    drawn(step_time_over_memory(frame))


def test_memory_stacks_what_was_measured_and_outlines_the_prediction(timelines):
    measured, _ = timelines
    figure = drawn(memory_over_period(measured, 640 * 2**20, "memory"))
    assert legend_of(figure)[-3:] == ["total, measured", "total, predicted", "budget 640 MiB"]
    assert "update scratch" not in legend_of(figure)
    totals = [sum(m.measured.values()) / 2**20 for m in measured.memory]
    expected = [sum(m.predicted.values()) / 2**20 for m in measured.memory]
    assert figure.axes[0].get_title("left") == f"peak {max(totals):.4g} MiB measured, {max(expected):.4g} MiB predicted"
    top_of_stack, outline, dashed = figure.axes[0].findobj(StepPatch)[-3:]
    assert np.allclose(top_of_stack.get_data().values, totals)
    assert np.allclose(outline.get_data().values, totals)
    assert np.allclose(dashed.get_data().values, expected)


def test_the_stack_ends_at_the_total_which_is_a_line_and_slots_that_recompute_are_marked():
    """Categories are told at their highest, and 2 + 2 MiB were never 4 at once."""
    sizes = {"parameters": 2 * 2**20, "activations": 2 * 2**20, "total": 3 * 2**20}
    timeline = Timeline(1.0, ("B:a.0", "B:a.1"), (), (SlotMemory("B:a.0", sizes), SlotMemory("B:a.1", sizes)))
    figure = drawn(memory_over_period(timeline, recomputed={"a.1"}))
    parameters, activations, _ = figure.axes[0].findobj(StepPatch)
    assert list(parameters.get_data().values) == [2, 2] and list(activations.get_data().values) == [3, 3]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["B:0", "B:1 ↻"]
    assert legend_of(figure) == ["activations", "parameters", "total, predicted", "recomputes"]
    assert figure.axes[0].get_title("left") == "peak 3 MiB predicted"


def test_the_gantt_has_the_prediction_above_the_ranks(timelines):
    measured, predicted = timelines
    figure = drawn(gantt(measured, predicted))
    titles = [axes.get_title("left") for axes in figure.axes]
    assert [title.split(":")[0] for title in titles] == ["predicted", "rank 0", "rank 1"]
    times = measured.times_of(0)
    assert f"overlap ratio {times.overlap_ratio:.2f}" in titles[1]
    bars = [patch for patch in figure.axes[1].patches if patch.get_width() > 0]
    assert sorted(bar.get_width() for bar in bars) == pytest.approx(
        sorted(i.duration_s * 1e3 for i in measured.ranks[0].intervals)
    )
    assert legend_of(figure)[:3] == ["forward", "backward", "all-reduce"]


def test_names_are_cut_to_what_tells_them_apart():
    assert shortened(["B:transformer.h.1", "B:transformer.h.2", "F:wte"]) == {
        "B:transformer.h.1": "B:1",
        "B:transformer.h.2": "B:2",
        "F:wte": "F:wte",
    }
    assert shortened(["layer1.0", "layer2.0"]) == {"layer1.0": "layer1.0", "layer2.0": "layer2.0"}
    assert shortened(["h.0+h.1", "h.1+model.wpe"]) == {"h.0+h.1": "0+1", "h.1+model.wpe": "1+wpe"}
    assert shortened([]) == {}


def test_what_is_only_predicted_is_drawn_and_called_so(run_writer):
    for name, share in enumerate((0.0, 0.5, 1.0)):
        run_writer(f"{name}", share=share, times={"step_s": 1.0 + share})
    frame = analysis.runs(run_writer.sweep)
    frame["status"], frame["step_s"] = "predicted", float("nan")
    best = frame.loc[frame["predicted_step_s"].idxmin(), "schedule_share"]
    figure = drawn(tradeoff_curve(frame))
    assert f"fastest, predicted: ilp · memory_aware, share {best:.3g}: " in figure.axes[0].get_title("left")
    words = legend_of(figure)
    assert "predicted" in words and "measured" not in words and "not measured" not in words
    drawn(step_time_over_memory(frame))


def test_a_curve_is_of_one_strategy_and_scheduler(run_writer):
    run_writer("0", share=0.0, scheduler="dear")
    run_writer("1", share=1.0, scheduler="wfbp")
    assert share_curves(analysis.runs(run_writer.sweep)) == []


def test_step_time_is_drawn_over_a_number_that_was_swept_with_each_repetition(run_writer):
    """A point per value, not the median of all; of several runs the bar is the interval of their median."""
    for size in (0.1, 0.5, 25.0):
        for seed in (0, 1, 2):
            settings = {"scheduler.bucket_mib": size, "run.seed": seed}
            run_writer(f"{size}-{seed}", scheduler="fusion", budget_mib=None, share=None, settings=settings,
                       times={"step_s": 1 + size / 10 + seed / 50})  # fmt: skip
    frame = analysis.runs(run_writer.sweep)
    figure = drawn(overview(frame))
    [axes] = figure.axes
    assert axes.get_xlabel() == "scheduler.bucket_mib"
    by_size = frame.groupby("scheduler.bucket_mib")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "0.5", "25"]
    solid = next(line for line in lines_of(axes) if len(line.get_xdata()) == 3)
    assert np.allclose(solid.get_ydata(), by_size["step_s"].median() * 1e3)
    [dots] = [line for line in axes.get_lines() if line.get_marker() == "." and len(line.get_xdata())]
    assert sorted(dots.get_ydata()) == sorted(frame["step_s"] * 1e3)
    bars, _star = axes.collections
    ends = [(segment[:, 1].min(), segment[:, 1].max()) for segment in bars.get_segments()]
    assert np.allclose(ends, np.stack([by_size["step_s"].min(), by_size["step_s"].max()], axis=1) * 1e3)
    assert legend_of(figure)[:4] == ["ilp · fusion", "measured", "predicted", "a run of several"]

    over_budgets = legend_of(drawn(step_time_over_memory(frame)))
    assert over_budgets[:3] == [f"ilp · fusion · bucket_mib={size}" for size in ("0.1", "0.5", "25")]


def test_values_that_are_no_numbers_stand_before_them_and_budgets_apart(run_writer):
    for budget_mib in (480, 640):
        for size in (None, 1.0, 4.0):
            name = f"{budget_mib}-{size}"
            run_writer(name, budget_mib=budget_mib, share=0.5, settings={"scheduler.block_mib": size})
    figure = drawn(step_time_over_setting(analysis.runs(run_writer.sweep)))
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["null", "1", "4"]
    assert legend_of(figure)[:2] == [f"ilp · memory_aware, budget {size} MiB" for size in (480, 640)]
    assert figure.get_suptitle() == "gpt-small · 2 ranks · emulated link · several budgets"


def test_a_plane_of_three_shares_has_contours_measured_points_and_its_stop_point():
    rows = [
        {"schedule": s / 4, "activations": a / 4, "strategies": (4 - s - a) / 4, "predicted_step_s": 0.3 + 0.1 * s - 0.02 * a,
         "step_s": 0.412 if s == 1 and a == 1 else None, "is_stop": s == 0 and a == 4}
        for s in range(5) for a in range(5 - s)
    ]  # fmt: skip
    rows[-1]["predicted_step_s"] = None
    figure = drawn(three_shares(pd.DataFrame(rows), "a job"))
    [axes, scale] = figure.axes
    assert {text.get_text() for text in axes.texts} >= {"412.0", "the rest is for strategies"}
    assert scale.get_ylabel() == "time per iteration, ms predicted"
    assert legend_of(figure) == [
        "planned", "measured, ms", "infeasible",
        "stop point, 220.0 ms predicted: 0 % schedule, 100 % activations, 0 % strategies",
    ]  # fmt: skip
    assert SHARES == ("schedule", "activations", "strategies")


def test_a_panel_shows_negative_values_and_the_star_stands_at_what_it_was_predicted_for(frame):
    rows = frame.assign(extra_communication_s=-0.01, predicted_extra_communication_s=-0.01)
    assert tradeoff_curve(rows).axes[2].get_ylim()[0] < -10
    planned = rows.assign(status="predicted", peak_bytes=rows["predicted_peak_bytes"] / 2)
    points = ask.over_memory(planned)
    best = points.loc[points["predicted_step_s"].idxmin()]
    [star] = [line for line in step_time_over_memory(planned).axes[0].get_lines() if line.get_marker() == "*"]
    assert star.get_xdata()[0] * MIB == pytest.approx(best["predicted_at"])


def test_peaks_that_are_alike_are_joined_by_no_line(frame):
    lines = lines_of(step_time_over_memory(frame.assign(peak_bytes=2.0**29)).axes[0])
    assert all(len(line.get_xdata()) == 1 for line in lines if line.get_drawstyle() == "default")
