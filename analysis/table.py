"""Tables: of sweeps for the terminal, as CSV and for LaTeX, and of any rows as Markdown."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import pandas as pd
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from analysis import questions as ask
from analysis.questions import value
from mdcs.sizes import MIB

WIDTH = 120
_NAMES = ("strategy", "scheduler")
_LEFT_OUT_FIRST = ("tokens\n/s", "\n[p10–p90]", "sent\nMB", "exposed\nms", "pred.\nms", "overlap\nratio")
"""Where there are too few columns, after those that are empty; table.csv has them all."""
_ms = ask.milliseconds
_STATUS_STYLES = {"ok": "green", "failed": "bold red", "incomplete": "yellow"}


def new_console(width: int = WIDTH, **options: Any) -> Console:
    """A console as wide as its terminal; without one `width` columns, for rich takes a pipe for 80, and wrapped tables
    cannot be read or searched."""
    console = Console(**options)
    console.width = console.width if console.is_terminal else width
    return console


def new_table(
    title: str, headings: Iterable[str], left: Iterable[str] = (), *, rows: Iterable[Iterable[str]] = (),
    caption: str | None = None, **columns: Any,
) -> Table:  # fmt: skip
    """A table in the look of all programs. Columns are right-aligned, except `left`; `columns` has options of each."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", **columns)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(frame: pd.DataFrame, file: IO[str] | None = None) -> None:
    """Print the sweep, a table per workload, sorted by strategy, scheduler, budget and share; the fastest run is
    marked, the reasons of failed and incomplete runs, and of doubts of predictions, stand below. Without colours when
    `file` (default stdout) is no terminal; within `WIDTH` columns."""
    console = new_console(file=file or sys.stdout, highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDTH)
    for title, rows in titled(frame):
        cells = cells_of(rows)
        for count in range(len(_LEFT_OUT_FIRST) + 1):  # else rich would squeeze columns, down to nothing
            table = _table(title, cells.drop(columns=list(_LEFT_OUT_FIRST[:count]), errors="ignore"))
            if console.measure(table, options=console.options.update(width=10 * WIDTH)).maximum <= console.width:
                break
        console.print(table)
        for note in _notes(rows.loc[cells.index]):
            console.print(Padding(Text(note), (0, 0, 0, 1)))
        console.print()


