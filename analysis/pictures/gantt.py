"""Timeline of one period: what it shows, and its drawing (compute, messages and updates; the prediction above the ranks)."""

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


class Bar(NamedTuple):
    """An interval in its row. kind: a key of `style.KIND_COLOURS`. Times in ms from the first backward slot."""

    row: int
    kind: str
    unit: str
    start: float
    length: float
    bytes: int
    recomputes: bool

    @property
    def words(self) -> str:
        size = f", {self.bytes / MIB:.3g} MiB" if self.bytes else ""
        return f"{style.KIND_WORDS.get(self.kind, self.kind)} {self.unit}{' with recomputation' * self.recomputes}{size}"


class Panel(NamedTuple):
    """One rank, or the prediction. lanes: (name, number of rows), from the top; messages in flight together need several."""

    name: str
    headline: str
    period: float
    lanes: tuple[tuple[str, int], ...]
    bars: tuple[Bar, ...]


def panels(
    timeline: Timeline, predicted: Timeline | None = None, ranks: int = 4, recomputed: Collection[str] = ()
) -> list[Panel]:
    """Everything that a timeline shows: the prediction first, then the first `ranks` ranks. `recomputed` names units."""
    shown = [] if predicted is None else [(r, predicted.period_s) for r in predicted.ranks if r.rank == PREDICTED_RANK][:1]
    shown += [(rank, timeline.period_s) for rank in sorted(timeline.ranks, key=lambda rank: rank.rank)[:ranks]]
    return [_panel(rank, period_s, recomputed) for rank, period_s in shown]


def _panel(rank: RankTimeline, period_s: float, recomputed: Collection[str]) -> Panel:
    lanes, bars, top = [], [], 0
    for lane in LANES:
        intervals = rank.lane(lane)
        rows = sublanes(intervals)
        bars += [_bar(interval, top + row, recomputed) for interval, row in zip(intervals, rows, strict=True)]
        lanes.append((LANE_WORDS[lane], max(rows, default=0) + 1))
        top += lanes[-1][1]
    times = step_times(rank.intervals, 0.0, period_s)
    headline = (
        f"{rank.label}:  period {period_s * 1e3:.0f} ms, stalled {_ms(times.stalled_s)}, of it exposed {_ms(times.exposed_s)};"
        f" overlap ratio {times.overlap_ratio:.2f}"
    )
    return Panel(rank.label, headline, period_s * 1e3, tuple(lanes), tuple(bars))


def _bar(of: Interval, row: int, recomputed: Collection[str]) -> Bar:
    return Bar(row, of.kind, of.unit, of.start * 1e3, of.duration_s * 1e3, of.bytes, of.kind == "B" and of.unit in recomputed)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"


def gantt(
    timeline: Timeline, predicted: Timeline | None = None, title: str = "one period", ranks: int = 4,
    recomputed: Collection[str] = (),
) -> Figure:  # fmt: skip
    """Draw `panels` of a timeline. Raises ValueError for one without ranks."""
    return draw(panels(timeline, predicted, ranks, recomputed), title)


@style.styled
def draw(shown: Sequence[Panel], title: str) -> Figure:
    """Draw panels on one time axis, coloured by kind. Raises ValueError without any."""
    if not shown:
        raise ValueError("the timeline has no ranks")
    rows = [sum(count for _, count in panel.lanes) for panel in shown]
    figure = style.new_figure(9.4, 1.2 + sum(0.27 * n + 0.42 for n in rows), title)
    axes = figure.subplots(len(shown), 1, sharex=True, height_ratios=rows, squeeze=False)[:, 0]
    bars = [bar for panel in shown for bar in panel.bars]
    end = max(max(panel.period for panel in shown), *(bar.start + bar.length for bar in bars))
    few = max(sum(bar.kind in "FB" for bar in panel.bars) for panel in shown) <= _FEW_SLOTS
    names = style.shortened({bar.unit for bar in bars}) if few else {}
    for each, panel in zip(axes, shown, strict=True):
        _draw(each, panel, end, names)
    axes[-1].set_xlabel("ms from the first backward slot")
    axes[-1].set_xlim(min(0.0, *(bar.start for bar in bars)), end * 1.005)
    kinds = {bar.kind for bar in bars}
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=style.KIND_WORDS[kind]) for kind, colour in style.KIND_COLOURS.items() if kind in kinds
    ]
    if any(bar.recomputes for bar in bars):
        handles.append(Patch(fc=style.KIND_COLOURS["B"], ec="white", hatch="////", label="backward with recomputation"))
    handles.append(Line2D([], [], color=style.INK, lw=0.9, ls=":", label="end of the period"))
    style.legend_below(figure, handles)
    return figure


def _draw(axes: Axes, panel: Panel, end: float, names: dict[str, str]) -> None:
    for bar in panel.bars:
        colour, hatch = style.KIND_COLOURS.get(bar.kind, "#BBBBBB"), "////" if bar.recomputes else None
        edge = 0 if bar.length < 0.002 * end else 0.5 if names else 0.2  # which would cover the thinnest bars
        words = style.told(f"{bar.words}: {bar.length:.4g} ms, from {bar.start:.4g}")
        axes.barh(bar.row, bar.length, 0.84, bar.start, color=colour, edgecolor="white", lw=edge, hatch=hatch, gid=words)
        # About 140 letters of this size fit across the axes: words are written only into a bar that holds them.
        unit, room = names.get(bar.unit, ""), bar.length / end * 140 - 1
        text = next((words for words in (f"{style.KIND_WORDS.get(bar.kind, bar.kind)} {unit}", unit) if len(words) < room), "")
        if unit and text:
            colour = "white" if bar.kind in ("RS", "AG_F", "update") else style.INK
            ground = {"fc": style.KIND_COLOURS["B"], "ec": "none", "pad": 0.8} if bar.recomputes else None  # over the hatch
            at = bar.start + bar.length / 2, bar.row + 0.03
            axes.text(*at, text, ha="center", va="center", fontsize=7, color=colour, bbox=ground)
    tops = [sum(count for _, count in panel.lanes[:i]) for i in range(len(panel.lanes) + 1)]
    ticks = [top + (count - 1) / 2 for top, (_, count) in zip(tops, panel.lanes, strict=False)]
    axes.set_yticks(ticks, [name for name, _ in panel.lanes])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(tops[-1] - 0.4, -0.6)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.axvline(panel.period, color=style.INK, lw=0.9, ls=":")
    axes.set_title(panel.headline, fontsize=9)
