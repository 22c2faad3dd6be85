"""Step time over a setting that was swept, per strategy and scheduler."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import questions as ask
from analysis.pictures import style
from analysis.pictures.step_time import choose_workload, handles, missing_notes

_LOG_FROM = 20
"""Positive values are drawn on a logarithmic scale where the greatest is so many times the least."""


@style.styled
def step_time_over_setting(
    frame: pd.DataFrame, model: str | None = None, key: str | None = None, looks: style.Looks | None = None
) -> Figure:
    """Step time (ms) over a numeric setting, by its full key: by default the one with most values. A line per strategy ·
    scheduler and everything else that was swept: measured (median, p10–p90), predicted hollow, repetitions as dots. Values that
    are no numbers (null) stand at the left, before the first number.

    Raises ValueError if there is nothing to draw, or no number was swept.
    """
    workload, rows = choose_workload(frame, model)
    key = key or ask.setting_axis(rows)
    if key is None or not ask.numbers(ask.drawn(rows)[key]).notna().any():
        raise ValueError("no swept number to draw step times over")
    shown, time = ask.drawn(rows), ask.time_of(ask.drawn(rows))
    shown = shown[shown[key].notna()].assign(at=ask.numbers(shown[key]))
    words = shown[shown["at"].isna()][key].map(str)
    all_looks, by_label = looks or style.looks(rows), ask.series(shown, without=key)
    looks = {label: all_looks[ask.label(of.iloc[0])] for label, of in by_label.items()}
    figure = style.new_figure(8.2, 4.4, f"{workload.title} · {_budgets(shown)}")
    axes = figure.subplots()
    values = sorted(shown["at"].dropna().unique())
    log = values[0] > 0 and values[-1] >= _LOG_FROM * values[0]
    left = values[0] / (values[-1] / values[0]) ** 0.12 if log else values[0] - 0.12 * (values[-1] - values[0])
    shown["at"] = shown["at"].fillna(left)
    every = ask.best_points(shown, "budget_bytes", "at", without=key)
    for (label, budget), points in every.groupby(["label", "budget_bytes"], dropna=False):
        style.draw_steps(axes, points["at"], points, looks[label])
        alike = ask.at_points(ask.series(shown, without=key)[label], points, "budget_bytes", "at", "schedule_share")
        style.draw_repetitions(axes, alike["at"], alike, points["runs"])
        if shown["budget_bytes"].nunique(dropna=False) > 1:
            end = (points["at"].iloc[-1], points[time].iloc[-1] * 1e3)
            axes.annotate(ask.budget_words(budget), end, (6, 0), textcoords="offset points", fontsize=7)
    best, told = ask.fastest(every, time)
    style.draw_star(axes, best["at"], best, time, looks[best["label"]])
    compute = shown["compute_s"].fillna(shown["predicted_compute_s"])
    axes.axhline(compute.min() * 1e3, color=style.INK, ls=":", lw=1.2)
    if log:
        axes.set_xscale("log")
    ticks = [left, *values] if len(words) else values
    if len(ticks) <= 11:
        axes.set_xticks(ticks, [*(["/".join(sorted(set(words)))] if len(words) else []), *(f"{value:.4g}" for value in values)])
        axes.minorticks_off()
    axes.margins(x=0.06, y=0.1)
    style.set_title(axes, f"time per iteration over {key}\n{told}", 8.2)
    axes.set_xlabel(key + (", each at its stop point" if shown["schedule_share"].nunique() > 1 else ""))
    axes.set_ylabel("ms")
    style.legend_below(figure, style.series_handles(looks) + handles(rows, front=False), notes=missing_notes(rows))
    return figure


def _budgets(shown: pd.DataFrame) -> str:
    budgets = shown["budget_bytes"].unique()
    return ask.budget_words(budgets[0]) if len(budgets) == 1 else "several budgets"