def titled(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The runs of each workload with its title, and last those of which none is known."""
    groups = ask.workloads(frame)
    left_out = frame.drop(index=[i for _, rows in groups for i in rows.index])
    return [*groups, ("workload not known", left_out)] if len(left_out) else groups


def write_csv(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write all columns of the sweep: times in seconds, sizes in bytes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)
    return path


def milliseconds(seconds: float | None) -> str:
    """Return milliseconds as text with one decimal; a dash for a value that is unknown or not finite."""
    return "–" if seconds is None or not math.isfinite(seconds) else f"{seconds * 1e3:.1f}"


def write_latex(rows: pd.DataFrame, path: str | Path) -> Path:
    """Write the plans of one workload as a LaTeX table (booktabs): medians and intervals over runs, as in pictures."""
    drawn = ask.drawn(rows)
    points = ask.median_by(drawn.assign(plan=ask.labels(drawn)), "plan", "budget_bytes", "schedule_share")
    cells = points.apply(figures_of, axis=1, result_type="expand").assign(runs=points["runs"].astype(str))
    cells = cells.loc[:, cells.ne("").any()].rename(columns=lambda heading: " ".join(heading.split()))
    if points["runs"].gt(1).any():
        cells = cells.rename(columns={"[p10–p90]": "[p10–p90; of runs 95 %]"})
    cells.insert(0, "plan", points["plan"])
    cells.to_latex(path, index=False, escape=True, column_format="l" + "r" * (len(cells.columns) - 1))
    return Path(path)


def markdown(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as Markdown. Rows that are shorter than the headings end in empty cells."""
    first, *others = [[*map(str, row)] for row in (headings, *rows)]
    lines = [f"| {' | '.join([*row, *[''] * (len(first) - len(row))])} |" for row in (first, *others)]
    return "\n".join([lines[0], "|" + "---|" * len(first), *lines[1:]])


def print_comparison(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Print what :func:`analysis.comparison.compare` has found, a table per workload."""
    headings = ("plan", *(f"{name}\nms" for name in names), "runs", "ratio", "95 %", "")
    console = new_console(highlight=False, markup=False)
    for workload, rows in table.groupby("workload", sort=False):
        made = new_table(str(workload) or "all plans", headings, left=("plan", ""))
        for row in rows.itertuples():
            ends = "" if pd.isna(row.low) else f"{row.low:.3f} to {row.high:.3f}"
            said = "slower" if row.low > 1 else "faster" if row.high < 1 else "cannot be told apart" if ends else ""
            runs = f"{row.runs}, {row.other_runs}"
            made.add_row(row.plan, _ms(row.step_s), _ms(row.other_step_s), runs, f"{row.ratio:.3f}", ends, said)
        console.print(made)


def cells_of(rows: pd.DataFrame, *, numbered: bool = True) -> pd.DataFrame:
    """The sorted table of a workload's runs in words, without empty columns. numbered: with the numbers of notes."""
    for key in reversed(ask.swept(rows)):
        by = pd.DataFrame({"number": ask.numbers(rows[key]), "word": rows[key].astype(str)})
        rows = rows.loc[by.sort_values(["number", "word"], kind="stable").index]
    rows = rows.sort_values(["strategy", "scheduler", "budget_bytes", "schedule_share"], kind="stable")
    settings = {key.removesuffix(".name").replace(".", "\n", 1): rows[key] for key in ask.swept(rows)}
    cells = pd.concat([
        pd.DataFrame({key: rows[key].fillna("?").astype(str) for key in _NAMES}),
        pd.DataFrame({key: of.map(lambda each: "" if pd.isna(each) else value(each)) for key, of in settings.items()}),
        pd.DataFrame([figures_of(row) for _, row in rows.iterrows()], index=rows.index),
    ], axis=1)  # fmt: skip
    cells["scheduler"] += rows["cross_iteration"].eq(False).map({True: " (barrier)", False: ""})
    cells["status"] = _status(rows, numbered)
    return cells.loc[:, cells.ne("").any()]


def _status(rows: pd.DataFrame, numbered: bool) -> pd.Series:
    """Status of each row, with the number of its note where something is said of it below the table."""
    words, best = rows["status"].copy(), ask.best_run(rows) if len(rows) > 1 else None
    if best is not None:
        several = any(best.name in runs.index for _, runs in ask.repeated(rows))
        words[best.name] += ", fastest median" if several else ", fastest"
    for number, index in enumerate(_noted(rows).index, start=1):
        words[index] += (", off" if words[index].startswith("ok") else "") + (f" [{number}]" if numbered else "")
    return words


def _noted(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs of which something is said below the table."""
    return rows[rows["status"].ne("ok") | rows["reason"].fillna("").ne("")]


def _notes(rows: pd.DataFrame) -> Iterator[str]:
    """Lines below the table of these runs: spreads of repetitions and of runs of one plan, and reasons."""
    several = [(f"runs of {name}", "", runs) for name, runs in ask.repeated(rows)]
    for runs in ask.alike(rows):
        if (settings := ask.settings(runs)).nunique() > 1:  # else they are repetitions
            told = f": {', '.join(settings.unique())}"
            several.append(("runs of one plan, so their difference is noise", told, runs))
    for what, which, runs in several:
        steps = runs["step_s"]
        yield f"{len(runs)} {what}: median {_ms(steps.median())} ms, {_ms(steps.min())} to {_ms(steps.max())}{which}"
    for number, (_, row) in enumerate(_noted(rows).iterrows(), start=1):
        yield f"[{number}] {row['name']}: {row['reason'] or 'no reason given'}"


def _table(title: str, cells: pd.DataFrame) -> Table:
    """The cells, close together. Names and settings fold where there is no room, figures do not."""
    table = new_table(title, ())
    table.show_edge, table.pad_edge, table.collapse_padding = False, False, True
    for heading, column in cells.items():
        folds = heading not in (*_FIGURES, "status")
        least = min(14 if heading in _NAMES else 4, column.str.len().max()) if folds else None
        justify: Literal["left", "right"] = "left" if heading in (*_NAMES, "status") else "right"
        table.add_column(str(heading), justify=justify, no_wrap=not folds, overflow="fold", min_width=least)
    for *words, status in cells.itertuples(index=False):
        table.add_row(*words, Text(status, style=_STATUS_STYLES.get(status.split()[0].rstrip(","), "")))
    return table


_FIGURES: dict[str, Callable[[pd.Series], str]] = {
    "budget\nMiB": lambda row: "none" if pd.isna(row["budget_bytes"]) else _mib(row["budget_bytes"]),
    "share": lambda row: _number(row["schedule_share"], "{:.2f}"),
    "step\nms": lambda row: _ms(row["step_s"]),
    "\n[p10–p90]": lambda row: _number(row["step_s_p10"], f"[{_ms(row['step_s_p10'])}–{_ms(row['step_s_p90'])}]"),
    "pred.\nms": lambda row: _ms(row["predicted_step_s"]),
    "overlap\nratio": lambda row: _number(row["overlap_ratio"], "{:.2f}"),
    "exposed\nms": lambda row: _ms(row["exposed_s"]),
    "sent\nMB": lambda row: _number(row["bytes_total"] / 1e6, "{:.1f}"),
    "peak MiB\nmeas. / pred.": lambda row: f"{_mib(row['peak_bytes'])} / {_mib(row['predicted_peak_bytes'])}",
    "tokens\n/s": lambda row: _number(row["throughput_tokens_s"], "{:,.0f}"),
    "MFU": lambda row: _number(row["mfu"], "{:.1%}"),
}


def figures_of(row: pd.Series) -> dict[str, str]:
    """The figures of a run, or of the median of several, in words by heading."""
    return {heading: words(row) for heading, words in _FIGURES.items()}


def _number(number: float, form: str) -> str:
    return "" if pd.isna(number) else form.format(number)


def _mib(size: float) -> str:
    return "–" if pd.isna(size) else f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"
