"""Everything that is written about a sweep: table, pictures, and the trace of its fastest run."""

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
from analysis.pictures.gantt import gantt
from analysis.pictures.memory_by_slot import memory_over_period
from analysis.pictures.step_time import overview, step_time_over_memory, step_time_over_setting, tradeoff_curve
from analysis.pictures.style import paper, save
from analysis.questions import is_seed
from analysis.table import write_csv, write_latex
from analysis.trace import chrome_trace

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
    """Names and pictures of step time over memory, shares and each number that was swept: what the runs of a workload
    have."""
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
