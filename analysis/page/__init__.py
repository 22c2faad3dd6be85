"""A sweep as one HTML page that needs nothing beside it: opened from a disk, without a network or a server.

It has the tables of :mod:`analysis.table` and, as SVG, the pictures of :mod:`analysis.report`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

import pandas as pd
from matplotlib.figure import Figure

from analysis import questions as ask
from analysis.events import METRICS
from analysis.load import PROVENANCE, load_run
from analysis.pictures.style import svg
from analysis.report import curves_of, period_of
from analysis.table import cells_of, figures_of, titled

PROGRAM = "mdcs train"
PERIODS = 8
"""Number of the best runs that are shown slot by slot; more would make the page large."""


def write_page(frame: pd.DataFrame, path: str | Path, title: str = "sweep") -> Path:
    """Write the page of the runs in `frame` (:func:`analysis.runs`) and return its path."""
    frame = frame.reset_index(drop=True)
    repeatable = frame.assign(command=commands(frame))
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    text = page.substitute(
        title=escape(title),
        counts=", ".join(f"{number} {status}" for status, number in frame["status"].value_counts().items()),
        provenance="".join(f"<dt>{key}</dt><dd>{escape(value)}</dd>" for key, value in provenance(frame).items()),
        workloads="\n".join(part for workload, rows in titled(repeatable) for part in _workload(workload, rows)),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def provenance(frame: pd.DataFrame) -> dict[str, str]:
    """Return when and where the runs were made, and of what: all different values."""
    times = pd.to_datetime(frame["time"].agg(["min", "max"]).dropna(), unit="s").dt.strftime("%Y-%m-%d %H:%M UTC")
    told = {"date": " to ".join(times.unique())}
    told |= {key: ", ".join(map(str, frame[key].dropna().unique())) for key in PROVENANCE[1:]}
    return {key: value or "not recorded" for key, value in told.items()}


def commands(frame: pd.DataFrame) -> list[str | None]:
    """The command that runs each job again: from the sweep.json above its folder, else its own, or None."""
    known: dict[Path, str] = {}
    for sweep in {above for folder in frame["folder"] for above in Path(folder).parents}:
        file = sweep / "sweep.json"
        for job in json.loads(file.read_text(encoding="utf-8"))["jobs"] if file.is_file() else ():
            if job["folder"] is not None:
                # An experiment may itself be a sweep; this is one job of it.
                sweeps = any(each.startswith(("experiment=", "+experiment=")) for each in job["overrides"])
                words = [*job["overrides"], *(["hydra.mode=RUN"] if sweeps else [])]
                known[sweep / job["folder"]] = f"{PROGRAM} {shlex.join(words)}"
    own = frame["command"].where(frame["command"].notna(), None)
    return [known.get(Path(folder), command) for folder, command in zip(frame["folder"], own, strict=True)]


def best_plans(rows: pd.DataFrame) -> pd.DataFrame:
    """The cells of the fastest run within each budget of a workload, the budget first."""
    best = ask.best_within_budgets(rows)
    cells = cells_of(rows, numbered=False).loc[best.index]
    cells.insert(0, "within", list(best["within_bytes"].map(ask.budget_words)))
    return cells


def engines(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest plan of mdcs within each budget, then each other engine; empty without another engine."""
    points = ask.best_points(rows, "budget_bytes").sort_values("step_s")
    peers = points["label"].isin(ask.peers(rows))
    if not peers.any() or ask.time_of(ask.drawn(rows)) != "step_s":
        return pd.DataFrame()
    own = points[~peers].drop_duplicates("budget_bytes").sort_values("budget_bytes")
    shown = pd.concat([own.assign(label="mdcs, " + own["label"]), points[peers]], ignore_index=True)
    cells = shown.apply(figures_of, axis=1, result_type="expand").assign(runs=shown["runs"].astype(str))
    ratio = (shown["step_s"] / own["step_s"].min()).map("{:.2f}".format)
    cells.insert(0, "× fastest\nof mdcs", ratio if len(own) else "")
    cells.insert(0, "engine", shown["label"])
    return cells.loc[:, cells.ne("").any()]


def _workload(title: str, rows: pd.DataFrame) -> Iterator[str]:
    yield f"<h2>{escape(title)}</h2>"
    measured = len(ask.measured(rows)) > 0
    if measured:
        yield f"<h3>Best plan of each budget</h3>{_table(best_plans(rows), rows)}"
    if len(peers := engines(rows)):
        yield f"<h3>Beside other engines</h3>{_table(peers)}"
    yield from (_picture(figure) for _, figure in curves_of(rows))
    # without the numbers of notes: here the reason stands under the run's name
    yield f"<h3>All runs</h3>{_table(cells_of(rows, numbered=False), rows, 'runs')}"
    if measured:
        yield from _periods(rows)


def _periods(rows: pd.DataFrame) -> Iterator[str]:
    """Timeline and memory of the best runs that have them, the first one open."""
    best = ask.best_within_budgets(rows).drop_duplicates("folder")
    opened = " open"
    for _, row in best[[(Path(folder) / METRICS).is_file() for folder in best["folder"]]].head(PERIODS).iterrows():
        title = f"{ask.budget_words(row['within_bytes'])}: {ask.setting(row)}"
        pictures = [_picture(figure) for _, figure in period_of(load_run(row["folder"]), title, row["budget_bytes"])]
        if pictures:
            summary = f"<summary>Timeline and memory, {escape(title)}</summary>"
            yield f"<details{opened}>{summary}{''.join(pictures)}</details>"
            opened = ""


def _picture(figure: Figure) -> str:
    """The picture; who cannot see it is told its titles."""
    titles = [figure.get_suptitle(), *(axes.get_title("left") for axes in figure.axes)]
    return f'<div class="picture" role="img" aria-label="{escape(". ".join(filter(None, titles)))}">{svg(figure)}</div>'


def _table(cells: pd.DataFrame, runs: pd.DataFrame | None = None, kind: str = "") -> str:
    """A table of texts; with `runs`, which have its index, the last column has each run's name and how to repeat it."""
    cells = cells.map(escape)
    for heading in cells.columns.intersection(["within", "strategy", "scheduler", "engine", "status"]):
        cells[heading] = '<div class="text">' + cells[heading] + "</div>"
    if runs is not None:
        cells["run"] = [_repeat(runs.loc[index]) for index in cells.index]
    cells = cells.rename(columns=lambda heading: escape(str(heading)).replace("\n", "<br>"))
    with pd.option_context("display.max_colwidth", None):
        table = cells.to_html(escape=False, index=False, border=0, classes=kind, justify="unset")
    return f'<div class="scroll">{table}</div>'


def _repeat(run: pd.Series) -> str:
    command = "its settings are in config.yaml" if pd.isna(run["command"]) else f"<code>{escape(run['command'])}</code>"
    told = f"<p>{escape(run['reason'] or '')}</p><p>{command}</p><p>in {escape(run['folder'])}</p>"
    return f'<details class="text"><summary>{escape(run["name"])}</summary>{told}</details>'
