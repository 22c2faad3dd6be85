"""Side by side: engines under budgets, predictions and measurements, and divisions of a budget in three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from analysis.pictures import style
from analysis.questions import count, milliseconds
from mdcs.sizes import MIB

_PARTS: dict[str, dict[str, Any]] = {
    "compute": {"fc": "#A9CFE8"},
    "exposed communication": {"fc": "#D55E00", "hatch": "////"},
    "idle: neither": {"fc": "#F3E3A6", "hatch": "...."},
    "exposed or idle": {"fc": "#EBA97E", "hatch": "xxxx"},
    "not told apart by the engine": {"fc": "#B9B9B9"},
}
_BOUNDS = {"traffic": ":", "structural": "--"}


@style.styled
def engine_comparison(document: Mapping[str, Any]) -> Figure:
    """Draw the JSON of `experiments/compare.py`; engines that do not fit a budget are faint. Raises ValueError if there
    is nothing to draw."""
    budgets = [budget for budget in document["budgets"] if budget["lines"]]
    if not budgets:
        raise ValueError("no engine was measured")
    heights = [0.55 + 0.27 * len(budget["lines"]) for budget in budgets]
    ranks = "1 rank" if document["world"] == 1 else f"{document['world']} ranks"
    size = f", {count(document['parameters'])} parameters" if document["parameters"] else ""
    link = f" · link of {document['shaped_link']}" if document["shaped_link"] else ""
    rounds = "1 round" if document["rounds"] == 1 else f"medians of {document['rounds']} rounds"
    figure = style.new_figure(9.2, sum(heights) + 0.6, f"{document['model']}{size} · {ranks}{link} · {rounds}")
    panels = figure.subplots(len(budgets), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, budget in zip(panels, budgets, strict=True):
        _draw(axes, budget)
    longest = max(line["step_s"]["high"] for budget in budgets for line in budget["lines"])
    panels[-1].set(xlim=(0, longest * 1e3 * 1.6), xlabel="ms per iteration")  # with room for the words
    ink: dict[str, Any] = {"color": style.INK, "lw": 1.2}
    handles: list[Patch | Line2D] = [Patch(ec="white", label=name, **look) for name, look in _PARTS.items()]
    handles += [Line2D([], [], marker="|", ms=5, label="least to greatest", **ink)]
    handles += [Line2D([], [], ls=dashes, label=f"{name} bound", **ink) for name, dashes in _BOUNDS.items()]
    return style.legend_below(figure, handles, notes=_notes(document))


def _draw(axes: Axes, budget: Mapping[str, Any]) -> None:
    for at, line in enumerate(budget["lines"]):
        alpha, left = 0.3 if line["fits"] is False else 1.0, 0.0
        for name, length in _parts(line).items():
            axes.barh(at, length, 0.66, left=left, ec="white", lw=0, alpha=alpha, **_PARTS[name])
            left += length
        low, high = line["step_s"]["low"] * 1e3, line["step_s"]["high"] * 1e3
        axes.plot([low, high], [at, at], color=style.INK, lw=1.2, marker="|", ms=5, alpha=alpha)
        ratio = "" if line["ratio"] is None else f"{line['ratio']['median']:.2f} ×"
        words = ["does not fit" if line["fits"] is False else ratio]
        words += [] if line["overlap_ratio"] is None else [f"overlap ratio {line['overlap_ratio']:.2f}"]
        words += [] if line["peak_bytes"] is None else [f"peak {line['peak_bytes'] / MIB:.1f} MiB"]
        beside: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(", ".join(filter(None, words)), (high, at), **beside)
    for name, seconds in budget["bounds"].items():
        axes.axvline(seconds * 1e3, color=style.INK, ls=_BOUNDS[name], lw=1.2)
    limit, words = budget["budget_bytes"], budget["budget"]
    part = "" if words is None or "%" not in words else f" ({words})"
    axes.set_title("no limit" if limit is None else f"budget {limit / MIB:.1f} MiB{part}")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_ylim(len(budget["lines"]) - 0.4, -0.6)  # the fastest on top
    axes.set_yticks(range(len(budget["lines"])), [line["engine"] for line in budget["lines"]])
    axes.tick_params(axis="y", length=0)


def _parts(line: Mapping[str, Any]) -> dict[str, float]:
    """Return where the step's milliseconds went, as far as the engine tells them apart."""
    whole = line["step_s"]["median"] * 1e3
    if line["stalled_s"] is None:
        return {"not told apart by the engine": whole}
    stalled = min(line["stalled_s"] * 1e3, whole)
    if line["exposed_s"] is None:
        return {"compute": whole - stalled, "exposed or idle": stalled}
    exposed = min(line["exposed_s"] * 1e3, stalled)
    return {"compute": whole - stalled, "exposed communication": exposed, "idle: neither": stalled - exposed}


def _notes(document: Mapping[str, Any]) -> str:
    losses = document["losses"]
    base, rest = document["base"], "bounds are predicted from the profile, all else is measured"
    words = f"2.00 × takes twice as long as {base}; {rest}"
    if not losses["differences"]:
        return f"{words}; losses were not compared"
    if not losses["equal"]:
        return f"{words}; losses are NOT equal"
    return f"{words}; losses are equal (greatest relative difference {max(losses['differences'].values()):.1g})"


@style.styled
def predictions(title: str, unit: str, points: pd.DataFrame) -> Figure:
    """Measured over predicted, with a band of ± 10 %. `points` has a row per run: series, predicted and measured, and,
    where it is known, low and high of what was measured."""
    looks = style.palette(points["series"])
    figure = style.new_figure(5.4, 4.6, f"{title}, N = {len(points)}")
    axes = figure.subplots()
    for name, rows in points.groupby("series"):
        bars = [rows["measured"] - rows["low"], rows["high"] - rows["measured"]] if "low" in rows else None
        how: dict[str, Any] = {"ls": "", "ms": 5, "alpha": 0.75, "elinewidth": 0.8, "capsize": 2, **looks[str(name)]}
        axes.errorbar(rows["predicted"], rows["measured"], bars, **how)
    both = points[["predicted", "measured"]]
    ends = np.array([0.95 * both.min(axis=None), 1.05 * both.max(axis=None)])
    axes.plot(ends, ends, color=style.GREY, lw=1)
    band = axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#E4E4E4", zorder=0, label="± 10 %")
    axes.grid(visible=True, axis="both")
    axes.set(xlabel=f"predicted ({unit})", ylabel=f"measured ({unit})")
    return style.legend_below(figure, [*style.series_handles(looks), band])


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
    marks: dict[str, tuple[pd.DataFrame, dict[str, Any]]] = {
        "planned": (known, {"marker": ".", "mfc": style.INK, "mec": style.INK, "ms": 3}),
        "measured, ms": (measured, {"marker": "o", "mfc": "white", "mec": style.INK, "ms": 6}),
        "infeasible": (infeasible, {"marker": "x", "mec": style.GREY, "mew": 1.4}),
    }
    for words, (rows, mark) in marks.items():
        if len(rows):
            axes.plot(rows["schedule"], rows["activations"], ls="", label=words, **mark)
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
    return style.legend_below(figure, handles)
