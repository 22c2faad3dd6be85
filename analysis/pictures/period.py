"""One period: a timeline of each rank's compute, messages and updates below the prediction, memory by slot, and both as
a trace for Perfetto.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import questions as ask
from analysis.pictures import style
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import LANES, PREDICTED_RANK, Interval, Lane, RankTimeline, Timeline, step_times

LANE_WORDS: dict[Lane, str] = {"compute": "compute", "message": "messages", "update": "updates"}
_THREADS_PER_LANE = 100
_FEW_SLOTS = 32


def sublanes(intervals: Sequence[Interval]) -> tuple[int, ...]:
    """The lowest free row (from 0) for each interval, in their order: what is in flight together has different rows."""
    row_ends: dict[int, float] = {}
    rows = [0] * len(intervals)
    for index, interval in sorted(enumerate(intervals), key=lambda each: (each[1].start, each[1].end)):
        rows[index] = next((row for row, end in row_ends.items() if end <= interval.start), len(row_ends))
        row_ends[rows[index]] = interval.end
    return tuple(rows)


class Panel(NamedTuple):
    """The bars of one pair of axes: those of a rank, or of the prediction."""

    rank: RankTimeline
    period_s: float
    headline: str


def gantt(
    timeline: Timeline, predicted: Timeline | None = None, title: str = "one period", ranks: int = 4,
    recomputed: Collection[str] = (),
) -> Figure:  # fmt: skip
    """Draw the prediction, if there is one, and the first `ranks` ranks of a timeline. `recomputed` names units. Raises
    ValueError for a timeline without ranks."""
    own = [rank for rank in predicted.ranks if rank.rank == PREDICTED_RANK][:1] if predicted else []
    shown = [(rank, predicted.period_s) for rank in own] if predicted else []
    shown += [(rank, timeline.period_s) for rank in sorted(timeline.ranks, key=lambda rank: rank.rank)[:ranks]]
    return draw([Panel(rank, period_s, _headline(rank, period_s)) for rank, period_s in shown], title, recomputed)


def _headline(rank: RankTimeline, period_s: float) -> str:
    times = step_times(rank.intervals, 0.0, period_s)
    stalled, exposed = ("–" if part is None else f"{part * 1e3:.0f} ms" for part in (times.stalled_s, times.exposed_s))
    words = f"{rank.label}:  period {period_s * 1e3:.0f} ms, stalled {stalled}, of it exposed {exposed}"
    return f"{words}; overlap ratio {times.overlap_ratio:.2f}"


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
    begin = min(0.0, *(interval.start * 1e3 for interval in every))
    axes[-1].set(xlabel="ms from the first backward slot", xlim=(begin, end * 1.005))
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
    return style.legend_below(figure, handles)


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


# From what never leaves to what comes and goes: the stack's ground is flat.
CATEGORY_COLOURS = {
    "parameters": "#44546A", "optimizer": "#8497B0", "gradient_shards": "#CC79A7", "gradients": "#D55E00",
    "full_parameters": "#009E73", "staging": "#F0E442", "update_scratch": "#767676", "activations": "#A9CFE8",
}
RECOMPUTES = "↻"


@style.styled
def memory_over_period(
    timeline: Timeline, budget_bytes: float | None = None, title: str = "memory", recomputed: Collection[str] = ()
) -> Figure:
    """Draw bytes per rank in every slot by category: measured if there is any measurement, with the predicted total and
    the budget as lines. `recomputed` names units. Raises ValueError for a timeline without memory by slot.

    Categories are at their highest, not all at once, so those on top, which come and go, are cut to the total.
    """
    memory = timeline.memory
    if not memory:
        raise ValueError("the timeline has no memory by slot")
    source = "measured" if all(m.measured for m in memory) else "predicted"
    sizes, total = _by_category((m.measured if source == "measured" else m.predicted) or {} for m in memory)
    solid: dict[str, Any] = {"color": style.INK, "lw": 1.3}
    lines = [(total, f"total, {source}", solid)]
    if source == "measured" and (predicted := _by_category(m.predicted for m in memory)[1]).any():
        lines.append((predicted, "total, predicted", solid | {"ls": (0, (4, 2))}))

    figure = style.new_figure(8.2, 4.6, title)
    axes = figure.subplots()
    edges = range(len(memory) + 1)
    ground = total * 0
    handles: list[Patch | Line2D] = []
    for category, tops in sizes.cumsum(axis=1).clip(upper=total, axis=0).items():
        if sizes[category].any():
            axes.stairs(tops, edges, baseline=ground, fill=True, color=CATEGORY_COLOURS[str(category)], lw=0)
            handles.insert(0, Patch(color=CATEGORY_COLOURS[str(category)], label=str(category).replace("_", " ")))
        ground = tops
    for i, slot in enumerate(memory):
        held = ", ".join(f"{category.replace('_', ' ')} {size:.4g}" for category, size in sizes.iloc[i].items() if size)
        axes.bar(i + 0.5, total[i], 1, color="none", gid=style.told(f"{slot.slot}: {total[i]:.4g} MiB: {held}"))
    for totals, words, look in lines:
        axes.stairs(totals, edges, baseline=None, **look)
        handles.append(Line2D([], [], label=words, **look))
    peaks = (f"{ask.gib(totals.max() * MIB)} {words.split()[-1]}" for totals, words, _ in lines)
    axes.set_title(f"peak {', '.join(peaks)}")
    top = max(totals.max() for totals, *_ in lines)
    if budget_bytes is not None and not pd.isna(budget_bytes):
        axes.axhline(budget_bytes / MIB, color="#B00020", lw=1.4)
        top = max(top, budget_bytes / MIB)
        handles.append(Line2D([], [], color="#B00020", lw=1.4, label=ask.budget_words(budget_bytes)))
    again = {f"B:{unit}" for unit in recomputed} & {m.slot for m in memory}
    short = style.shortened(m.slot for m in memory)
    labels = [f"{short[m.slot]} {RECOMPUTES}" if m.slot in again else short[m.slot] for m in memory]
    if again:
        ink: dict[str, Any] = {"mec": style.INK, "mfc": style.INK}
        handles.append(Line2D([], [], color="none", marker=f"${RECOMPUTES}$", label="recomputes", **ink))
    axes.set(xlim=(0, len(memory)), ylim=(0, top * 1.06), xlabel="slots of the period", ylabel="MiB per rank")
    ticks = range(0, len(memory), -(-len(memory) // 24))
    crowded = max(len(labels[i]) for i in ticks) * len(ticks) > 90
    axes.set_xticks([i + 0.5 for i in ticks], [labels[i] for i in ticks], rotation=90 if crowded else 0)
    axes.tick_params(axis="x", length=0)
    phases = "".join(m.slot[0] for m in memory)
    if (turn := phases.find("F")) > 0 and "B" not in phases[turn:]:
        axes.axvline(turn, color="#999999", lw=0.8)
        axes.set_xlabel("slots of the period:  backward  |  forward")
    figure.legend(handles=handles, loc="outside right center", handlelength=1.8)  # in the order of the stack
    return figure


def _by_category(slots: Iterable[Mapping[str, int]]) -> tuple[pd.DataFrame, pd.Series]:
    """MiB of each slot by category, from the ground up, and their total."""
    sizes = pd.DataFrame(list(slots)).fillna(0) / MIB
    total = sizes["total"] if "total" in sizes else sizes.sum(axis=1)
    return sizes.reindex(columns=list(CATEGORY_COLOURS), fill_value=0.0), total


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the trace event format of Chrome and Perfetto (https://ui.perfetto.dev opens it).

    One process per rank, with threads for compute, messages and updates: complete ("X") events in microseconds, which
    must nest, so messages in flight together have threads "messages 2", "messages 3" … Memory is counter ("C") events
    of the first rank.
    """
    events: list[dict[str, Any]] = []
    for entry in timeline.ranks:
        pid = _process(entry.rank)
        events.append(_metadata("process_name", pid, 0, name=entry.label))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for lane_index, lane in enumerate(LANES):
            intervals, first = entry.lane(lane), 1 + lane_index * _THREADS_PER_LANE
            tids = [first + row for row in sublanes(intervals)]
            for tid in range(first, max(tids, default=first) + 1):
                name = LANE_WORDS[lane] if tid == first else f"{LANE_WORDS[lane]} {tid - first + 1}"
                events.append(_metadata("thread_name", pid, tid, name=name))
                events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            events += [{
                "ph": "X", "name": each.name, "cat": each.kind, "pid": pid, "tid": tid, "ts": each.start * 1e6,
                "dur": each.duration_s * 1e6, "args": {"unit": each.unit, "kind": each.kind, "bytes": each.bytes},
            } for each, tid in zip(intervals, tids, strict=True)]  # fmt: skip
    events.extend(_memory_counters(timeline))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"period_s": timeline.period_s}}


def _process(rank: int) -> int:
    """Return the process id of a rank. Ids start at 1 (the prediction): trace viewers treat process 0 differently."""
    return rank - PREDICTED_RANK + 1


def _metadata(event: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def _memory_counters(timeline: Timeline) -> list[dict[str, Any]]:
    """Counters at the start of each slot, as the first rank computed it; none of slots that it did not record. Slots of
    one name, of a unit that is used several times, are taken in order."""
    if not timeline.ranks:
        return []
    starts: dict[str, list[float]] = {}
    for interval in reversed(timeline.ranks[0].lane("compute")):
        starts.setdefault(interval.name, []).append(interval.start)
    placed = [(slot, starts[slot.slot].pop()) for slot in timeline.memory if starts.get(slot.slot)]
    return [
        {"ph": "C", "name": f"memory, {source} (bytes)", "pid": _process(timeline.ranks[0].rank), "ts": start * 1e6,
         "args": {category: size for category, size in sizes.items() if category != "total"}}
        for source in ("predicted", "measured")
        for slot, start in placed
        if (sizes := getattr(slot, source))
    ]  # fmt: skip
