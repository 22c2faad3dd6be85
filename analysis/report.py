"""Everything that is written about a sweep: table, pictures, the trace of its fastest run, and memory by layer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import questions as ask
from analysis.events import METRICS
from analysis.load import Run, load_run
from analysis.pictures import style
from analysis.pictures.period import gantt, memory_over_period
from analysis.pictures.step_time import overview, step_time_over_memory, step_time_over_setting, tradeoff_curve
from analysis.pictures.style import paper, save
from analysis.questions import is_seed
from analysis.sources import runs
from analysis.table import new_console, new_table, write_csv, write_latex
from analysis.trace import chrome_trace
from mdcs.sizes import MIB

FORMATS = {"png", "pdf", "svg", "tex"}
"""Suffixes of pictures, and of the table for LaTeX."""


def write_report(
    frame: pd.DataFrame, out: str | Path, formats: Sequence[str] = ("png",), columns: int = 0
) -> list[Path]:
    """Write table.csv and pictures as far as the runs have the data; return the paths.

    tradeoff is the overview, curve-* one picture per budget, step_time is over memory, step_time-KEY over a number that
    was swept; memory, timeline and trace.json are of the fastest run. A picture that the overview shows whole is not
    written once more. With several workloads (model, ranks, kind of link) the files of all but the largest carry the
    workload's name.

    - formats: suffixes of the pictures; tex: the table, for LaTeX's booktabs.
    - columns: width of the pictures in columns of a journal, 1 or 2, without titles; 0: as wide as is good to read.
    """
    out, pictures = Path(out), list[tuple[str, Figure]]()
    written = [write_csv(frame, out / "table.csv")]
    with paper(columns) if columns else nullcontext():
        for number, (workload, rows) in enumerate(ask.workloads(frame)):
            suffix = "" if number == 0 else f"-{_slug(workload)}"
            of_rows = list(curves_of(rows))
            if of_rows:
                shown = () if columns else _in_overview(rows)
                of_rows = [each for each in of_rows if each[0] not in shown] + [("tradeoff", overview(rows))]
            best = ask.best_run(rows)
            if best is not None and (Path(best["folder"]) / METRICS).is_file():  # runs of W&B have no periods
                run = load_run(best["folder"])
                title = " · ".join([workload, ask.label(best), ask.budget_words(best["budget_bytes"])])
                of_rows += period_of(run, title, best["budget_bytes"])
                written += _write_trace(run, out / f"trace{suffix}.json")
            pictures += [(f"{name}{suffix}", figure) for name, figure in of_rows]
            if "tex" in formats:
                written.append(write_latex(rows, out / f"table{suffix}.tex"))
    suffixes = [each for each in formats if each != "tex"]
    return written + [save(figure, out / f"{name}.{each}") for name, figure in pictures for each in suffixes]


def _in_overview(rows: pd.DataFrame) -> set[str]:
    """Names of the pictures that the overview shows whole: those of its panels, unless series are grey in it."""
    curves, over_memory, key = ask.share_curves(rows), ask.has_memory_axis(rows), ask.setting_axis(rows)
    names = {f"curve-{_slug(ask.budget_words(curve['budget_bytes'].iloc[0]))}" for curve in curves[:1]}
    if over_memory or not curves:
        names.add("step_time" if over_memory or key is None else f"step_time-{key}")
    grey = over_memory and set(ask.labels(ask.drawn(rows))) - ask.named(rows)
    return set() if grey else names


def curves_of(rows: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Names and pictures of step time over memory, shares and swept numbers, as far as a workload's runs have them."""
    drawn = ask.drawn(rows)
    if ask.memory_of(drawn).notna().any():
        yield "step_time", step_time_over_memory(rows)
    for curve in ask.share_curves(rows):
        yield f"curve-{_slug(ask.budget_words(curve['budget_bytes'].iloc[0]))}", tradeoff_curve(rows, curve)
    for key in ask.swept(rows):
        if not is_seed(key) and ask.numbers(drawn[key]).nunique() > 1:
            yield f"step_time-{key}", step_time_over_setting(rows, key)


def period_of(run: Run, title: str, budget_bytes: float) -> Iterator[tuple[str, Figure]]:
    """Names and pictures of a run's period: its timeline and its memory, as far as they were recorded."""
    measured, predicted = run.timeline(), run.predicted_timeline()
    if shown := measured or predicted:
        yield "timeline", gantt(shown, predicted if measured else None, title, recomputed=run.recomputed)
    if with_memory := next((t for t in (measured, predicted) if t is not None and t.memory), None):
        budget = None if pd.isna(budget_bytes) else budget_bytes
        yield "memory", memory_over_period(with_memory, budget, title, run.recomputed)


def _write_trace(run: Run, path: Path) -> Iterator[Path]:
    """Write the run's period as a Chrome trace, with the prediction as one more rank, if any was recorded."""
    measured, predicted = run.timeline(), run.predicted_timeline()
    if shown := measured or predicted:
        if measured is not None and predicted is not None:
            shown = replace(
                measured, ranks=(*predicted.ranks, *measured.ranks), memory=measured.memory or predicted.memory
            )
        path.write_text(json.dumps(chrome_trace(shown)), encoding="utf-8")
        yield path


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


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
