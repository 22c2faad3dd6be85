"""Memory over a period, by the ledger's categories: what a stack shows, and its drawing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import questions as ask
from analysis.pictures import style
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import Timeline

# From what never leaves to what comes and goes: the stack's ground is flat.
CATEGORY_COLOURS = {
    "parameters": "#44546A",
    "optimizer": "#8497B0",
    "gradient_shards": "#CC79A7",
    "gradients": "#D55E00",
    "full_parameters": "#009E73",
    "staging": "#F0E442",
    "update_scratch": "#767676",
    "activations": "#A9CFE8",
}
RECOMPUTES = "↻"


class Stack(NamedTuple):
    """Contents of a picture of memory, in MiB per rank, one value per slot.

    - source: measured or predicted.
    - slots: names; labels: short ones, with a mark where the slot recomputes activations.
    - layers: bytes by category, from the ground up. Their sum is `total`: categories are told at their highest in the slot and
      need not be so together, so those on top, which come and go, are cut to the total.
    - predicted: the predicted total where the stack is measured; else empty.
    """

    source: str
    slots: list[str]
    labels: list[str]
    layers: dict[str, list[float]]
    total: list[float]
    predicted: list[float]


def stack(timeline: Timeline, recomputed: Collection[str] = ()) -> Stack:
    """Return the stack: measured if there is any measurement. `recomputed` names units. Raises ValueError without memory."""
    memory = timeline.memory
    if not memory:
        raise ValueError("the timeline has no memory by slot")
    is_measured = all(m.measured for m in memory)
    stacked = [(m.measured if is_measured else m.predicted) or {} for m in memory]
    layers: dict[str, list[float]] = {}
    room = total = [_total(slot) for slot in stacked]
    for category in [*CATEGORY_COLOURS, *sorted({key for slot in stacked for key in slot} - {*CATEGORY_COLOURS, "total"})]:
        sizes = [min(left, slot.get(category, 0) / MIB) for left, slot in zip(room, stacked, strict=True)]
        room = [left - size for left, size in zip(room, sizes, strict=True)]
        if any(sizes):
            layers[category] = sizes
    short = style.shortened(m.slot for m in memory)
    again = {f"B:{unit}" for unit in recomputed}
    labels = [f"{short[m.slot]} {RECOMPUTES}" if m.slot in again else short[m.slot] for m in memory]
    predicted = [_total(m.predicted) for m in memory] if is_measured else []
    return Stack("measured" if is_measured else "predicted", [m.slot for m in memory], labels, layers, total, predicted)


def _total(slot: Mapping[str, int]) -> float:
    return slot.get("total", sum(slot.values())) / MIB


@style.styled
def memory_over_period(
    timeline: Timeline, budget_bytes: float | None = None, title: str = "memory", recomputed: Collection[str] = ()
) -> Figure:
    """Draw `stack`: bytes per rank in every slot by category, with their total, the predicted total and the budget as lines."""
    shown = stack(timeline, recomputed)
    edges, count = list(range(len(shown.slots) + 1)), len(shown.slots)
    figure = style.new_figure(8.2, 4.6, title)
    axes = figure.subplots()
    ground = [0.0] * count
    handles: list[Patch | Line2D] = []
    for category, sizes in shown.layers.items():
        ceiling = [g + s for g, s in zip(ground, sizes, strict=True)]
        colour = CATEGORY_COLOURS.get(category, "#BBBBBB")
        axes.stairs(ceiling, edges, baseline=ground, fill=True, color=colour, lw=0)
        handles.insert(0, Patch(color=colour, label=category.replace("_", " ")))
        ground = ceiling
    for i, slot in enumerate(shown.slots):
        held = ", ".join(f"{category.replace('_', ' ')} {sizes[i]:.4g}" for category, sizes in shown.layers.items())
        axes.bar(i + 0.5, shown.total[i], 1, color="none", gid=style.told(f"{slot}: {shown.total[i]:.4g} MiB: {held}"))
    solid: dict[str, Any] = {"color": style.INK, "lw": 1.3}
    lines = [(shown.total, f"total, {shown.source}", solid)]
    peak = f"peak {ask.gib(max(shown.total) * MIB)} {shown.source}"
    if any(shown.predicted):
        lines.append((shown.predicted, "total, predicted", solid | {"ls": (0, (4, 2))}))
        peak += f", {ask.gib(max(shown.predicted) * MIB)} predicted"
    for total, words, look in lines:
        axes.stairs(total, edges, baseline=None, **look)
        handles.append(Line2D([], [], label=words, **look))
    axes.set_title(peak)
    top = max(*shown.total, *shown.predicted, 0.0)
    if budget_bytes is not None:
        axes.axhline(budget_bytes / MIB, color="#B00020", lw=1.4)
        top = max(top, budget_bytes / MIB)
        handles.append(Line2D([], [], color="#B00020", lw=1.4, label=ask.budget_words(budget_bytes)))
    if any(label.endswith(RECOMPUTES) for label in shown.labels):
        handles.append(Line2D([], [], color="none", marker=f"${RECOMPUTES}$", mec=style.INK, mfc=style.INK, label="recomputes"))
    axes.set_ylim(0, top * 1.06)
    axes.set_xlim(0, count)
    ticks = range(0, count, -(-count // 24))
    crowded = max(len(shown.labels[i]) for i in ticks) * len(ticks) > 90
    axes.set_xticks([i + 0.5 for i in ticks], [shown.labels[i] for i in ticks], rotation=90 if crowded else 0)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("slots of the period")
    turn = sum(slot.startswith("B") for slot in shown.slots)
    if [slot[:1] for slot in shown.slots] == ["B"] * turn + ["F"] * (count - turn) and 0 < turn < count:
        axes.axvline(turn, color="#999999", lw=0.8)
        axes.set_xlabel("slots of the period:  backward  |  forward")
    axes.set_ylabel("MiB per rank")
    # Beside the axes, in the order of the stack.
    figure.legend(handles=handles, loc="outside right center", handlelength=1.8)
    return figure
