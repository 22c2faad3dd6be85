"""Step time over peak memory, a swept number, and the share of the schedule; and the picture of a sweep."""

from __future__ import annotations

import textwrap
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
from mdcs.sizes import GIB, MIB

_BELOW = {"overlap_s": "overlap duration", "extra_communication_s": "extra communication"}
"""Panels below that of step time."""
_NOTES = 3
_ALIKE = 0.01
"""Peaks that differ by this fraction of the greatest are one peak: no line joins them."""
_COMPUTE: dict[str, Any] = {"color": style.INK, "ls": ":", "lw": 1.2}
_FRONT: dict[str, Any] = {"color": "#AAAAAA", "lw": 1, "drawstyle": "steps-post", "zorder": 1}
_PLATEAU: dict[str, Any] = {"lw": 7, "alpha": 0.25, "zorder": 1}
_RING: dict[str, Any] = {"color": "none", "marker": "o", "ms": 13, "mfc": "none", "mec": style.INK, "mew": 0.9}


@style.styled
def overview(frame: pd.DataFrame) -> Figure:
    """Left the trade-off curve over schedule_share, right step time over memory; one of them if the sweep varies
    only one, and step time over another number if it varies that alone. Both show all but the front and the baselines
    (:func:`analysis.questions.named`) in grey. Raises ValueError if there is nothing to draw."""
    title, rows = _workload(frame)
    curves, has_memory = ask.share_curves(rows), ask.has_memory_axis(rows)
    if curves and not has_memory:
        return tradeoff_curve(rows)
    if not curves:
        over_setting = not has_memory and ask.setting_axis(rows) is not None
        return step_time_over_setting(rows) if over_setting else step_time_over_memory(rows, few=True)
    looks, curve = _looks(rows, few=True), curves[0]
    figure = style.new_figure(12, 5.8, title)
    left, right = figure.subfigures(1, 2, squeeze=False)[0]
    panels = left.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1))
    _over_share(panels, curve, looks, 5.6, f", {ask.budget_words(curve['budget_bytes'].iloc[0])}")
    points = over_memory(right.subplots(), rows, looks, 5.6)
    named = style.series_handles(looks, [*points["label"], *ask.series(curve)])
    named += [*handles(rows), *_curve_handles(curve), *_MEMORY_HANDLES]
    return style.legend_below(figure, named, notes=_missing_notes(rows, width=170))


@style.styled
def step_time_over_memory(frame: pd.DataFrame, few: bool = False) -> Figure:
    """Step time (ms) over the peak memory of a rank, a line per strategy · scheduler: measured (median, p10–p90) at
    measured peaks, predicted hollow at predicted ones. A point is the best schedule_share of a budget. Runs that
    failed, are infeasible or incomplete are named below. `few`: name only the series of an overview. Raises ValueError
    if there is nothing to draw."""
    title, rows = _workload(frame)
    looks = _looks(rows, few)
    figure = style.new_figure(8.2, 4.4, title)
    points = over_memory(figure.subplots(), rows, looks, 8.2)
    named = [*style.series_handles(looks, points["label"]), *handles(rows), *_MEMORY_HANDLES]
    return style.legend_below(figure, named, notes=_missing_notes(rows))


@style.styled
def step_time_over_setting(frame: pd.DataFrame, key: str | None = None) -> Figure:
    """Step time (ms) over a setting that has numbers, by its full key: by default the one with most values. They stand
    side by side in order, values that are no numbers (null) first. A line per strategy · scheduler, everything else
    that was swept and budget: measured (median, p10–p90), predicted hollow, repetitions as dots. Raises ValueError if
    there is nothing to draw, or no number was swept."""
    title, rows = _workload(frame)
    key = key or ask.setting_axis(rows)
    if key is None or not ask.numbers(ask.drawn(rows)[key]).notna().any():
        raise ValueError("no swept number to draw step times over")
    shown = ask.drawn(rows)
    shown = shown[shown[key].notna()]
    values = pd.DataFrame({"number": ask.numbers(shown[key]), "words": shown[key].map(ask.value)})
    ordered = values.drop_duplicates().sort_values(["number", "words"], na_position="first")["words"].to_list()
    shown = shown.assign(at=values["words"].map(ordered.index), label=ask.labels(shown, without=key))
    if shown["budget_bytes"].nunique(dropna=False) > 1:
        shown["label"] += ", " + shown["budget_bytes"].map(ask.budget_words)
    points, looks = ask.best_points(shown, "at"), style.looks(shown)
    figure = style.new_figure(8.2, 4.4, _title(title, shown))
    axes = figure.subplots()
    words_of_star = _draw(axes, shown, points.assign(predicted_at=points["at"]), looks, "at")
    axes.margins(x=0.06, y=0.1)
    axes.set_xticks(range(len(ordered)), ordered)
    style.set_title(axes, f"time per iteration over {key}\n{words_of_star}", 8.2)
    axes.set_xlabel(key + (", each at its stop point" if shown["schedule_share"].nunique() > 1 else ""))
    named = [*style.series_handles(looks), *handles(rows), _MEMORY_HANDLES[1]]
    return style.legend_below(figure, named, notes=_missing_notes(rows))


