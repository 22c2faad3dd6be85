"""Results of `mdcs results`: step time over measured peak memory, and predicted over measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from analysis.pictures import style
from mdcs.sizes import MIB


@style.styled
def time_over_memory(results: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel per measurement with other engines: all candidates at their measured peak, and the Pareto front."""
    some = [each["comparison"] for each in results if not all(c["plans"] for c in each["comparison"]["candidates"])]
    candidates = [each for of in some for each in of["candidates"]]
    looks = style.look((each["name"] for each in candidates), [each["name"] for each in candidates if not each["plans"]])
    figure = style.new_figure(max(6.4, 4.6 * len(some)), 3.4, "Step time over peak memory of a rank (measured)")
    for axes, of in zip(figure.subplots(1, max(1, len(some)), squeeze=False)[0], some, strict=False):
        points = []
        for each in of["candidates"]:
            seconds = [run["step_s"] for run in each["rounds"]]
            x, y = max(run["peak_bytes"] for run in each["rounds"]) / MIB, statistics.median(seconds) * 1e3
            bars = [[y - min(seconds) * 1e3], [max(seconds) * 1e3 - y]]
            axes.errorbar(x, y, bars, ls="", capsize=2.5, elinewidth=1.2, ms=6, **looks[each["name"]])
            points.append((x, y))
        front = [point for point in sorted(points) if all(y > point[1] for x, y in points if x < point[0])]
        axes.step(*zip(*front, strict=True), where="post", color=style.GREY, lw=1, ls=":", zorder=1)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("MiB")
        axes.set_ylabel("ms per step")
        millions = f", {of['parameters'] / 1e6:.0f} M parameters" if of["parameters"] else ""
        axes.set_title(f"{of['model']}{millions}, {of['world']} ranks\n{of['shaped_link']}")
    notes = "mdcs: a point per budget; bars: least to greatest round\ndotted: nothing is faster in less memory"
    style.legend_below(figure, style.series_handles(looks), notes)
    return figure


@style.styled
def predictions(runs: Sequence[tuple[str, float, float]]) -> Figure:
    """Predicted over measured seconds, a point per run, by name of the measurement."""
    looks = style.look(name for name, _, _ in runs)
    figure = style.new_figure(4.6, 4.2, f"Predicted and measured steps, N = {len(runs)}")
    axes = figure.subplots()
    for name, look in looks.items():
        told, said = zip(*((told * 1e3, said * 1e3) for of, told, said in runs if of == name), strict=True)
        axes.plot(said, told, ls="", ms=4.5, alpha=0.7, **look)  # type: ignore[arg-type]
    if runs:
        ends = [0, 1.05e3 * max(max(told, said) for _, told, said in runs)]
        axes.plot(ends, ends, color=style.GREY, lw=1)
    axes.set_xlabel("measured ms")
    axes.set_ylabel("predicted ms")
    style.legend_below(figure, style.series_handles(looks))
    return figure
