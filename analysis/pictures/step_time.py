"""The trade-off: step time over peak memory, a line per strategy · scheduler, other engines at their own memory."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import questions as ask
from analysis.pictures import style
from mdcs.sizes import GIB, MIB

_NOTES = 3


@style.styled
def step_time_over_memory(frame: pd.DataFrame, model: str | None = None, looks: style.Looks | None = None) -> Figure:
    """Step time (ms) over the peak memory of a rank, a line per strategy · scheduler: measured (median, p10–p90) at measured
    peaks, predicted hollow at predicted ones. The star is the fastest of all that is shown.

    A point is the best schedule_share of a budget. Runs that failed, are infeasible or incomplete are named below. Raises
    ValueError if there is nothing to draw.
    """
    workload, rows = choose_workload(frame, model)
    looks = looks or style.looks(rows)
    figure = style.new_figure(8.2, 4.4, workload.title)
    shown = draw_steps(figure.subplots(), rows, looks, 8.2)
    style.legend_below(figure, style.series_handles(looks, shown) + handles(rows), notes=missing_notes(rows))
    return figure


def choose_workload(frame: pd.DataFrame, model: str | None = None) -> tuple[ask.Workload, pd.DataFrame]:
    for workload, rows in ask.workloads(frame if model is None else frame[frame["model"] == model]):
        if len(ask.drawn(rows)):
            return workload, rows
    raise ValueError("no step times to draw: nothing was predicted, and no run was measured to its end")


def handles(rows: pd.DataFrame, *, front: bool = True) -> list[Line2D]:
    """Legend entries of what is not a series."""
    return [
        *([style.measured_handle()] if len(ask.measured(rows)) else []),
        *([style.predicted_handle()] if ask.drawn(rows)["predicted_step_s"].notna().any() else []),
        *([style.repetition_handle()] if ask.repeated(rows) else []),
        style.star_handle(),
        *([Line2D([], [], **style.FRONT, label="least time within so much memory")] if front else []),
        Line2D([], [], color=style.INK, ls=":", lw=1.2, label="compute alone"),
    ]


def missing_notes(rows: pd.DataFrame, width: int = 130) -> str:
    """One line for each of the first few runs that are not drawn, and the number of others."""
    missing = ask.not_measured(rows)
    notes = []
    for _, row in missing.head(_NOTES).iterrows():
        share = "" if pd.isna(row["schedule_share"]) else f", share {row['schedule_share']:.3g}"
        what = f"not shown: {ask.label(row)}, {ask.budget_words(row['budget_bytes'])}{share}: {row['reason']}"
        notes.append(textwrap.shorten(what, width, placeholder=" …"))
    if len(missing) > _NOTES:
        notes.append(f"and {len(missing) - _NOTES} more")
    return "\n".join(notes)


def draw_steps(axes: Axes, rows: pd.DataFrame, looks: style.Looks, inches: float) -> list[str]:
    """Draw into axes that are `inches` wide; return the labels of the series that they show."""
    time, points = ask.time_of(ask.drawn(rows)), ask.best_points(rows, "budget_bytes")
    peak = ask.memory_of(points)
    points = points.assign(peak=peak, at=points["predicted_peak_bytes"].fillna(peak))[peak.notna()].reset_index(drop=True)
    if not len(points):
        raise ValueError("no step times to draw over memory: no run has a peak or a budget")
    scale, unit = (GIB, "GiB") if points["peak"].max() >= GIB else (MIB, "MiB")
    points[["peak", "at"]] /= scale
    for label, of_label in points.sort_values("peak", kind="stable").groupby("label"):
        style.draw_steps(axes, of_label["peak"], of_label, looks[str(label)], of_label["at"])
        alike = ask.at_points(ask.series(ask.drawn(rows))[str(label)], of_label, "budget_bytes", "schedule_share")
        style.draw_repetitions(axes, ask.memory_of(alike) / scale, alike, of_label["runs"])
    front = points.sort_values(["peak", time])
    front = front[front[time] < front[time].cummin().shift(fill_value=float("inf"))]
    axes.plot([*front["peak"], points["peak"].max()], [*(front[time] * 1e3), front[time].min() * 1e3], **style.FRONT)
    best, words = ask.fastest(points, time)
    style.draw_star(axes, best["peak"], best, time, looks[best["label"]])
    compute = points["compute_s"].fillna(points["predicted_compute_s"])
    axes.axhline(compute.min() * 1e3, color=style.INK, ls=":", lw=1.2)
    axes.margins(x=0.06, y=0.1)
    style.set_title(axes, f"time per iteration over memory\n{words}", inches)
    several = ask.drawn(rows).groupby(["strategy", "scheduler", "budget_bytes"])["schedule_share"].nunique().gt(1).any()
    known, planned = points["peak_bytes"].notna(), points["predicted_peak_bytes"].notna()
    how = "measured" if known.all() else "measured where it was, else predicted" if known.any() else "predicted"
    how = how if (known | planned).any() else "the budget: not measured"
    axes.set_xlabel(f"peak memory per rank ({unit}), {how}{'; of each budget the stop point' if several else ''}")
    axes.set_ylabel("ms")
    return sorted(set(points["label"]))
