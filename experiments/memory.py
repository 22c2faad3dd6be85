"""Memory by layer: the peak of a rank while each unit is computed, for all runs of a sweep side by side.

    mdcs train experiment=memory_dp_fsdp_precision hydra.sweep.dir=multirun/memory
    mdcs memory multirun/memory

Prints a row per unit with the measured peak of every run in MiB (predicted where nothing was measured), and leaves
memory_by_layer.csv and memory_by_layer.png in the folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

import pandas as pd
from matplotlib.figure import Figure

import analysis
from analysis.pictures import save, style
from analysis.table import new_console, new_table
from experiments.config.checks import load
from mdcs.sizes import MIB


def main() -> int:
    """Show the sweep that the command line names. Return the exit code."""
    parser = argparse.ArgumentParser(prog="mdcs memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder of a sweep or a run")
    folder = parser.parse_args().folder
    found = sorted({path.parent for path in folder.rglob("predicted_timeline.json")}) if folder.is_dir() else []
    if not found:
        print(f"folder: {folder} has no run with a plan", file=sys.stderr)
        return 2
    frame = by_layer(found)
    frame.to_csv(folder / "memory_by_layer.csv")
    save(picture(frame), folder / "memory_by_layer.png")
    show(frame)
    print(f"in {folder}: memory_by_layer.csv, memory_by_layer.png")
    return 0


def by_layer(runs: list[Path]) -> pd.DataFrame:
    """A row per unit, in the order of forward, and a column per run: peak MiB per rank over the unit's slots."""
    columns = {}
    for folder in runs:
        config, run = load(folder / "config.yaml"), analysis.load_run(folder)
        timeline = run.timeline() or run.predicted_timeline()
        assert timeline is not None
        held: dict[str, float] = {}
        slots = timeline.memory
        for slot in sorted(slots, key=lambda slot: not slot.slot.startswith("F")):  # forward first
            bytes_ = slot.measured or slot.predicted
            unit = slot.slot.partition(":")[2]
            held[unit] = max(held.get(unit, 0.0), bytes_.get("total", sum(bytes_.values())) / MIB)
        said = "measured" if slots and slots[0].measured else "predicted"
        columns[f"{config.strategy.name} {config.run.precision}, {said}"] = pd.Series(held)
    return pd.DataFrame(columns).rename_axis("unit")


def picture(frame: pd.DataFrame) -> Figure:
    """A line per run over the units."""

    @style.styled
    def draw() -> Figure:
        figure = style.new_figure(8.2, 4.4, "memory by layer")
        axes = figure.subplots()
        looks = style.look(frame.columns)
        for name, column in frame.items():
            axes.step(range(len(column)), column, where="mid", color=looks[str(name)]["color"], label=str(name))
        every = -(-len(frame) // 24)
        short = style.shortened(map(str, frame.index))
        ticks = range(0, len(frame), every)
        axes.set_xticks(list(ticks), [short[str(frame.index[i])] for i in ticks], rotation=90)
        axes.set_ylim(0, None)
        axes.set_title("at most while the unit is computed, forward or backward")
        axes.set_ylabel("MiB per rank")
        axes.set_xlabel("units, in the order of forward")
        figure.legend(loc="outside lower left", ncols=2)
        return figure

    return draw()


def show(frame: pd.DataFrame) -> None:
    """Print the table, and the peak of each run."""
    table = new_table("memory by layer, MiB per rank", ("unit", *map(str, frame.columns)), left=("unit",))
    for unit, row in frame.iterrows():
        table.add_row(str(unit), *(f"{value:.1f}" for value in row))
    table.add_section()
    table.add_row("peak", *(f"{value:.1f}" for value in frame.max()))
    console = new_console(highlight=False, markup=False)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
