"""The look that all pictures share. Colours are Okabe and Ito's, chosen for colour-blind readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK = "#222222"
GREY = "#767676"
_SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

KIND_COLOURS = {
    "F": "#A9CFE8",
    "B": "#5A9BC7",
    "AR": "#CC79A7",
    "RS": "#D55E00",
    "AG_F": "#009E73",
    "AG_B": "#E6B800",
    "RS_N": "#A84A00",
    "AG_F_N": "#7CCBB2",
    "AG_B_N": "#F3DC80",
    "update": "#767676",
}

STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 6,
    "axes.labelsize": 9,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "text.color": INK,
    "savefig.facecolor": "white",
}


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw with the shared style, without changing it for others."""

    @wraps(draw)
    def with_style(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
            return draw(*args, **kwargs)

    return with_style


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure (inches) that needs no display and is not kept by pyplot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def look(labels: Iterable[str]) -> dict[str, dict[str, str]]:
    """Colour and marker for each series: the same for the same set of labels in every picture."""
    return {
        label: {"color": _SERIES[i % len(_SERIES)], "marker": _MARKERS[i % len(_MARKERS)]}
        for i, label in enumerate(sorted(set(labels)))
    }


def series_handles(looks: dict[str, dict[str, str]]) -> list[Line2D]:
    return [Line2D([], [], label=label, **look) for label, look in looks.items()]  # type: ignore[arg-type]


def measured_handle() -> Line2D:
    return Line2D([], [], color=GREY, label="measured")


def predicted_handle() -> Line2D:
    return Line2D(
        [], [], color=GREY, ls="--", lw=1.1, marker="o", mfc="white", mew=1.1, ms=6.5, label="predicted"
    )


def repetition_handle() -> Line2D:
    return Line2D([], [], color="none", marker=".", mfc=INK, mec="white", mew=0.5, ms=9, label="a run of several")


def draw_steps(axes: Axes, x: Sequence[float], points: pd.DataFrame, look: dict[str, str]) -> None:
    """Step time of a series, as `ask.median_by` has it: measured with bars from p10 to p90, predicted hollow."""
    colour, step = look["color"], points["step_s"] * 1e3
    axes.plot(x, points["predicted_step_s"] * 1e3, marker="o", ls="--", lw=1.1, c=colour, mfc="white", mew=1.2, ms=6.5, zorder=2)
    if step.notna().any():
        bars = [(step - points["step_s_p10"] * 1e3).clip(lower=0), (points["step_s_p90"] * 1e3 - step).clip(lower=0)]
        axes.plot(x, step, color=colour, lw=1.4, zorder=3)
        axes.errorbar(x, step, bars, fmt=look["marker"], color=colour, ms=4.5, elinewidth=1.4, capsize=2.5, zorder=4)


def draw_repetitions(axes: Axes, x: Sequence[float], rows: pd.DataFrame, runs: pd.Series) -> None:
    """Each run as a dot, if a point of theirs stands for several (`runs` of each point)."""
    if runs.max() > 1:
        axes.plot(x, rows["step_s"] * 1e3, ".", c=INK, mec="white", mew=0.5, ms=9, zorder=5)


def legend_below(figure: Figure, handles: list[Any], notes: str = "") -> None:
    """One legend under the axes, where it covers no data, with `notes` in small print above it.

    Takes as many columns as fit; the figure grows by what the rows and notes need.
    """
    longest = max(len(handle.get_label()) for handle in handles)
    # In points: a letter of the legend's font is about 5.2 wide, handle and gaps take 46; a row is 14 high.
    columns = max(1, min(len(handles), int(figure.get_figwidth() * 72 / (longest * 5.2 + 46))))
    rows = -(-len(handles) // columns)
    small_rows = notes.count("\n") + 1 if notes else 0
    figure.set_figheight(figure.get_figheight() + (14 * rows + 11 * small_rows) / 72)
    legend = figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        columnspacing=1.8,
        handlelength=2.6,
        title=notes or None,
        title_fontsize=7.5,
        alignment="left",
    )
    legend.get_title().set_color(GREY)


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Each name with as few trailing parts of its dotted paths as keep all apart: B:transformer.h.3 becomes B:3, and in a
    message of several units, transformer.h.3+transformer.wpe, 3+wpe.
    """
    distinct = set(names)

    def short(name: str, parts: int) -> str:
        head, colon, path = name.rpartition(":")
        return head + colon + "+".join(".".join(each.split(".")[-parts:]) for each in path.split("+"))

    deepest = max((name.count(".") for name in distinct), default=0) + 1
    for parts in range(1, deepest + 1):
        result = {name: short(name, parts) for name in distinct}
        if len(set(result.values())) == len(distinct):
            break
    return result if distinct else {}


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure (the suffix chooses the format) and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=170)
    return path
