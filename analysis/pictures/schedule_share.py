"""The trade-off curve: step time, overlap duration and extra communication over schedule_share."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import questions as ask
from analysis.pictures import style

PANELS = (("step_s", "time per iteration"), ("overlap_s", "overlap duration"), ("extra_communication_s", "extra communication"))
_RING: dict[str, Any] = {"color": "none", "marker": "o", "ms": 13, "mfc": "none", "mec": style.INK, "mew": 0.9}


@style.styled
def tradeoff_curve(
    frame: pd.DataFrame, model: str | None = None, budget_bytes: float | None = None, looks: style.Looks | None = None
) -> Figure:
    """Step time, overlap duration and extra communication (ms) over schedule_share, a line per strategy · scheduler.

    Draws the rows of one workload and one budget: those of `model` and `budget_bytes`, or, where these leave a
    choice, the curve with most shares. Raises ValueError if no such rows have two shares.
    """
    curve = choose_curve(frame, model, budget_bytes)
    looks = looks or style.looks(frame)
    figure = style.new_figure(8.2, 5.8, curve_title(curve))
    draw_curve(figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1)), curve, looks, 8.2)
    style.legend_below(figure, style.series_handles(looks, ask.series(curve)) + curve_handles(curve))
    return figure


def choose_curve(frame: pd.DataFrame, model: str | None = None, budget_bytes: float | None = None) -> pd.DataFrame:
    rows = frame if model is None else frame[frame["model"] == model]
    rows = rows if budget_bytes is None else rows[rows["budget_bytes"] == budget_bytes]
    curves = ask.share_curves(rows)
    if not curves:
        raise ValueError("no trade-off curve: that needs runs or plans of one budget with two schedule shares or more")
    return curves[0]


def curve_title(curve: pd.DataFrame) -> str:
    workload = ask.workloads(curve)[0][0]
    model, *rest = workload.title.split(" · ")
    return " · ".join([model, ask.budget_words(curve["budget_bytes"].iloc[0]), *rest])


def curve_handles(curve: pd.DataFrame) -> list[Line2D]:
    handles = [
        *([style.measured_handle()] if len(ask.measured(curve)) else []),
        style.predicted_handle(),
        *([style.repetition_handle()] if ask.repeated(curve) else []),
        style.star_handle(),
        Line2D([], [], **_RING, label="stop point: fastest of its curve"),
    ]
    missing = ask.not_measured(curve)
    if len(missing):
        words = "infeasible" if (missing["status"] == "infeasible").all() else "not measured"
        handles.append(Line2D([], [], color="none", marker="x", mec=style.GREY, mew=1.4, label=words))
    return handles


def draw_curve(axes: Sequence[Axes], curve: pd.DataFrame, looks: style.Looks, inches: float, about: str = "") -> None:
    """Draw into three axes that are `inches` wide, top to bottom: `PANELS`. `about` goes into the title."""
    by_label = ask.series(curve)
    for panel, (column, title) in zip(axes, PANELS, strict=True):
        for label, rows in by_label.items():
            _draw_line(panel, ask.drawn(rows), column, looks[label])
        panel.set_title(title)
        panel.set_ylabel("ms")
        panel.yaxis.set_major_locator(MaxNLocator(5 if column == "step_s" else 3, min_n_ticks=3))
        if column != "step_s":
            panel.margins(y=0.12)
            panel.set_ylim(bottom=0, top=None if panel.get_ylim()[1] > 0 else 1)

    top, bottom = axes[0], axes[-1]
    top.margins(y=0.14)
    style.set_title(top, f"{PANELS[0][1]}{about}\n{_mark_best(top, curve, looks)}", inches)
    for label, rows in by_label.items():
        if not len(missing := ask.not_measured(rows)["schedule_share"]):
            continue
        colour = looks[label]["color"]
        top.plot(missing, [0.04] * len(missing), "x", c=colour, mew=1.6, transform=top.get_xaxis_transform())
    shares = sorted(curve["schedule_share"].unique())
    if len(shares) <= 11:
        bottom.set_xticks(shares, [f"{share:.3g}" for share in shares])
    bottom.set_xlabel("← memory for the strategy      schedule_share      for the schedule →")


def _draw_line(axes: Axes, rows: pd.DataFrame, column: str, look: dict[str, str]) -> None:
    points = ask.median_by(rows, "schedule_share")
    if not len(points):
        return
    if column != "step_s":
        steps = {"step_s": points[column], "predicted_step_s": points[f"predicted_{column}"]}
        points = points.assign(**steps, step_s_p10=nan, step_s_p90=nan)
    style.draw_steps(axes, points["schedule_share"], points, look)
    if column == "step_s":
        style.draw_repetitions(axes, rows["schedule_share"], rows, points["runs"])


def _mark_best(axes: Axes, curve: pd.DataFrame, looks: style.Looks) -> str:
    """Mark the stop point of each curve, and the fastest of all points; return that in words."""
    shown = ask.drawn(curve)
    time = ask.time_of(shown)
    for rows in ask.series(shown).values():
        if rows["schedule_share"].nunique() > 1:  # one share alone is no curve
            point = ask.stop_point(rows, time)
            axes.plot(point["schedule_share"], point[time] * 1e3, **_RING, zorder=5)
    points = [ask.median_by(rows, "schedule_share").assign(label=label) for label, rows in ask.series(shown).items()]
    best, words = ask.fastest(pd.concat(points, ignore_index=True), time)
    style.draw_star(axes, best["schedule_share"], best, time, looks[best["label"]])
    return words
