"""Engines side by side, a row of panels per budget: step time with its bounds, overlap, peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.pictures import style
from analysis.questions import count
from mdcs.sizes import MIB

_COMPUTE, _EXPOSED, _IDLE, _STALLED, _WHOLE, _OVERLAP = "#A9CFE8", "#D55E00", "#F3E3A6", "#EBA97E", "#B9B9B9", "#009E73"
_BOUNDS = {"traffic": ":", "structural": "--"}


@style.styled
def engine_comparison(document: Mapping[str, Any]) -> Figure:
    """Draw the JSON of `experiments/compare.py`; engines that do not fit a budget are faint. Raises ValueError if there is
    nothing to draw.
    """
    budgets = [budget for budget in document["budgets"] if budget["lines"]]
    if not budgets:
        raise ValueError("no engine was measured")
    heights = [0.55 + 0.27 * len(budget["lines"]) for budget in budgets]
    ranks = "1 rank" if document["world"] == 1 else f"{document['world']} ranks"
    size = f", {count(document['parameters'])} parameters" if document["parameters"] else ""
    link = f" · link of {document['shaped_link']}" if document["shaped_link"] else ""
    rounds = "1 round" if document["rounds"] == 1 else f"medians of {document['rounds']} rounds"
    title = f"{document['model']}{size} · {ranks}{link} · {rounds}"
    figure = style.new_figure(10.5, sum(heights) + 0.6, title)
    panels = figure.subplots(len(budgets), 3, squeeze=False, sharex="col", width_ratios=(5, 2, 3), height_ratios=heights)
    for row, budget in zip(panels, budgets, strict=True):
        _draw_steps(row[0], budget)
        _draw_bars(row[1], budget["lines"], "overlap_ratio", 1, _OVERLAP)
        row[1].set_xlim(0, 1)
        _draw_bars(row[2], budget["lines"], "peak_bytes", MIB, _COMPUTE)
        if budget["budget_bytes"] is not None:
            row[2].axvline(budget["budget_bytes"] / MIB, color=_EXPOSED, lw=1.4)
        row[2].set_xlim(left=0)
        row[0].set_title(f"{_words(budget)}: time per iteration")
        row[1].set_title("overlap ratio")
        row[2].set_title("peak memory per rank")
    for axes, unit in zip(panels[-1], ("ms", "", "MiB"), strict=True):
        axes.set_xlabel(unit)
    style.legend_below(figure, _handles(), notes=_notes(document))
    return figure


def _words(budget: Mapping[str, Any]) -> str:
    if budget["budget_bytes"] is None:
        return "no limit"
    over = budget["over_floor"]
    return f"{budget['budget_bytes'] / MIB:.1f} MiB" + ("" if over is None else f" (floor + {over:.0%})")


def _rows(axes: Axes, lines: Sequence[Mapping[str, Any]], *, named: bool = False) -> list[tuple[int, Mapping[str, Any], float]]:
    """(position, line, opacity), the fastest engine on top."""
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_yticks(range(len(lines)), [line["engine"] for line in lines] if named else [""] * len(lines))
    axes.tick_params(axis="y", length=0)
    return [(at, line, 0.3 if line["fits"] is False else 1.0) for at, line in enumerate(lines)]


def _draw_steps(axes: Axes, budget: Mapping[str, Any]) -> None:
    for at, line, alpha in _rows(axes, budget["lines"], named=True):
        step = line["step_s"]
        whole, low, high = (step[key] * 1e3 for key in ("median", "low", "high"))
        left = 0.0
        for milliseconds, colour in _parts(line, whole):
            axes.barh(at, milliseconds, 0.66, left=left, color=colour, alpha=alpha)
            left += milliseconds
        axes.plot([low, high], [at, at], color=style.INK, lw=1.2, marker="|", ms=5, alpha=alpha)
        ratio = "" if line["ratio"] is None else f"{line['ratio']['median']:.2f} ×"
        words = "does not fit" if line["fits"] is False else ratio
        axes.annotate(words, (high, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=style.INK)
    for name, seconds in budget["bounds"].items():
        axes.axvline(seconds * 1e3, color=style.INK, ls=_BOUNDS[name], lw=1.2)
    axes.set_xlim(left=0)
    axes.margins(x=0.12)


def _parts(line: Mapping[str, Any], whole: float) -> list[tuple[float, str]]:
    """Return where the step's milliseconds went, as far as the engine tells them apart, with the colour of each."""
    if line["stalled_s"] is None:
        return [(whole, _WHOLE)]
    stalled = min(line["stalled_s"] * 1e3, whole)
    if line["exposed_s"] is None:
        return [(whole - stalled, _COMPUTE), (stalled, _STALLED)]
    exposed = min(line["exposed_s"] * 1e3, stalled)
    return [(whole - stalled, _COMPUTE), (exposed, _EXPOSED), (stalled - exposed, _IDLE)]


def _draw_bars(axes: Axes, lines: Sequence[Mapping[str, Any]], key: str, unit: float, colour: str) -> None:
    """A bar per engine of what a line has under `key`."""
    for at, line, alpha in _rows(axes, lines):
        if line[key]:
            axes.barh(at, line[key] / unit, 0.66, color=colour, alpha=alpha)
        else:
            axes.text(0.02, at, "not known" if line[key] is None else "0", va="center", fontsize=7.5, color=style.GREY)


def _handles() -> list[Any]:
    return [
        Patch(color=_COMPUTE, label="compute"),
        Patch(color=_EXPOSED, label="exposed communication"),
        Patch(color=_IDLE, label="idle: neither"),
        Patch(color=_STALLED, label="exposed or idle"),
        Patch(color=_WHOLE, label="not told apart by the engine"),
        Line2D([], [], color=style.INK, lw=1.2, marker="|", ms=5, label="least to greatest"),
        *(Line2D([], [], color=style.INK, ls=dashes, lw=1.2, label=f"{name} bound") for name, dashes in _BOUNDS.items()),
        Line2D([], [], color=_EXPOSED, lw=1.4, label="budget"),
    ]


def _notes(document: Mapping[str, Any]) -> str:
    losses = document["losses"]
    words = f"2.00 × takes twice as long as {document['base']}; bounds are predicted from the profile, all else is measured; "
    if not losses["differences"]:
        return words + "losses were not compared"
    if not losses["equal"]:
        return words + "losses are NOT equal"
    return words + f"losses are equal (greatest relative difference {max(losses['differences'].values()):.1g})"