@style.styled
def tradeoff_curve(frame: pd.DataFrame, curve: pd.DataFrame | None = None) -> Figure:
    """Step time, overlap duration and extra communication (ms) over schedule_share, a line per strategy · scheduler, of
    `curve`: rows of one workload and one budget, by default those with most shares. Raises ValueError if none has two.
    """
    curve = next(iter(ask.share_curves(frame)), None) if curve is None else curve
    if curve is None:
        raise ValueError("no trade-off curve: that needs runs or plans of one budget with two schedule shares or more")
    looks = style.looks(frame)
    figure = style.new_figure(8.2, 5.8, _title(ask.workloads(curve)[0][0], curve))
    _over_share(figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1)), curve, looks, 8.2)
    named = [*style.series_handles(looks, ask.series(curve)), *handles(curve), *_curve_handles(curve)]
    return style.legend_below(figure, named)


def over_memory(
    axes: Axes, rows: pd.DataFrame, looks: style.Looks, inches: float, title: str = "time per iteration over memory"
) -> pd.DataFrame:  # fmt: skip
    """Draw into axes that are `inches` wide; return the points (:func:`analysis.questions.over_memory`)."""
    shown, points = ask.drawn(rows), ask.over_memory(rows)
    if not len(points):
        raise ValueError("no step times to draw over memory: no run has a peak or a budget")
    time, (scale, unit) = ask.time_of(shown), (GIB, "GiB") if points["at"].max() >= GIB else (MIB, "MiB")
    points[["at", "predicted_at"]] /= scale
    shown, narrow = shown.assign(at=ask.memory_of(shown) / scale), points["at"].max() * _ALIKE
    words = _draw(axes, shown, points, looks, "budget_bytes", narrow=narrow)
    front = ask.on_front(points, time)
    axes.plot([*front["at"], points["at"].max()], [*(front[time] * 1e3), front[time].min() * 1e3], **_FRONT)
    axes.margins(x=0.06, y=0.1)
    style.set_title(axes, f"{title}\n{words}", inches)
    several = shown.groupby(["strategy", "scheduler", "budget_bytes"])["schedule_share"].nunique().gt(1).any()
    known, planned = points["peak_bytes"].notna(), points["predicted_peak_bytes"].notna()
    how = "measured" if known.all() else "measured where it was, else predicted" if known.any() else "predicted"
    how = how if (known | planned).any() else "the budget: not measured"
    more = f", {how}{'; of each budget the stop point' if several else ''}"
    style.set_xlabel(axes, f"peak memory per rank ({unit})", more)
    return points


def _over_share(axes: Sequence[Axes], curve: pd.DataFrame, looks: style.Looks, inches: float, about: str = "") -> None:
    """Draw step time and `_BELOW` into three axes that are `inches` wide. `about` goes into the title."""
    top, *others = axes
    shown, points = ask.drawn(curve), ask.over_share(curve)
    for panel, (column, title) in zip(others, _BELOW.items(), strict=True):
        steps = {"step_s": points[column], "predicted_step_s": points[f"predicted_{column}"]}
        for label, of_label in points.assign(**steps, step_s_p10=nan, step_s_p90=nan).groupby("label"):
            style.draw_steps(panel, of_label, looks[str(label)], str(label))
        panel.set(title=title, ylabel="ms")
        panel.margins(y=0.12)
        low, high = panel.get_ylim()
        panel.set_ylim(min(0, low), high if high > 0 else 1)
    time = ask.time_of(shown)
    for label, rows in ask.series(shown).items():
        if rows["schedule_share"].nunique() > 1:  # one share alone is no curve
            point, (low, high) = ask.stop_point(rows, time), ask.plateau(rows, time)
            top.plot(point["schedule_share"], point[time] * 1e3, **_RING, zorder=5)
            top.hlines(point[time] * 1e3, low, high, looks[label]["color"], **_PLATEAU)
    words = _draw(top, shown.assign(at=shown["schedule_share"]), points, looks, compute=False)
    top.margins(y=0.14)
    ends = ask.ends(points, ask.fastest(points, time)[0], time)
    style.set_title(top, "\n".join(filter(None, [f"time per iteration{about}", words, ends])), inches)
    for label, missing in ask.series(ask.not_measured(curve)).items():
        at = missing["schedule_share"]
        top.plot(at, [0.04] * len(at), "x", c=looks[label]["color"], mew=1.6, transform=top.get_xaxis_transform())
    for panel, ticks in zip(axes, (5, 3, 3), strict=True):
        panel.yaxis.set_major_locator(MaxNLocator(ticks, min_n_ticks=3))
    if curve["schedule_share"].nunique() <= 11:
        top.set_xticks(sorted(curve["schedule_share"].unique()))
        top.xaxis.set_major_formatter("{x:.3g}")
    others[-1].set_xlabel("← memory for the strategy   schedule_share   for the schedule →")


