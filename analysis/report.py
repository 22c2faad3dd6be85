"""Everything that is written about a sweep: table, pictures, and the trace of its fastest run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
from analysis.pictures.style import save
from analysis.settings import is_seed
from analysis.table import write_csv
from analysis.trace import chrome_trace


def write_report(frame: pd.DataFrame, out: str | Path) -> list[Path]:
    """Write table.csv and, as far as the runs have the data, tradeoff.png (overview), curve-*.png (one per budget),
    step_time.png (over memory), step_time-KEY.png (one per number that was swept), and of the fastest run memory.png,
    timeline.png and trace.json. Returns the paths. A picture that the overview shows alone is not written once more.

    With several workloads (model, ranks, kind of link) in one sweep, the files of all but the largest carry the
    workload's name.
    """
    out = Path(out)
    written = [write_csv(frame, out / "table.csv")]
    for number, (workload, rows) in enumerate(ask.workloads(frame)):
        suffix = "" if number == 0 else f"-{_slug(workload)}"
        pictures = list(curves_of(rows))  # pairs of name and figure
        if pictures:
            pictures = [each for each in pictures if each[0] != _in_overview(rows)] + [("tradeoff", overview(rows))]
        best = ask.best_run(rows)
        if best is not None and (Path(best["folder"]) / METRICS).is_file():  # runs of W&B have no periods
            run = load_run(best["folder"])
            title = " · ".join([workload, ask.label(best), ask.budget_words(best["budget_bytes"])])
            pictures += period_of(run, title, best["budget_bytes"])
            written += _write_trace(run, out / f"trace{suffix}.json")
        written += [save(figure, out / f"{name}{suffix}.png") for name, figure in pictures]
    return written


def _in_overview(rows: pd.DataFrame) -> str | None:
    """The name of the one picture that the overview is, if it does not join two: it is not written twice."""
    curves, over_memory, key = ask.share_curves(rows), ask.has_memory_axis(rows), ask.setting_axis(rows)
    if curves:
        return None if over_memory else f"curve-{_slug(ask.budget_words(curves[0]['budget_bytes'].iloc[0]))}"
    return "step_time" if over_memory or key is None else f"step_time-{key}"


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
