"""Memory over a period, by the ledger's categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import questions as ask
from analysis.pictures import style
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import SlotMemory, Timeline

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


@style.styled
def memory_over_period(
    timeline: Timeline, budget_bytes: float | None = None, title: str = "memory"
) -> Figure:
    """Bytes per rank in every slot, stacked by category, with the other side's total as a line and the budget.

    Measured memory is stacked if there is any, with the predicted total as a dashed line; else the prediction is
    stacked. Categories are each at their highest in the slot and need not peak together, so the stack may stand
    above the line of the total. Raises ValueError if the timeline has no memory.
    """
    memory = timeline.memory
    if not memory:
        raise ValueError("the timeline has no memory by slot")
    is_measured = all(m.measured for m in memory)
    stacked = [(m.measured if is_measured else m.predicted) or {} for m in memory]
    total, predicted = _totals(stacked), _totals([m.predicted for m in memory])
    edges = list(range(len(memory) + 1))

    figure = style.new_figure(8.2, 4.6, title)
    axes = figure.subplots()
    ground = [0.0] * len(memory)
    patches = []
    for category in _shown(stacked):
        sizes = [slot.get(category, 0) / MIB for slot in stacked]
        ceiling = [g + s for g, s in zip(ground, sizes, strict=True)]
        colour = CATEGORY_COLOURS.get(category, "#BBBBBB")
        axes.stairs(ceiling, edges, baseline=ground, fill=True, color=colour, lw=0)
        patches.append(Patch(color=colour, label=category.replace("_", " ")))
        ground = ceiling
    axes.stairs(total, edges, baseline=None, color=style.INK, lw=1.3)
    handles: list[Patch | Line2D] = list(reversed(patches))
    peak = f"peak {max(total):.0f} MiB {'measured' if is_measured else 'predicted'}"
    if is_measured and any(predicted):
        axes.stairs(predicted, edges, baseline=None, color=style.INK, lw=1.3, ls=(0, (4, 2)))
        handles += [
            Line2D([], [], color=style.INK, lw=1.3, label="measured"),
            Line2D([], [], color=style.INK, lw=1.3, ls=(0, (4, 2)), label="predicted"),
        ]
        peak += f", {max(predicted):.0f} predicted"
    axes.set_title(peak)
    top = max(*ground, *predicted)
    if budget_bytes is not None:
        axes.axhline(budget_bytes / MIB, color="#B00020", lw=1.4)
        top = max(top, budget_bytes / MIB)
        handles.append(Line2D([], [], color="#B00020", lw=1.4, label=ask.budget_words(budget_bytes)))
    axes.set_ylim(0, top * 1.06)
    axes.set_xlim(0, len(memory))
    _name_slots(axes, memory)
    axes.set_ylabel("MiB per rank")
    # Beside the axes, in the order of the stack.
    figure.legend(handles=handles, loc="outside right center", handlelength=1.8)
    return figure


def _totals(slots: Sequence[Mapping[str, int]]) -> list[float]:
    return [slot.get("total", sum(slot.values())) / MIB for slot in slots]


def _shown(slots: Sequence[Mapping[str, int]]) -> list[str]:
    """The categories with any bytes, in stacking order; unknown ones last."""
    present = {
        category for slot in slots for category, size in slot.items() if size > 0 and category != "total"
    }
    return [c for c in CATEGORY_COLOURS if c in present] + sorted(present - set(CATEGORY_COLOURS))


def _name_slots(axes: Axes, memory: Sequence[SlotMemory]) -> None:
    count = len(memory)
    every = -(-count // 24)
    ticks = range(0, count, every)
    short = style.shortened(m.slot for m in memory)
    longest = max(len(short[memory[i].slot]) for i in ticks)
    axes.set_xticks(
        [i + 0.5 for i in ticks],
        [short[memory[i].slot] for i in ticks],
        rotation=90 if longest * len(ticks) > 90 else 0,
    )
    axes.tick_params(axis="x", length=0)
    turn = sum(m.slot.startswith("B") for m in memory)
    phases = [m.slot[:1] for m in memory]
    if phases == ["B"] * turn + ["F"] * (count - turn) and 0 < turn < count:
        axes.axvline(turn, color="#999999", lw=0.8)
        axes.set_xlabel("slots of the period:  backward  |  forward")
    else:
        axes.set_xlabel("slots of the period")
