"""The look that all pictures share. Colours are Okabe and Ito's, chosen for colour-blind readers."""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import cycle
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import questions as ask

INK, GREY, FAINT = "#222222", "#767676", "#C8C8C8"
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKS = ("o", "s", "^", "D", "v", "<", ">", "p", "h")
_COLOURS = {
    "greedy": "#0072B2", "joint": "#D55E00", "ilp": "#009E73", "random": "#CC79A7", "fsdp": "#E69F00",
    "zero2": "#56B4E9", "dp": "#7A5195", "sdp": "#8C6D31", "hsdp": "#A50F4B", "hsdp_no_reshard": "#00A6A6",
    "mdcs": "#D55E00",
}  # fmt: skip
_MARKERS = {
    "priority": "o", "dear": "s", "memory_aware": "^", "wfbp": "D", "fusion": "v", "mg_wfbp": "<", "partitioning": ">",
    "sequential": "p", "random": "h", "joint": "P", "own": "o",
}  # fmt: skip
_ENGINES = {"ddp": "X", "fsdp2": "P", "fairscale": "d", "deepspeed": "p", "fairscale_fsdp": "h", "dataparallel": "8"}
"""Colour of a strategy, mark of a scheduler, and mark of another engine, which is black: the same in every picture."""
STAR: dict[str, Any] = {"marker": "*", "ms": 14, "mfc": "#FFD700", "mec": INK, "mew": 0.8}
REPETITION: dict[str, Any] = {"mfc": GREY, "mec": "none", "ms": 7}
_FIXED = "\u00a0"  # a space at which no line ends
Looks = dict[str, dict[str, str]]

KIND_WORDS = {
    "F": "forward", "B": "backward", "AR": "all-reduce", "RS": "reduce-scatter", "AG_F": "all-gather before forward",
    "AG_B": "all-gather before backward", "RS_N": "reduce-scatter in the node",
    "AG_F_N": "all-gather in the node, before forward", "AG_B_N": "all-gather in the node, before backward",
    "update": "update",
}  # fmt: skip
KIND_COLOURS = {
    "F": "#A9CFE8", "B": "#5A9BC7", "AR": "#CC79A7", "RS": "#D55E00", "AG_F": "#009E73", "AG_B": "#E6B800",
    "RS_N": "#A84A00", "AG_F_N": "#7CCBB2", "AG_B_N": "#F3DC80", "update": "#767676",
}  # fmt: skip

STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.titlepad": 6, "axes.labelsize": 9,
    "axes.edgecolor": "#999999", "axes.linewidth": 0.8, "axes.labelcolor": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": "#E4E4E4", "grid.linewidth": 0.7, "xtick.color": "#555555", "ytick.color": "#555555",
    "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.frameon": False, "legend.fontsize": 8.5,
    "lines.linewidth": 1.6, "lines.markersize": 5, "figure.titlesize": 11, "figure.titleweight": "bold",
    "text.color": INK, "savefig.facecolor": "white",
}  # fmt: skip

COLUMNS = {1: 3.33, 2: 6.9}
"""Width in inches of a journal's column, and of both."""
_PAPER: dict[str, Any] = {
    "font.size": 7, "axes.titlesize": 7, "axes.titlepad": 3, "axes.labelsize": 7, "xtick.labelsize": 6,
    "ytick.labelsize": 6, "legend.fontsize": 6, "lines.linewidth": 1, "lines.markersize": 3.5,
}  # fmt: skip
_paper: ContextVar[float | None] = ContextVar("paper", default=None)


@contextmanager
def paper(columns: int) -> Iterator[None]:
    """Draw pictures as wide as one column of a journal, or two, in small print and without titles."""
    token = _paper.set(COLUMNS[columns])
    try:
        yield
    finally:
        _paper.reset(token)


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw with the shared style, without changing it for others."""

    @wraps(draw)
    def with_style(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(STYLE if _paper.get() is None else STYLE | _PAPER):  # type: ignore[arg-type]
            return draw(*args, **kwargs)

    return with_style


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure (inches) that needs no display and is not kept by pyplot. On paper it is scaled to the column."""
    if (column := _paper.get()) is not None:
        return Figure(figsize=(column, height * max(0.5, column / width)), layout="constrained")
    figure = Figure(figsize=(width, height), layout="constrained")
    parts = f"{_FIXED}· ".join(part.replace(" ", _FIXED) for part in title.split(" · "))  # a line begins with a part
    lines = textwrap.fill(parts, int(width * 9.5))  # letters that an inch holds, bold
    figure.suptitle(lines.replace(_FIXED, " "), x=0.01, ha="left")
    return figure


def set_title(axes: Axes, title: str, inches: float) -> None:
    """Set the title of axes that are so wide; lines that do not fit are wrapped. On paper the caption says it."""
    if _paper.get() is None:
        axes.set_title("\n".join(textwrap.fill(line, int(inches * 13)) for line in title.splitlines()))


def set_xlabel(axes: Axes, label: str, more: str = "") -> None:
    """Set the label of the x axis; on paper without `more`, for which a column has no room."""
    axes.set_xlabel(label if _paper.get() else label + more)


def palette(names: Iterable[str]) -> Looks:
    """Colour and mark of each of a few names that are neither strategies nor engines, in their order."""
    return {name: {"color": colour, "marker": mark} for name, colour, mark in
            zip(dict.fromkeys(names), cycle(_HUES), cycle(_MARKS), strict=False)}  # fmt: skip


