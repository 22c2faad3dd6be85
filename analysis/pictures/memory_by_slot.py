"""Memory over a period, by the ledger's categories."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import questions as ask
from analysis.pictures import style
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import Timeline

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
