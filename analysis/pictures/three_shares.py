"""Step time over the division of a budget in three: a triangle whose corners give all to one of them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.tri import Triangulation

from analysis.pictures import style

SHARES = ("schedule", "activations", "strategies")
_HEIGHT = math.sqrt(3) / 2
_CORNERS = {"schedule": (0.5, _HEIGHT), "activations": (1.0, 0.0), "strategies": (0.0, 0.0)}


@style.styled
def three_shares(points: pd.DataFrame, title: str) -> Figure:
    """Predicted step time (ms) over the shares of the slack, as contours, with the measured times beside their points.

    `points` has a row per division, with the columns `SHARES` (their sum is 1), `predicted_step_s` (missing where no
    plan fits), `step_s` (missing where nothing was measured) and `is_stop`.
    """
    x, y = (sum(points[name] * _CORNERS[name][i] for name in SHARES) for i in range(2))
    times, known = points["predicted_step_s"].astype(float) * 1e3, points["predicted_step_s"].notna()
    figure = style.new_figure(7.6, 5.2, title)
    axes = figure.subplots()
    _contours(axes, figure, x[known].to_numpy(), y[known].to_numpy(), times[known].to_numpy())
    axes.plot(x[known], y[known], ".", c=style.INK, ms=3, alpha=0.5)
    axes.plot(x[~known], y[~known], "x", c=style.GREY, mew=1.4)
    _frame(axes)
    measured = points["step_s"].notna()
    for i in points.index[measured]:
        left = x[i] > 0.75  # of the point, towards the middle
        axes.plot(x[i], y[i], "o", mfc="white", mec=style.INK, ms=6, zorder=4)
        axes.annotate(
            _milliseconds(points["step_s"][i] * 1e3), (x[i], y[i]), (-11 if left else 11, 5 if y[i] < 0.5 else -3),
            textcoords="offset points", ha="right" if left else "left", fontweight="bold", zorder=6,
            bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1.2},
        )  # fmt: skip
    handles = [Line2D([], [], color="none", marker=".", mfc=style.INK, mec=style.INK, label="planned")]
    if measured.any():
        handles.append(Line2D([], [], color="none", marker="o", mfc="white", mec=style.INK, label="measured, ms"))
    if not known.all():
        handles.append(Line2D([], [], color="none", marker="x", mec=style.GREY, mew=1.4, label="infeasible"))
    for i in points.index[points["is_stop"]]:
        words = ", ".join(f"{points[name][i] * 100:.0f} % {name}" for name in SHARES)
        axes.plot(x[i], y[i], zorder=5, **style.STAR)
        label = f"stop point, {_milliseconds(times[i])} ms predicted: {words}"
        handles.append(Line2D([], [], color="none", label=label, **style.STAR))
    style.legend_below(figure, handles)
    return figure


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _contours(axes: Axes, figure: Figure, x: np.ndarray, y: np.ndarray, times: np.ndarray) -> None:
    """Fill between lines of equal time, with a scale at the right. Fewer than three points, or all alike, have none."""
    if len(times) < 3 or np.ptp(times) < 1e-9 * times.max():
        return
    filled = axes.tricontourf(Triangulation(x, y), times, levels=12, cmap="viridis_r")
    figure.colorbar(filled, ax=axes, shrink=0.75, label="time per iteration, ms predicted")


def _frame(axes: Axes) -> None:
    """Draw the triangle with the names of its corners, and a grid in steps of a quarter."""
    names = list(_CORNERS)
    for name in names:
        others = [np.array(_CORNERS[other]) for other in names if other != name]
        for part in (0.0, 0.25, 0.5, 0.75):
            ends = [part * np.array(_CORNERS[name]) + (1 - part) * other for other in others]
            color, width = (style.INK, 1.0) if part == 0 else ("white", 0.6)
            axes.plot(*zip(*ends, strict=True), c=color, lw=width, alpha=1 if part == 0 else 0.6, zorder=2)
    words = {"schedule": "all slack to the schedule", "activations": "… to activations:\nleast recomputed",
             "strategies": "… to strategies:\nleast sharded, most recomputed"}  # fmt: skip
    for name, (x, y) in _CORNERS.items():
        top = name == "schedule"
        axes.annotate(
            words[name],
            (x, y),
            (0, 10 if top else -10),
            textcoords="offset points",
            ha="center",
            va="bottom" if top else "top",
        )
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_xlim(-0.1, 1.1)
    axes.set_ylim(-0.12, _HEIGHT + 0.06)