def looks(rows: pd.DataFrame) -> Looks:
    """Colour and mark of each series (`label`): the colour is the strategy's, the mark the scheduler's, in all
    pictures. Series that differ in something else have shades of the colour; other engines are black, or grey."""
    made, alike = Looks(), Counter[tuple[str, str]]()
    for label, of in rows.groupby(rows["label"] if "label" in rows else ask.labels(rows)):
        strategy, scheduler, engine = of[["strategy", "scheduler", "engine"]].iloc[0].map(str)
        colour = _COLOURS.get(strategy) or _any(_HUES, strategy)
        mark = _MARKERS.get(scheduler) or _any(_MARKS, scheduler)
        if engine not in ("mdcs", "None", "nan"):
            name = engine.partition("-")[0]
            colour, mark = INK, _ENGINES.get(name) or _any(_MARKS, name)
        made[str(label)] = {"color": _shade(colour, alike[colour, mark]), "marker": mark}
        alike[colour, mark] += 1
    return made


def _any(values: Sequence[str], name: str) -> str:
    """One of the values, always the same for a name."""
    return values[crc32(name.encode()) % len(values)]


def _shade(colour: str, i: int) -> str:
    """The colour, then lighter and darker ones in turns; black only has lighter ones."""
    goal, steps = (1.0, i if colour == INK else (i + 1) // 2) if i % 2 or colour == INK else (0.0, i // 2)
    return to_hex(tuple(goal + (np.array(to_rgb(colour)) - goal) * 0.62**steps))


def series_handles(looks: Looks, shown: Iterable[str] | None = None) -> list[Line2D]:
    """Legend entries of the series, or of those that are shown; all grey ones have one entry."""
    here = looks if shown is None else {label: looks[label] for label in looks if label in set(shown)}
    made = [Line2D([], [], label=label, **look) for label, look in here.items() if look["color"] != FAINT]  # type: ignore[arg-type]
    faint = len(here) - len(made)
    return [*made, Line2D([], [], label=f"{faint} other{'s' * (faint > 1)}", color=FAINT)] if faint else made


def draw_steps(axes: Axes, points: pd.DataFrame, look: dict[str, str], label: str, narrow: float = 0.0) -> None:
    """Step time of a series over `at`, as `ask.median_by` has it: measured with bars from p10 to p90, predicted hollow.
    A line joins the points if they span more than `narrow`: else it would only go up and down."""
    joined = points["at"].max() - points["at"].min() > narrow
    how: dict[str, Any] = {"c": look["color"], "marker": look["marker"], "zorder": 1.5 if look["color"] == FAINT else 3}
    for at, column, kind in (("at", "step_s", "measured"), ("predicted_at", "predicted_step_s", "predicted")):
        for x, seconds in points[[at, column]].dropna().itertuples(index=False):
            words = told(f"{label}, {x:.4g}: {ask.milliseconds(seconds)} ms {kind}")
            axes.plot(x, seconds * 1e3, "o", color="none", ms=9, zorder=8, gid=words)
    if points["predicted_step_s"].notna().any():
        hollow = how | {"mfc": "white", "mew": 1.1, "ms": 7, "lw": 1.1, "zorder": how["zorder"] - 1}
        axes.plot(points["predicted_at"], points["predicted_step_s"] * 1e3, ls="--" if joined else "none", **hollow)
    if points["step_s"].notna().any():
        step, low, high = (points[f"step_s{end}"] * 1e3 for end in ("", "_p10", "_p90"))
        bars, ls = [(step - low).clip(lower=0), (high - step).clip(lower=0)], "-" if joined else "none"
        axes.errorbar(points["at"], step, bars, ls=ls, lw=1.4, ms=5, elinewidth=1.4, capsize=2.5, **how)


def legend_below(figure: Figure, handles: list[Any], notes: str = "") -> Figure:
    """The figure with one legend under the axes, of as many columns as fit, and `notes` in small print; it grows."""
    longest = max(len(handle.get_label()) for handle in handles)
    # In points: a letter of 8.5 is about 5.2 wide, handle and gaps take 46; a row is 14 high.
    size = matplotlib.rcParams["legend.fontsize"] / 8.5
    columns = max(1, min(len(handles), int(figure.get_figwidth() * 72 / ((longest * 5.2 + 46) * size))))
    rows = -(-len(handles) // columns)
    notes = "" if _paper.get() else notes
    small_rows = notes.count("\n") + 1 if notes else 0
    figure.set_figheight(figure.get_figheight() + (14 * size * rows + 11 * small_rows) / 72)
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, columnspacing=1.8, handlelength=2.6,
        title=notes or None, title_fontsize=7.5, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(GREY)
    return figure


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Each name with as few trailing parts of its dotted paths as keep all apart: B:transformer.h.3 becomes B:3, and in
    a message of several units, transformer.h.3+transformer.wpe, 3+wpe."""

    def short(name: str, parts: int) -> str:
        head, colon, path = name.rpartition(":")
        return head + colon + "+".join(".".join(each.split(".")[-parts:]) for each in path.split("+"))

    result, parts = {name: short(name, 1) for name in names}, 1
    while len(set(result.values())) < len(result) and parts <= max(name.count(".") for name in result):
        parts += 1
        result = {name: short(name, parts) for name in result}
    return result


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
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=170)
    return path
