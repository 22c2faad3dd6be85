"""One period: a timeline of each rank's compute, messages and updates below the prediction, and memory by slot."""

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

    Categories are told at their highest in the slot and need not be so together, so those on top, which come and go,
    are cut to the total.
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
    axes.set_title(
        "peak " + ", ".join(f"{ask.gib(totals.max() * MIB)} {words.split()[-1]}" for totals, words, _ in lines)
    )
    top = max(totals.max() for totals, *_ in lines)
    if budget_bytes is not None:
        axes.axhline(budget_bytes / MIB, color="#B00020", lw=1.4)
        top = max(top, budget_bytes / MIB)
        handles.append(Line2D([], [], color="#B00020", lw=1.4, label=ask.budget_words(budget_bytes)))
    again = {f"B:{unit}" for unit in recomputed}
    short = style.shortened(m.slot for m in memory)
    labels = [f"{short[m.slot]} {RECOMPUTES}" if m.slot in again else short[m.slot] for m in memory]
    if any(label.endswith(RECOMPUTES) for label in labels):
        ink: dict[str, Any] = {"mec": style.INK, "mfc": style.INK}
        handles.append(Line2D([], [], color="none", marker=f"${RECOMPUTES}$", label="recomputes", **ink))
    axes.set_ylim(0, top * 1.06)
    axes.set_xlim(0, len(memory))
    ticks = range(0, len(memory), -(-len(memory) // 24))
    crowded = max(len(labels[i]) for i in ticks) * len(ticks) > 90
    axes.set_xticks([i + 0.5 for i in ticks], [labels[i] for i in ticks], rotation=90 if crowded else 0)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("slots of the period")
    phases = "".join(m.slot[0] for m in memory)
    if (turn := phases.find("F")) > 0 and "B" not in phases[turn:]:
        axes.axvline(turn, color="#999999", lw=0.8)
        axes.set_xlabel("slots of the period:  backward  |  forward")
    axes.set_ylabel("MiB per rank")
    # Beside the axes, in the order of the stack.
    figure.legend(handles=handles, loc="outside right center", handlelength=1.8)
    return figure


def _by_category(slots: Iterable[Mapping[str, int]]) -> tuple[pd.DataFrame, pd.Series]:
    """MiB of each slot by category, from the ground up, and their total."""
    sizes = pd.DataFrame(list(slots)).fillna(0) / MIB
    total = sizes["total"] if "total" in sizes else sizes.sum(axis=1)
    return sizes.reindex(columns=list(CATEGORY_COLOURS), fill_value=0.0), total
