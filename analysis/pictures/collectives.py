"""Seconds per message over its size, by algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from analysis.pictures import style
from mdcs.sizes import MIB


@style.styled
def collectives(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], title: str) -> Figure:
    """Plot of seconds per message over its size, both logarithmic: axes per operation, a line per algorithm.

    ``seconds`` of a row is by size.
    """
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    looks = style.palette(row["algorithm"] for row in rows)
    figure = style.new_figure(9.2, 3.4, title)
    for axes, operation in zip(figure.subplots(1, len(operations), sharey=True), operations, strict=True):
        for row in rows:
            if row["operation"] == operation:
                axes.loglog(sizes, [s * 1e3 for s in row["seconds"]], **looks[row["algorithm"]])
        axes.set_title(operation.replace("_", "-"))
        axes.set_xticks(sizes, list(map(size_label, sizes)))
        axes.minorticks_off()
    figure.axes[0].set_ylabel("ms")
    style.legend_below(figure, style.series_handles(looks))
    return figure


def size_label(size: int) -> str:
    """Bytes of a message in whole KiB or MiB, for a tick or a column."""
    return f"{size >> 10}K" if size < MIB else f"{size >> 20}M"
