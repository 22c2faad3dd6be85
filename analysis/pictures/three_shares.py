"""Step time over the division of a budget in three."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from analysis.pictures import style
from analysis.questions import milliseconds

SHARES = ("schedule", "activations", "strategies")


@style.styled
def three_shares(points: pd.DataFrame, title: str) -> Figure:
    """Predicted step time (ms) over the shares of the slack for the schedule and for activations, as contours, with the
    measured times beside their points; strategies have the rest.

    `points` has a row per division, with the columns `SHARES` (their sum is 1), `predicted_step_s` (missing where no
    plan fits), `step_s` (missing where nothing was measured) and `is_stop`.
    """
    points = points.astype({"predicted_step_s": float, "step_s": float})
    known, measured = points.dropna(subset="predicted_step_s"), points.dropna(subset="step_s")
    figure = style.new_figure(7.6, 5.2, title)
    axes = figure.subplots()
    if len(known) >= 3 and known["predicted_step_s"].max() > known["predicted_step_s"].min() * (1 + 1e-9):
        x, y, times = known["schedule"], known["activations"], known["predicted_step_s"] * 1e3
        filled = axes.tricontourf(x, y, times, levels=12, cmap="viridis_r")
        figure.colorbar(filled, ax=axes, shrink=0.75, label="time per iteration, ms predicted")
    infeasible = points[points["predicted_step_s"].isna()]
    marks: tuple[tuple[pd.DataFrame, str, dict[str, Any], str], ...] = (
        (known, ".", {"mfc": style.INK, "mec": style.INK, "ms": 3}, "planned"),
        (measured, "o", {"mfc": "white", "mec": style.INK, "ms": 6}, "measured, ms"),
        (infeasible, "x", {"mec": style.GREY, "mew": 1.4}, "infeasible"),
    )
    for rows, marker, mark, words in marks:
        if len(rows):
            axes.plot(rows["schedule"], rows["activations"], ls="", marker=marker, label=words, **mark)
    for row in measured.itertuples():
        beside: dict[str, Any] = {"xytext": (8, 4), "textcoords": "offset points", "fontweight": "bold"}
        box = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1.2}
        axes.annotate(milliseconds(row.step_s), (row.schedule, row.activations), bbox=box, **beside)
    for row in points[points["is_stop"]].itertuples():
        words = ", ".join(f"{getattr(row, name) * 100:.0f} % {name}" for name in SHARES)
        label = f"stop point, {milliseconds(row.predicted_step_s)} ms predicted: {words}"
        axes.plot(row.schedule, row.activations, ls="", zorder=5, label=label, **style.STAR)
    for axis, words in ((axes.xaxis, "schedule"), (axes.yaxis, "activations: the larger, the less is recomputed")):
        axis.set_major_formatter(PercentFormatter(1.0))
        axis.set_label_text(f"share of the slack for {words}")
    axes.annotate("the rest is for strategies", (0.98, 0.95), xycoords="axes fraction", ha="right")
    axes.set(aspect="equal", xlim=(-0.05, 1.12), ylim=(-0.05, 1.1))
    axes.grid(False)
    handles: list[Line2D] = axes.get_legend_handles_labels()[0]  # type: ignore[assignment]
    style.legend_below(figure, handles)
    return figure
