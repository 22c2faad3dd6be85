"""Memory by layer: the peak of a rank while each unit is computed, for all runs of a sweep side by side."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import questions as ask
from analysis.load import load_run
from analysis.pictures import style
from analysis.sources import runs
from analysis.table import new_console, new_table
from mdcs.sizes import MIB


def write_layers(folder: Path) -> list[Path]:
    """Print a row per unit with the peak of every run in MiB, and write it as CSV and as a picture. Return the files.

    Peaks are measured ones, and predicted where nothing was measured. Raises ValueError if no run has a plan.
    """
    found = sorted({path.parent for path in folder.rglob("predicted_timeline.json")}) if folder.is_dir() else []
    if not found:
        raise ValueError(f"{folder} has no run with a plan")
    frame, table = by_layer(found), folder / "memory_by_layer.csv"
    title = " · ".join(["memory by layer", *(workload for workload, _ in ask.workloads(runs(folder))[:1])])
    frame.to_csv(table)
    show(frame)
    return [table, style.save(picture(frame, title), table.with_suffix(".png"))]


def by_layer(folders: list[Path]) -> pd.DataFrame:
    """A row per unit, in the order of forward, and a column per run: peak MiB per rank over the unit's slots."""
    columns = {}
    for folder in folders:
        run = load_run(folder)
        timeline = run.timeline() or run.predicted_timeline()
        assert timeline is not None
        held: dict[str, float] = {}
        slots = timeline.memory
        for slot in sorted(slots, key=lambda slot: not slot.slot.startswith("F")):  # forward first
            bytes_ = slot.measured or slot.predicted
            unit = slot.slot.partition(":")[2]
            held[unit] = max(held.get(unit, 0.0), bytes_.get("total", sum(bytes_.values())) / MIB)
        said = "measured" if slots and slots[0].measured else "predicted"
        name = f"{run.start['strategy']} {run.settings.get('run.precision', 'fp32')}, {said}"
        columns[name if name not in columns else f"{name}, {folder.name}"] = pd.Series(held)
    return pd.DataFrame(columns).rename_axis("unit")


@style.styled
def picture(frame: pd.DataFrame, title: str = "memory by layer") -> Figure:
    """A line per run over the units."""
    figure = style.new_figure(8.2, 4.4, title)
    axes = figure.subplots()
    looks = style.palette(map(str, frame.columns))
    for name, column in frame.items():
        axes.step(range(len(column)), column, where="mid", color=looks[str(name)]["color"])
    short = style.shortened(map(str, frame.index))
    ticks = range(0, len(frame), -(-len(frame) // 24))
    axes.set_xticks(list(ticks), [short[str(frame.index[i])] for i in ticks], rotation=90)
    axes.set_ylim(0, None)
    axes.set_title("at most while the unit is computed, forward or backward")
    axes.set_ylabel("MiB per rank")
    axes.set_xlabel("units, in the order of forward")
    style.legend_below(figure, [Line2D([], [], color=look["color"], label=name) for name, look in looks.items()])
    return figure


def show(frame: pd.DataFrame) -> None:
    """Print the table, and the peak of each run."""
    lines = [*frame.iterrows(), ("peak", frame.max())]
    rows = [(str(unit), *(f"{value:.1f}" for value in row)) for unit, row in lines]
    headings = ("unit", *map(str, frame.columns))
    new_console(highlight=False, markup=False).print(
        new_table("memory by layer, MiB per rank", headings, ("unit",), rows=rows)
    )
