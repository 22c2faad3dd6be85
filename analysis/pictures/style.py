"""The look that all pictures share. Colours are Okabe and Ito's, chosen for colour-blind readers."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import questions as ask

INK = "#222222"
GREY = "#767676"
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SERIES = (*_HUES, *(f"#{''.join(f'{int(hue[i : i + 2], 16) * 11 // 20:02X}' for i in (1, 3, 5))}" for hue in _HUES))
_MARKERS = ("o", "s", "^", "D", "v", "<", ">")
"""Twelve colours, each hue also dark, and seven marks: no two of the first 84 series have both alike."""
_PEER_COLOURS, _PEER_MARKERS = (INK, "#8A8A8A"), ("X", "P", "d", "p", "h")
"""Other engines are black or grey: no two of the first ten have both alike."""
STAR: dict[str, Any] = {"marker": "*", "ms": 14, "mfc": "#FFD700", "mec": INK, "mew": 0.8}
REPETITION: dict[str, Any] = {"mfc": GREY, "mec": "none", "ms": 7}
_FIXED = "\u00a0"
"""A space at which no line ends."""
Looks = dict[str, dict[str, str]]

KINDS = {
    "F": ("forward", "#A9CFE8"),
    "B": ("backward", "#5A9BC7"),
    "AR": ("all-reduce", "#CC79A7"),
    "RS": ("reduce-scatter", "#D55E00"),
    "AG_F": ("all-gather before forward", "#009E73"),
    "AG_B": ("all-gather before backward", "#E6B800"),
    "RS_N": ("reduce-scatter in the node", "#A84A00"),
    "AG_F_N": ("all-gather in the node, before forward", "#7CCBB2"),
    "AG_B_N": ("all-gather in the node, before backward", "#F3DC80"),
    "update": ("update", "#767676"),
}
KIND_WORDS, KIND_COLOURS = ({kind: of[i] for kind, of in KINDS.items()} for i in range(2))

STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.titlepad": 6, "axes.labelsize": 9,
    "axes.edgecolor": "#999999", "axes.linewidth": 0.8, "axes.labelcolor": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7, "xtick.color": "#555555", "ytick.color": "#555555", "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6, "lines.markersize": 5,
    "figure.titlesize": 11, "figure.titleweight": "bold", "text.color": INK, "savefig.facecolor": "white",
}  # fmt: skip


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
    parts = f"{_FIXED}· ".join(part.replace(" ", _FIXED) for part in title.split(" · "))  # a line begins with a part
    lines = textwrap.fill(parts, int(width * 9.5))  # letters that an inch holds, bold
    figure.suptitle(lines.replace(_FIXED, " "), x=0.01, ha="left")
    return figure


def set_title(axes: Axes, title: str, inches: float) -> None:
    """Set the title of axes that are so wide; lines that do not fit are wrapped."""
    axes.set_title("\n".join(textwrap.fill(line, int(inches * 13)) for line in title.splitlines()))


def look(labels: Iterable[str], peers: Iterable[str] = ()) -> Looks:
    """Colour and mark of each series; `peers` are the labels of other engines."""
    both = ((set(labels) - set(peers), _SERIES, _MARKERS), (set(peers), _PEER_COLOURS, _PEER_MARKERS))
    return {
        label: {"color": colours[i % len(colours)], "marker": marks[i % len(marks)]}
        for names, colours, marks in both
        for i, label in enumerate(sorted(names))
    }


def looks(rows: pd.DataFrame) -> Looks:
    """Colour and mark of each series of a workload, for all of its pictures: they must not depend on what one picture
    shows."""
    return look(ask.series(rows), ask.peers(rows))


def series_handles(looks: Looks, shown: Iterable[str] | None = None) -> list[Line2D]:
    """Legend entries of the series, or of those that are shown."""
    named = looks if shown is None else {label: looks[label] for label in looks if label in set(shown)}
    return [Line2D([], [], label=label, **look) for label, look in named.items()]  # type: ignore[arg-type]


def draw_steps(axes: Axes, points: pd.DataFrame, look: dict[str, str], label: str, narrow: float = 0.0) -> None:
    """Step time of a series over `at`, as `ask.median_by` has it: measured with bars from p10 to p90, predicted hollow.

    A line joins the points if they span more than `narrow`: else it would only go up and down.
    """
    line = "-" if points["at"].max() - points["at"].min() > narrow else "none"
    colour, step = look["color"], points["step_s"] * 1e3
    for at, column, how in (("at", "step_s", "measured"), ("predicted_at", "predicted_step_s", "predicted")):
        for x, seconds in points[[at, column]].dropna().itertuples(index=False):
            words = told(f"{label}, {x:.4g}: {ask.milliseconds(seconds)} ms {how}")
            axes.plot(x, seconds * 1e3, "o", color="none", ms=9, zorder=8, gid=words)
    if points["predicted_step_s"].notna().any():
        predicted, mark = points["predicted_step_s"] * 1e3, look["marker"]
        ls = "--" if line == "-" else line
        axes.plot(
            points["predicted_at"],
            predicted,
            ls=ls,
            lw=1.1,
            c=colour,
            zorder=2,
            marker=mark,
            mfc="white",
            mew=1.1,
            ms=7,
        )
    if step.notna().any():
        bars = [(step - points["step_s_p10"] * 1e3).clip(lower=0), (points["step_s_p90"] * 1e3 - step).clip(lower=0)]
        axes.plot(points["at"], step, color=colour, ls=line, lw=1.4, zorder=3)
        axes.errorbar(
            points["at"], step, bars, fmt=look["marker"], color=colour, ms=5, elinewidth=1.4, capsize=2.5, zorder=4
        )


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
        handles=handles, loc="outside lower left", ncols=columns, columnspacing=1.8, handlelength=2.6,
        title=notes or None, title_fontsize=7.5, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(GREY)


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Each name with as few trailing parts of its dotted paths as keep all apart: B:transformer.h.3 becomes B:3, and in
    a message of several units, transformer.h.3+transformer.wpe, 3+wpe.
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


def told(words: str) -> str:
    """The gid of an artist that says these words when it is pointed at in :func:`svg`."""
    return f"told: {words}"


def svg(figure: Figure) -> str:
    """The figure as an SVG element of a page: text stays text, and artists with a gid of :func:`told` have a title."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub(r'<g id="told: ([^"]*)">', r'<g pointer-events="all"><title>\1</title>', text)
    return re.sub(r'<g id="\w+">', "<g>", text)  # which all pictures of a page number alike


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure (the suffix chooses the format) and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=170)
    return path
