"""Timeline of compute, messages and updates of one period, the prediction above the ranks."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.pictures import style
from analysis.trace import sublanes
from mdcs.telemetry.timeline import LANES, PREDICTED_RANK, Interval, Lane, RankTimeline, Timeline, step_times

_FEW_SLOTS = 32
_KIND_WORDS = {"F": "forward", "B": "backward"}
_LANE_WORDS = {"compute": "compute", "message": "messages", "update": "updates"}


@style.styled
def gantt(
    timeline: Timeline, predicted: Timeline | None = None, title: str = "one period", ranks: int = 4
) -> Figure:
    """Compute, messages and updates of one period, coloured by kind, the prediction first, then the first `ranks`
    ranks, on one time axis. Messages in flight together stand in rows of their own. Raises ValueError for a
    timeline without ranks.
    """
    shown = [(r, timeline.period_s) for r in sorted(timeline.ranks, key=lambda r: r.rank)[:ranks]]
    if predicted is not None:
        simulated = [r for r in predicted.ranks if r.rank == PREDICTED_RANK] or list(predicted.ranks[:1])
        shown = [
            *((RankTimeline(PREDICTED_RANK, r.intervals), predicted.period_s) for r in simulated),
            *shown,
        ]
    if not shown:
        raise ValueError("the timeline has no ranks")

    rows = [sum(_rows_of(r, lane) for lane in LANES) for r, _ in shown]
    figure = style.new_figure(9.4, 1.2 + sum(0.27 * n + 0.42 for n in rows), title)
    panels = figure.subplots(len(shown), 1, sharex=True, height_ratios=rows, squeeze=False)[:, 0]
    end_ms = max(max([p, *(i.end for i in r.intervals)]) for r, p in shown) * 1e3
    units = {i.unit for r, _ in shown for i in r.intervals}
    names = style.shortened(units) if len(timeline.slots) <= _FEW_SLOTS else {}
    for panel, (rank, period_s) in zip(panels, shown, strict=True):
        _draw_rank(panel, rank, period_s, end_ms, names)
    panels[-1].set_xlabel("ms from the first backward slot")
    panels[-1].set_xlim(min(0.0, *(i.start * 1e3 for r, _ in shown for i in r.intervals)), end_ms * 1.005)
    kinds = {i.kind for r, _ in shown for i in r.intervals}
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=_KIND_WORDS.get(kind, kind))
        for kind, colour in style.KIND_COLOURS.items()
        if kind in kinds
    ]
    handles.append(Line2D([], [], color=style.INK, lw=0.9, ls=":", label="end of the period"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), handlelength=1.2)
    return figure


def _rows_of(rank: RankTimeline, lane: Lane) -> int:
    return max(sublanes(rank.lane(lane)), default=0) + 1


def _draw_rank(axes: Axes, rank: RankTimeline, period_s: float, end_ms: float, names: dict[str, str]) -> None:
    top = 0
    ticks, labels = [], []
    for lane in LANES:
        intervals = rank.lane(lane)
        rows = sublanes(intervals)
        for interval, row in zip(intervals, rows, strict=True):
            _draw_interval(axes, interval, top + row, end_ms, names)
        count = max(rows, default=0) + 1
        ticks.append(top + (count - 1) / 2)
        labels.append(_LANE_WORDS[lane])
        top += count
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top - 0.4, -0.6)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.axvline(period_s * 1e3, color=style.INK, lw=0.9, ls=":")
    axes.set_title(_headline(rank, period_s), fontsize=9)


def _headline(rank: RankTimeline, period_s: float) -> str:
    times = step_times(rank.intervals, 0.0, period_s)
    return (
        f"{rank.label}:  period {period_s * 1e3:.0f} ms, stalled {_ms(times.stalled_s)}, of it exposed {_ms(times.exposed_s)};"
        f" overlap ratio {times.overlap_ratio:.2f}"
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _draw_interval(axes: Axes, interval: Interval, row: int, end_ms: float, names: dict[str, str]) -> None:
    start, width = interval.start * 1e3, interval.duration_s * 1e3
    colour = style.KIND_COLOURS.get(interval.kind, "#BBBBBB")
    axes.barh(row, width, left=start, height=0.84, color=colour, edgecolor="white", lw=0.5 if names else 0.2)
    # About 140 letters of this size fit across the axes: a name is written only into a bar that holds it.
    room = width / end_ms * 140 - 1
    text = next((name for name in (interval.name, names.get(interval.unit, "")) if len(name) < room), "")
    if names and text:
        dark = interval.kind in ("RS", "AG_F", "update")
        axes.text(
            start + width / 2,
            row + 0.03,
            text,
            ha="center",
            va="center",
            fontsize=7,
            color="white" if dark else style.INK,
        )
