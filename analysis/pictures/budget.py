"""Step time over the budget, per strategy and scheduler."""

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
def step_time_over_budget(frame: pd.DataFrame, model: str | None = None) -> Figure:
    """Step time (ms) over the budget, a line per strategy · scheduler: measured (median, p10–p90), predicted hollow.

    Where runs differ only in schedule_share, the one at the stop point is drawn. Runs that failed, are infeasible
    or incomplete are not drawn but named below. Raises ValueError if there is nothing to draw.
    """
    workload, rows = choose_workload(frame, model)
    looks = style.look(ask.series(ask.drawn(rows)))
    figure = style.new_figure(8.2, 4.2, workload.title)
    axes = figure.subplots()
    draw_budgets(axes, rows, looks)
    style.legend_below(figure, style.series_handles(looks) + budget_handles(rows), notes=missing_notes(rows))
    return figure


def choose_workload(frame: pd.DataFrame, model: str | None = None) -> tuple[ask.Workload, pd.DataFrame]:
    groups = ask.workloads(frame if model is None else frame[frame["model"] == model])
    for workload, rows in groups:
        if len(ask.drawn(rows)):
            return workload, rows
    raise ValueError("no step times to draw: nothing was predicted, and no run was measured to its end")


def budget_handles(rows: pd.DataFrame) -> list[Line2D]:
    return [
        *([style.measured_handle()] if len(ask.measured(rows)) else []),
        style.predicted_handle(),
        *([style.repetition_handle()] if ask.repeated(rows) else []),
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


def draw_budgets(axes: Axes, rows: pd.DataFrame, looks: dict[str, dict[str, str]]) -> None:
    shown, time = ask.drawn(rows), ask.time_of(rows)
    positions = _Budgets(shown["budget_bytes"])
    by_label = ask.series(shown)
    for index, (label, of_label) in enumerate(by_label.items()):
        # Neighbouring series stand side by side, so that bars at one budget do not hide each other.
        shift = (index - (len(by_label) - 1) / 2) * min(0.012, 0.06 / len(by_label)) * positions.span
        points = best_share(of_label, time, "budget_bytes")
        x = [positions.x(budget) + shift for budget in points["budget_bytes"]]
        step, colour = points["step_s"] * 1e3, looks[label]["color"]
        bars = [
            (step - points["step_s_p10"] * 1e3).clip(lower=0),
            (points["step_s_p90"] * 1e3 - step).clip(lower=0),
        ]
        alike = ask.at_points(of_label, points, "budget_bytes", "schedule_share")
        at = [positions.x(budget) + shift for budget in alike["budget_bytes"]]
        style.draw_repetitions(axes, at, alike, points["runs"])
        dashes = "--" if time == "predicted_step_s" else ""
        axes.plot(
            x, points["predicted_step_s"] * 1e3, marker="o", ls=dashes, lw=1.1, c=colour, mfc="white", mew=1.2, ms=6.5, zorder=2
        )
        if not step.notna().any():
            continue
        limited = points["budget_bytes"].notna().tolist()
        axes.plot(
            [v for v, has in zip(x, limited, strict=True) if has],
            step[limited],
            color=colour,
            lw=1.4,
            zorder=3,
        )
        axes.errorbar(
            x,
            step,
            bars,
            fmt=looks[label]["marker"],
            color=colour,
            ms=4.5,
            elinewidth=1.4,
            capsize=2.5,
            zorder=4,
        )
    compute = shown["compute_s"].fillna(shown["predicted_compute_s"])
    axes.axhline(compute.min() * 1e3, color=style.INK, ls=":", lw=1.2)
    axes.set_xticks(*positions.ticks())
    axes.margins(x=0.06, y=0.1)
    axes.set_title("time per iteration over budget")
    several_shares = (
        shown.groupby(["strategy", "scheduler", "budget_bytes"])["schedule_share"].nunique().gt(1).any()
    )
    axes.set_xlabel(
        f"budget per rank ({positions.unit}{', each at its stop point' if several_shares else ''})"
    )
    axes.set_ylabel("ms")


def best_share(rows: pd.DataFrame, time: str, axis: str) -> pd.DataFrame:
    """One row per value of `axis`: the share, or no share, of least step time (medians over repetitions)."""
    best = []
    for value, alike in rows.groupby(axis, dropna=False):
        points = ask.median_by(alike, "schedule_share")
        best.append(points.loc[points[time].idxmin()].to_dict() | {axis: value})
    return pd.DataFrame(best)


class _Budgets:
    """Where budgets stand on the axis: on a linear scale in `unit`; runs without a budget right of all others."""

    def __init__(self, budgets: pd.Series) -> None:
        limited = sorted(budgets.dropna().unique())
        self.unit = "GiB" if limited and limited[-1] >= GIB else "MiB"
        self._scale = GIB if self.unit == "GiB" else MIB
        self._limited = [budget / self._scale for budget in limited]
        self._has_unlimited = bool(budgets.isna().any())
        distance = (self._limited[-1] - self._limited[0]) if len(self._limited) > 1 else 1.0
        self._unlimited_x = (self._limited[-1] + 0.18 * distance) if self._limited else 0.0
        self.span = distance * (1.18 if self._has_unlimited else 1.0)

    def x(self, budget_bytes: float) -> float:
        return self._unlimited_x if pd.isna(budget_bytes) else budget_bytes / self._scale

    def ticks(self) -> tuple[list[float], list[str]]:
        # Ticks only where runs are; close ones (under 8 % of the axis) would write over each other.
        shown: list[float] = []
        for value in self._limited:
            if not shown or value - shown[-1] >= 0.08 * self.span:
                shown.append(value)
        labels = [f"{value:.4g}" for value in shown]
        if self._has_unlimited:
            return [*shown, self._unlimited_x], [*labels, "no limit"]
        return shown, labels
