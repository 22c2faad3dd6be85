"""Everything that is written about a sweep: table, pictures, and the trace of its fastest run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd

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
from mdcs.telemetry.timeline import Timeline


def write_report(frame: pd.DataFrame, out: str | Path) -> list[Path]:
    """Write table.csv and, as far as the runs have the data, tradeoff.png (overview), curve-*.png (one per budget),
    step_time.png (over memory), step_time-KEY.png (one per number that was swept), and of the fastest run memory.png,
    timeline.png and trace.json. Returns the paths.

    With several workloads (model, ranks, kind of link) in one sweep, the files of all but the largest carry the
    workload's name.
    """
    out = Path(out)
    written = [write_csv(frame, out / "table.csv")]
    for number, (workload, rows) in enumerate(ask.workloads(frame)):
        suffix = "" if number == 0 else f"-{_slug(workload._replace(parameters=None, link_gbit=None).title)}"
        written += _write_sweep_pictures(rows, out, suffix)
        best = ask.best_run(rows)
        if best is not None and (Path(best["folder"]) / METRICS).is_file():  # runs of W&B have no periods
            run = load_run(best["folder"])
            title = " · ".join([workload.title, ask.label(best), ask.budget_words(best["budget_bytes"])])
            written += _write_run_pictures(run, out, suffix, title, best["budget_bytes"])
    return written


def merged_timeline(run: Run) -> Timeline:
    """The run's measured period with the prediction as one more rank, or whichever of both there is.

    Raises FileNotFoundError if the run has neither.
    """
    measured, predicted = run.timeline(), run.predicted_timeline()
    if measured is not None and predicted is not None:
        ranks = (*(r for r in predicted.ranks if r.rank not in {m.rank for m in measured.ranks}), *measured.ranks)
        return replace(measured, ranks=ranks, memory=measured.memory or predicted.memory)
    found = measured or predicted
    if found is None:
        raise FileNotFoundError(f"{run.folder} has neither timeline.json nor predicted_timeline.json")
    return found


def write_trace(run: Run, path: str | Path) -> Path:
    """Write the run's period as a Chrome trace. Raises FileNotFoundError if none was recorded."""
    path = Path(path)
    text = json.dumps(chrome_trace(merged_timeline(run)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _write_sweep_pictures(rows: pd.DataFrame, out: Path, suffix: str) -> Iterator[Path]:
    if not len(ask.drawn(rows)):
        return
    with_memory = ask.memory_of(ask.drawn(rows)).notna().any()
    if with_memory or ask.share_curves(rows) or ask.setting_axis(rows) is not None:
        yield save(overview(rows), out / f"tradeoff{suffix}.png")
    for curve in ask.share_curves(rows):
        name = f"curve-{_slug(ask.budget_words(curve['budget_bytes'].iloc[0]))}{suffix}.png"
        yield save(tradeoff_curve(rows, curve), out / name)
    if with_memory:
        yield save(step_time_over_memory(rows), out / f"step_time{suffix}.png")
    for key in ask.swept(rows):
        if not is_seed(key) and ask.numbers(ask.drawn(rows)[key]).nunique() > 1:
            yield save(step_time_over_setting(rows, key), out / f"step_time-{key}{suffix}.png")


def _write_run_pictures(run: Run, out: Path, suffix: str, title: str, budget_bytes: float) -> Iterator[Path]:
    measured, predicted = run.timeline(), run.predicted_timeline()
    shown = measured or predicted
    if shown is None:
        return
    picture = gantt(shown, predicted if measured else None, title, recomputed=run.recomputed)
    yield save(picture, out / f"timeline{suffix}.png")
    with_memory = next((t for t in (measured, predicted) if t is not None and t.memory), None)
    if with_memory is not None:
        budget = None if pd.isna(budget_bytes) else budget_bytes
        picture = memory_over_period(with_memory, budget, title, run.recomputed)
        yield save(picture, out / f"memory{suffix}.png")
    yield write_trace(run, out / f"trace{suffix}.json")


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")
