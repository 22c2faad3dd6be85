"""Contents of the page: where runs come from, every run, the best one of each budget, other engines, curves, periods."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import questions as ask
from analysis.events import METRICS
from analysis.load import PROVENANCE, load_run
from analysis.page import figures
from analysis.settings import short
from analysis.settings import value as words
from mdcs.sizes import MIB

PROGRAM = "mdcs train"
PERIODS = 8
"""Number of the best runs that are shown slot by slot; more would make the page large."""

COLUMNS: tuple[tuple[str, str, str, float], ...] = (
    ("workload", "workload", "", 0),
    ("strategy", "strategy", "", 0),
    ("scheduler", "scheduler", "", 0),
    ("budget_bytes", "budget", "MiB", MIB),
    ("schedule_share", "share", "", 1),
    ("step_s", "step", "ms", 1e-3),
    ("step_s_p10", "p10", "ms", 1e-3),
    ("step_s_p90", "p90", "ms", 1e-3),
    ("predicted_step_s", "predicted", "ms", 1e-3),
    ("off", "predicted is off by", "%", 1e-2),
    ("overlap_ratio", "overlap ratio", "", 1),
    ("exposed_s", "exposed", "ms", 1e-3),
    ("bytes_total", "sent", "MB", 1e6),
    ("peak_bytes", "peak", "MiB", MIB),
    ("predicted_peak_bytes", "predicted peak", "MiB", MIB),
    ("loss", "loss", "", 1),
    ("status", "status", "", 0),
)
"""Columns of the table: key, heading, unit, and what the values are divided by; 0 is text."""


def contents(frame: pd.DataFrame) -> dict[str, Any]:
    """Everything that the page shows, as plain data; `frame` has the columns of :mod:`analysis.load`."""
    frame = frame.reset_index(drop=True)
    frame = frame.assign(off=frame["predicted_step_s"] / frame["step_s"] - 1, workload=_workloads(frame))
    best, columns = _best(frame), _columns(frame)
    return {
        "counts": frame["status"].value_counts().to_dict(),
        "columns": [{"name": heading, "unit": unit, "text": not scale} for _, heading, unit, scale in columns],
        "runs": [[_cell(row[key], scale) for key, _, _, scale in columns] for _, row in frame.iterrows()],
        "names": list(frame["name"]),
        "reasons": list(frame["reason"].fillna("")),
        "folders": list(frame["folder"].astype(str)),
        "commands": _commands(frame["folder"], frame["command"]),
        "best": best,
        "provenance": _provenance(frame),
        "engines": [table for workload, rows in ask.workloads(frame) if (table := _engines(workload.title, rows))],
        "figures": [figure for workload, rows in ask.workloads(frame) for figure in figures.of_sweep(workload.title, rows)],
        "periods": list(_periods(frame, best)),
    }


def _provenance(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """When, where and of what the runs are: all different values."""
    times = [datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC") for time in sorted(frame["time"].dropna())]
    when = " to ".join(dict.fromkeys((*times[:1], *times[-1:])))
    words = {key: ", ".join(map(str, frame[key].dropna().unique())) for key in PROVENANCE[1:]}
    told = {"date": when, **words, "workloads": "; ".join(workload.title for workload, _ in ask.workloads(frame))}
    return [(key, value or "not recorded") for key, value in told.items()]


def _engines(title: str, rows: pd.DataFrame) -> dict[str, Any] | None:
    """The fastest plan of mdcs within each budget beside each other engine; None without another engine."""
    points = ask.best_points(rows, "budget_bytes")
    if not len(points) or ask.time_of(ask.drawn(rows)) != "step_s":
        return None
    peers = points["label"].isin(ask.peers(rows))
    if not peers.any():
        return None
    own = points[~peers].sort_values("step_s").drop_duplicates("budget_bytes")
    base = own["step_s"].min()
    cells = [
        [("" if peer else "mdcs, ") + row["label"], "" if peer else ask.budget_words(row["budget_bytes"]),
         *(row[key] * 1e3 for key in ("step_s", "step_s_p10", "step_s_p90")), row["step_s"] / base, row["exposed_s"] * 1e3,
         row["overlap_ratio"], row["bytes_total"] / 1e6, row["peak_bytes"] / MIB, row["runs"]]
        for of, peer in ((own, False), (points[peers], True)) for _, row in of.sort_values("step_s").iterrows()
    ]  # fmt: skip
    return {"title": title, "rows": cells}


def _columns(frame: pd.DataFrame) -> list[tuple[str, str, str, float]]:
    """`COLUMNS`, with the settings that were swept, as numbers where all of them are; without the workload where it is one."""
    swept = ask.swept(frame)
    alike = [(key, short(key, swept), "", float(ask.numbers(frame[key]).notna().eq(frame[key].notna()).all())) for key in swept]
    first = COLUMNS[frame["workload"].nunique() < 2 : 3]  # one workload is named above
    return [*first, *alike, *COLUMNS[3:]]


def _workloads(frame: pd.DataFrame) -> pd.Series:
    titles = pd.Series("", index=frame.index)
    for workload, rows in ask.workloads(frame):
        titles[rows.index] = workload.title
    return titles


def _cell(value: Any, scale: float) -> Any:
    if pd.isna(value):
        return None
    return value / scale if scale else words(value)


def _best(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the fastest run within each budget, by workload."""
    return [
        {
            "run": int(row.name),
            "workload": workload.title,
            "budget": ask.budget_words(row["within_bytes"]),
            "label": ask.label(row),
        }
        for workload, rows in ask.workloads(frame)
        for _, row in ask.best_within_budgets(rows).iterrows()
    ]


def _commands(folders: pd.Series, own: pd.Series) -> list[str | None]:
    """Return the command that runs each job again: from the sweep.json above its folder, else its own; None without any."""
    known: dict[Path, str] = {}
    for above in {parent for folder in folders for parent in Path(folder).parents if (parent / "sweep.json").is_file()}:
        jobs = json.loads((above / "sweep.json").read_text(encoding="utf-8"))["jobs"]
        for job in jobs:
            if job["folder"] is not None:
                known[above / job["folder"]] = _command(job["overrides"])
    return [known.get(Path(folder), None if pd.isna(command) else command) for folder, command in zip(folders, own, strict=True)]


def _command(overrides: list[str]) -> str:
    # An experiment may itself be a sweep; this is one job of it.
    one = ["hydra.mode=RUN"] if any(each.startswith(("experiment=", "+experiment=")) for each in overrides) else []
    return f"{PROGRAM} {shlex.join([*overrides, *one])}"


def _periods(frame: pd.DataFrame, best: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Timeline and memory of the best runs that have them."""
    seen: set[int] = set()
    for entry in best:
        index = entry["run"]
        if index in seen or len(seen) == PERIODS or not (Path(frame["folder"][index]) / METRICS).is_file():
            continue
        run = load_run(frame["folder"][index])
        measured, predicted = run.timeline(), run.predicted_timeline()
        shown = measured or predicted
        if shown is None:
            continue
        seen.add(index)
        yield {
            "run": index,
            "title": f"{entry['workload']} · {entry['budget']}: {entry['label']}",
            "timeline": figures.timeline(shown, predicted if measured else None, run.recomputed),
            "memory": figures.memory(shown if shown.memory else predicted, frame["budget_bytes"][index], run.recomputed),
        }
