"""Timeline of one period: compute, messages and updates of each rank, below the prediction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.pictures import style
from analysis.trace import LANE_WORDS, sublanes
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import LANES, PREDICTED_RANK, Interval, RankTimeline, Timeline, step_times

_FEW_SLOTS = 32


class Panel(NamedTuple):
    """The bars of one pair of axes: those of a rank, or of the prediction."""

    rank: RankTimeline
    period_s: float
    headline: str


def gantt(
    timeline: Timeline, predicted: Timeline | None = None, title: str = "one period", ranks: int = 4,
    recomputed: Collection[str] = (),
) -> Figure:  # fmt: skip
    """Draw the prediction, if there is one, and the first `ranks` ranks of a timeline. `recomputed` names units.

    Raises ValueError for a timeline without ranks.
    """
    own = () if predicted is None else [rank for rank in predicted.ranks if rank.rank == PREDICTED_RANK][:1]
    shown = [(rank, predicted.period_s) for rank in own] if predicted else []
    shown += [(rank, timeline.period_s) for rank in sorted(timeline.ranks, key=lambda rank: rank.rank)[:ranks]]
    return draw([Panel(rank, period_s, _headline(rank, period_s)) for rank, period_s in shown], title, recomputed)


def _headline(rank: RankTimeline, period_s: float) -> str:
    times = step_times(rank.intervals, 0.0, period_s)
    stalled, exposed = ("–" if part is None else f"{part * 1e3:.0f} ms" for part in (times.stalled_s, times.exposed_s))
    return (
        f"{rank.label}:  period {period_s * 1e3:.0f} ms, stalled {stalled}, of it exposed {exposed};"
        f" overlap ratio {times.overlap_ratio:.2f}"
    )


@style.styled
def draw(panels: Sequence[Panel], title: str, recomputed: Collection[str] = ()) -> Figure:
    """Draw panels on one time axis, coloured by kind. Raises ValueError without any."""
    if not panels:
        raise ValueError("the timeline has no ranks")
    lanes = [[(LANE_WORDS[lane], (of := panel.rank.lane(lane)), sublanes(of)) for lane in LANES] for panel in panels]
    rows = [sum(max(places, default=0) + 1 for *_, places in each) for each in lanes]
    figure = style.new_figure(9.4, 1.2 + sum(0.27 * n + 0.42 for n in rows), title)
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=rows, squeeze=False)[:, 0]
    every = [interval for panel in panels for interval in panel.rank.intervals]
    end = max(*(panel.period_s for panel in panels), *(interval.end for interval in every)) * 1e3
    few = max(sum(i.kind in "FB" for i in panel.rank.intervals) for panel in panels) <= _FEW_SLOTS
    names = style.shortened({interval.unit for interval in every}) if few else {}
    for on, panel, of_panel, count in zip(axes, panels, lanes, rows, strict=True):
        top, ticks = 0, {}
        for name, intervals, places in of_panel:
            for interval, place in zip(intervals, places, strict=True):
                again = interval.kind == "B" and interval.unit in recomputed
                _draw(on, interval, top + place, end, names, recomputes=again)
            ticks[top + max(places, default=0) / 2] = name
            top += max(places, default=0) + 1
        on.set_yticks(list(ticks), list(ticks.values()))
        on.tick_params(axis="y", length=0)
        on.set_ylim(count - 0.4, -0.6)
        on.grid(False)
        on.spines["left"].set_visible(False)
        on.axvline(panel.period_s * 1e3, color=style.INK, lw=0.9, ls=":")
        on.set_title(panel.headline, fontsize=9)
    axes[-1].set_xlabel("ms from the first backward slot")
    axes[-1].set_xlim(min(0.0, *(interval.start * 1e3 for interval in every)), end * 1.005)
    kinds = {interval.kind for interval in every}
    handles: list[Patch | Line2D] = [
        Line2D([], [], color=colour, lw=4, solid_capstyle="butt", label=style.KIND_WORDS[kind]) if kind.startswith("AG")
        else Patch(fc=colour, ec="white", lw=0, hatch=_hatch(kind), label=style.KIND_WORDS[kind])
        for kind, colour in style.KIND_COLOURS.items() if kind in kinds
    ]  # fmt: skip
    if any(interval.kind == "B" and interval.unit in recomputed for interval in every):
        label, hatch = "backward with recomputation", _hatch("B", recomputes=True)
        handles.append(Patch(fc=style.KIND_COLOURS["B"], ec="white", hatch=hatch, label=label))
    handles.append(Line2D([], [], color=style.INK, lw=0.9, ls=":", label="end of the period"))
    style.legend_below(figure, handles)
    return figure


def _draw(axes: Axes, interval: Interval, row: int, end: float, names: dict[str, str], *, recomputes: bool) -> None:
    """Draw the bar of an interval on an axis of `end` milliseconds, with words as far as they fit into it."""
    start, length = interval.start * 1e3, interval.duration_s * 1e3
    kind = style.KIND_WORDS.get(interval.kind, interval.kind)
    size = f", {interval.bytes / MIB:.3g} MiB" if interval.bytes else ""
    told = f"{kind} {interval.unit}{' with recomputation' * recomputes}{size}: {length:.4g} ms, from {start:.4g}"
    edge = 0 if length < 0.002 * end else 0.5 if names else 0.2  # which would cover the thinnest bars
    colour, height = style.KIND_COLOURS.get(interval.kind, "#BBBBBB"), 0.5 if interval.kind.startswith("AG") else 0.84
    hatch = _hatch(interval.kind, recomputes=recomputes)
    axes.barh(row, length, height, start, color=colour, edgecolor="white", lw=edge, hatch=hatch, gid=style.told(told))
    # About 140 letters of this size fit across the axes.
    unit, room = names.get(interval.unit, ""), length / end * 140 - 1
    if text := next((words for words in (f"{kind} {unit}", unit) if unit and len(words) < room), ""):
        ink = "white" if interval.kind in ("RS", "AG_F", "update") else style.INK
        ground = {"fc": colour, "ec": "none", "pad": 0.8} if hatch else None
        axes.text(start + length / 2, row + 0.03, text, ha="center", va="center", fontsize=7, color=ink, bbox=ground)


def _hatch(kind: str, *, recomputes: bool = False) -> str | None:
    """Tell kinds apart without colours: all-reduces are hatched, all-gathers are low, others differ in brightness."""
    return "////" if recomputes else "xxxx" if kind == "AR" else None
