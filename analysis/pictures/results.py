"""Step time over measured peak memory of several measurements, and predictions over what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.pictures import style
from analysis.pictures.step_time import handles, over_memory


@style.styled
def time_over_memory(measurements: Sequence[tuple[str, pd.DataFrame]]) -> Figure:
    """A panel per measurement (title and rows, one per round): all candidates at their measured peak, and the fastest
    in less memory as a line.
    """
    all_rows = pd.concat([rows for _, rows in measurements], ignore_index=True)
    looks = style.looks(all_rows)
    grid = -(-len(measurements) // 2), 2
    figure = style.new_figure(10.4, 3.8 * grid[0], "Step time over peak memory of a rank, measured")
    for place, (title, rows) in enumerate(measurements, start=1):
        over_memory(figure.add_subplot(*grid, place), rows, looks, 4.7, title)
    notes = "mdcs: a point per budget; bars: 95 % interval of the median; line: least time within so much memory"
    style.legend_below(figure, style.series_handles(looks) + handles(all_rows), notes)
    return figure


@style.styled
def predictions(title: str, unit: str, points: pd.DataFrame) -> Figure:
    """Measured over predicted, with a band of ± 10 %. `points` has a row per run: series, predicted and measured, and,
    where it is known, low and high of what was measured.
    """
    looks = style.palette(points["series"])
    figure = style.new_figure(5.4, 4.6, f"{title}, N = {len(points)}")
    axes = figure.subplots()
    for name, rows in points.groupby("series"):
        bars = [rows["measured"] - rows["low"], rows["high"] - rows["measured"]] if "low" in rows else None
        how: dict[str, Any] = {"ls": "", "ms": 5, "alpha": 0.75, "elinewidth": 0.8, "capsize": 2, **looks[str(name)]}
        axes.errorbar(rows["predicted"], rows["measured"], bars, **how)
    both = points[["predicted", "measured"]]
    ends = [0.95 * both.min(axis=None), 1.05 * both.max(axis=None)]
    axes.plot(ends, ends, color=style.GREY, lw=1)
    band = axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="#E4E4E4", zorder=0)
    band.set_label("± 10 %")
    axes.grid(visible=True, axis="both")
    axes.set_xlabel(f"predicted ({unit})")
    axes.set_ylabel(f"measured ({unit})")
    style.legend_below(figure, [*style.series_handles(looks), band])
    return figure
