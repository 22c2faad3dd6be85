"""Pictures of docs/results.md and docs/predictions.md: step time over memory, and maps of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from analysis.pictures import style
from analysis.pictures.step_time import handles, over_memory
from mdcs.sizes import GIB

_DECIDES = {
    "sharding": ("#56B4E9", "sharding"), "scheduling": ("#CC79A7", "schedule"),
    "recomputation": ("#E69F00", "recompute"), "only together": ("#5FBF9F", "together"), "1.0 ×": ("#DDDDDD", ""),
}  # fmt: skip
"""Colour, and the word in a cell."""
_STRATEGIES = {
    "fsdp": ("#0072B2", "o"), "sdp": ("#56B4E9", "s"), "hsdp": ("#D55E00", "^"), "hsdp_no_reshard": ("#E69F00", "D"),
}  # fmt: skip
_FILLS: dict[str, dict[str, Any]] = {
    "none": {"fillstyle": "full"}, "selective": {"fillstyle": "left", "mfcalt": "white"}, "full": {"mfc": "white"},
}  # fmt: skip
"""Fill of a mark by the kind of recomputation."""

Cell = tuple[str, str]
"""Colour, and what is written in it."""


def cells(axes: Axes, rows: Sequence[Sequence[Cell]], columns: Sequence[str], names: Sequence[str], title: str) -> None:
    """Draw rows of cells, the first at the bottom, with the names of columns and rows as ticks."""
    for y, row in enumerate(rows):
        for x, (colour, words) in enumerate(row):
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour))
            axes.text(x, y, words, ha="center", va="center", fontsize=6.5)
    axes.grid(visible=False)
    axes.set(title=title, xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), names)


@style.styled
def scale_map(document: Mapping[str, Any], decides: Callable[[dict[str, Any]], str]) -> Figure:
    """A cell per cluster and budget: colour of what decides, and the gain of all together."""
    models, budgets = document["settings"]["models"], document["settings"]["budgets_gib"]
    title = "What gains most over the best plan alike for all blocks (predicted)"
    figure = style.new_figure(5.6 * len(models), 3.4, title)

    def cell(point: dict[str, Any]) -> Cell:
        if not point["base"]:
            return "white", "–"
        colour, word = _DECIDES[decides(point)]
        return colour, f"{point['base']['step_s'] / point['all']['step_s']:.2f}\n{word}".strip()

    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        curves = [curve for curve in document["curves"] if curve["model"] == model]
        curves.sort(key=lambda curve: (curve["gbit"], curve["devices"]))
        rows = [[cell(curve["points"][i]) for curve in curves] for i in range(len(budgets))]
        clusters = [f"{curve['devices']:,}\n{curve['gbit']:,g}" for curve in curves]
        about = f"{model}, {curves[0]['parameters'] / 1e9:.1f} · 10⁹ parameters"
        cells(axes, rows, clusters, [f"{gib:g}" for gib in budgets], about)
        axes.set(xlabel="devices, Gbit/s of a node", ylabel="GiB of a device")
    notes = "numbers: gain of all together, as a multiple; –: nothing fits"
    style.legend_below(figure, [Patch(color=colour, label=name) for name, (colour, _) in _DECIDES.items()], notes)
    return figure


BEST = {"strategies": "#9CC7E4", "inside": "#F2B36B", "schedule": "#8FD0B0", "any": "#E2E2E2"}
"""Colour by where the best share of the slack is: 0, inside, 1, or any share."""


@style.styled
def share_map(curves: Mapping[str, Sequence[Sequence[tuple[str, float, float]]]], ratios: Sequence[float],
              budgets: Sequence[float]) -> Figure:  # fmt: skip
    """A panel per model, of cells by budget and ratio: (where, share, gain) of the best share, gain over both ends."""
    figure = style.new_figure(12.4, 6.2, "Where the best share of the slack for the schedule is (predicted)")

    def cell(where: str, share: float, gain: float) -> Cell:
        return BEST[where], f"{share:.2g}\n+{100 * gain:.0f} %" if where == "inside" else ""

    panels = figure.subplots(2, -(-len(curves) // 2), sharex=True, sharey=True)
    for axes, (model, rows) in zip(panels.flat, curves.items(), strict=False):
        drawn = [[cell(*each) for each in row] for row in rows]
        cells(axes, drawn, [f"{100 * budget:g}" for budget in budgets], [f"{ratio:g}" for ratio in ratios], model)
    for axes in panels[-1]:
        axes.set_xlabel("budget, % of the way")
    for axes in panels[:, 0]:
        axes.set_ylabel("communication / computing")
    words = {"strategies": "0: all for strategies", "inside": "inside: the share, and how much longer both ends take",
             "schedule": "1: all for the schedule", "any": "any share: within 1 %"}  # fmt: skip
    style.legend_below(figure, [Patch(color=colour, label=words[name]) for name, colour in BEST.items()])
    return figure


@style.styled
def scale_curves(document: Mapping[str, Any], model: str) -> Figure:
    """Step time over memory: plans that are the same for all blocks, each at its own memory, and mdcs by budget."""
    curves = [curve for curve in document["curves"] if curve["model"] == model]
    devices, rates = sorted({curve["devices"] for curve in curves}), sorted({curve["gbit"] for curve in curves})
    budgets = document["settings"]["budgets_gib"]
    title = f"{model}, {curves[0]['parameters'] / 1e9:.1f} · 10⁹ parameters: step time over memory (predicted)"
    figure = style.new_figure(3.6 * len(devices), 2.4 * len(rates), title)
    panels = figure.subplots(len(rates), len(devices), squeeze=False, sharex=True, sharey="row")
    for curve in curves:
        axes = panels[rates.index(curve["gbit"])][devices.index(curve["devices"])]
        right = max(budgets) * 1.04
        for each in curve["alike"]:
            if each["bytes"] / GIB <= right:
                colour, mark = _STRATEGIES[each["strategy"]]
                axes.plot(each["bytes"] / GIB, each["step_s"], mark, color=colour, ms=6, **_FILLS[each["recompute"]])
        steps = [point["all"]["step_s"] if point["base"] else math.nan for point in curve["points"]]
        axes.plot(budgets, steps, color=style.INK, marker=".", lw=1.4)
        axes.axhline(curve["compute_s"], color=style.GREY, ls=":", lw=1)
        axes.set(xlim=(0, right), title=f"{curve['devices']:,} devices, {curve['gbit']:,g} Gbit/s")
    for axes in panels[-1]:
        axes.set_xlabel("GiB of a device")
    for axes in panels[:, 0]:
        axes.set_ylabel("s per step")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    handles = [Line2D([], [], color=style.INK, marker=".", label="mdcs, by budget")]
    handles += [
        Line2D([], [], color=colour, marker=mark, ls="", label=name) for name, (colour, mark) in _STRATEGIES.items()
    ]
    grey: dict[str, Any] = {"color": style.GREY, "marker": "o", "ls": ""}
    handles += [Line2D([], [], label=f"recompute: {name}", **grey, **fill) for name, fill in _FILLS.items()]
    handles += [Line2D([], [], color=style.GREY, ls=":", lw=1, label="computing alone, nothing recomputed")]
    style.legend_below(figure, handles)
    return figure


@style.styled
def time_over_memory(measurements: Sequence[tuple[str, pd.DataFrame]]) -> Figure:
    """A panel per measurement (title and rows, one per round): all candidates at their measured peak, and the fastest
    in less memory as a line."""
    all_rows = pd.concat([rows for _, rows in measurements], ignore_index=True)
    looks = style.looks(all_rows)
    columns = 2 if len(measurements) <= 4 else 3
    grid = -(-len(measurements) // columns), columns
    figure = style.new_figure(5.2 * columns, 3.8 * grid[0], "Step time over peak memory of a rank, measured")
    for place, (title, rows) in enumerate(measurements, start=1):
        over_memory(figure.add_subplot(*grid, place), rows, looks, 4.7, title)
    notes = "mdcs: a point per budget; bars: 95 % interval of the median; line: least time within so much memory"
    style.legend_below(figure, style.series_handles(looks) + handles(all_rows), notes)
    return figure