def _draw(
    axes: Axes, rows: pd.DataFrame, points: pd.DataFrame, looks: style.Looks, *keys: str, compute: bool = True,
    narrow: float = 0.0,
) -> str:  # fmt: skip
    """Draw a line per series over `at` of the points, each run of several as a dot at its own `at`, and the fastest as
    a star; return that in words. `keys`, beside label and share, say which runs a point stands for."""
    on, time = ["label", "schedule_share", *keys], ask.time_of(rows)
    rows = rows if "label" in rows else rows.assign(label=ask.labels(rows))
    for label, line in points.groupby("label"):
        style.draw_steps(axes, line, looks[str(label)], str(label), narrow)
    repeated = rows.merge(points.loc[points["runs"] > 1, on].drop_duplicates(), on=on)
    if len(repeated):
        axes.plot(repeated["at"], repeated["step_s"] * 1e3, ".", **style.REPETITION, zorder=2.5)
    best, words = ask.fastest(points, time)
    if time == "step_s":
        ends = best["step_s_p10"] * 1e3, best["step_s_p90"] * 1e3
        axes.vlines(best["at"], *ends, color=looks[best["label"]]["color"], lw=1.6, zorder=6)
    axes.plot(best["at" if time == "step_s" else "predicted_at"], best[time] * 1e3, **style.STAR, zorder=7)
    if compute:
        axes.axhline(points["compute_s"].fillna(points["predicted_compute_s"]).min() * 1e3, **_COMPUTE)
    axes.set_ylabel("ms")
    return words


def _looks(rows: pd.DataFrame, few: bool) -> style.Looks:
    """Looks of all series; of a few, only those that an overview names have colours."""
    looks = style.looks(rows)
    named = ask.named(rows) if few else set(looks)
    return {name: of if name in named else of | {"color": style.FAINT} for name, of in looks.items()}


def _workload(frame: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    for title, rows in ask.workloads(frame):
        if len(ask.drawn(rows)):
            return title, rows
    raise ValueError("no step times to draw: nothing was predicted, and no run was measured to its end")


def _title(workload: str, rows: pd.DataFrame) -> str:
    budgets = rows["budget_bytes"].unique()
    return f"{workload} · {ask.budget_words(budgets[0]) if len(budgets) == 1 else 'several budgets'}"


def handles(rows: pd.DataFrame) -> list[Line2D]:
    """Legend entries of what is not a series."""
    hollow: dict[str, Any] = {"ls": "--", "lw": 1.1, "marker": "o", "mfc": "white", "mew": 1.1, "ms": 6.5}
    found = [Line2D([], [], color=style.GREY, label="measured")] if len(ask.measured(rows)) else []
    if rows["predicted_step_s"].notna().any():
        found.append(Line2D([], [], color=style.GREY, label="predicted", **hollow))
    if ask.repeated(rows):
        found.append(Line2D([], [], ls="", marker=".", label="a run of several", **style.REPETITION))
    return [*found, Line2D([], [], color="none", label="fastest of all shown", **style.STAR)]


_MEMORY_HANDLES = (
    Line2D([], [], **_FRONT, label="least time within so much memory"),
    Line2D([], [], **_COMPUTE, label="compute alone"),
)


def _curve_handles(curve: pd.DataFrame) -> list[Line2D]:
    handles = [Line2D([], [], **_RING, label="stop point: fastest of its curve")]
    plateaus = [ask.plateau(rows, ask.time_of(curve)) for rows in ask.series(ask.drawn(curve)).values()]
    if any(low < high for low, high in plateaus):
        handles.append(Line2D([], [], color=style.GREY, **_PLATEAU, label="plateau: shares as fast as it"))
    missing = ask.not_measured(curve)
    if len(missing):
        words = "infeasible" if (missing["status"] == "infeasible").all() else "not measured"
        handles.append(Line2D([], [], color="none", marker="x", mec=style.GREY, mew=1.4, label=words))
    return handles


def _missing_notes(rows: pd.DataFrame, width: int = 130) -> str:
    """One line for each of the first few runs that are not drawn, and the number of others."""
    missing = ask.not_measured(rows)
    notes = [textwrap.shorten(f"not shown: {setting}: {reason}", width, placeholder=" …") for setting, reason in
             zip(ask.settings(missing).head(_NOTES), missing["reason"], strict=False)]  # fmt: skip
    return "\n".join([*notes, *([f"and {len(missing) - _NOTES} more"] if len(missing) > _NOTES else [])])
