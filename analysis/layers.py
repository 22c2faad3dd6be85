"""Memory by layer: the peak of a rank while each unit is computed, for all runs of a sweep side by side."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

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
    rows = [(str(unit), *map("{:.1f}".format, row)) for unit, row in [*frame.iterrows(), ("peak", frame.max())]]
    printed = new_table("memory by layer, MiB per rank", ("unit", *map(str, frame.columns)), ("unit",), rows=rows)
    new_console(highlight=False, markup=False).print(printed)
    return [table, style.save(picture(frame, title), table.with_suffix(".png"))]


def by_layer(folders: list[Path]) -> pd.DataFrame:
    """A row per unit, in the order of forward, and a column per run: peak MiB per rank over the unit's slots."""
    columns = {}
    for folder in folders:
        run = load_run(folder)
        timeline = run.timeline() or run.predicted_timeline()
        assert timeline is not None
        slots = [(slot.slot.partition(":"), slot.measured or slot.predicted) for slot in timeline.memory]
        held = pd.DataFrame(
            {"unit": unit, "phase": phase, "MiB": sizes.get("total", sum(sizes.values())) / MIB}
            for (phase, _, unit), sizes in slots
        )
        said = "measured" if timeline.memory and timeline.memory[0].measured else "predicted"
        name = f"{run.start['strategy']} {run.settings.get('run.precision', 'fp32')}, {said}"
        by_unit = held.sort_values("phase", ascending=False, kind="stable").groupby("unit", sort=False)  # forward first
        columns[name if name not in columns else f"{name}, {folder.name}"] = by_unit["MiB"].max()
    return pd.DataFrame(columns)


@style.styled
def picture(frame: pd.DataFrame, title: str = "memory by layer") -> Figure:
    """A line per run over the units."""
    figure = style.new_figure(8.2, 4.4, title)
    axes, looks = figure.subplots(), style.palette(map(str, frame.columns))
    short = style.shortened(map(str, frame.index))
    drawn = frame.rename(index=short).plot(
        ax=axes, drawstyle="steps-mid", color=[look["color"] for look in looks.values()], legend=False, rot=90,
        xlabel="units, in the order of forward", ylabel="MiB per rank",
        title="at most while the unit is computed, forward or backward",
    )  # fmt: skip
    ticks = range(0, len(frame), -(-len(frame) // 24))
    drawn.set_xticks(list(ticks), [short[str(frame.index[i])] for i in ticks])
    drawn.set_ylim(0, None)
    style.legend_below(figure, axes.get_lines())
    return figure
