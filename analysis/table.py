"""The table of a sweep: for the terminal, and as CSV."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from analysis import questions as ask
from analysis.settings import value
from mdcs.sizes import MIB

WIDTH = 120
_HEADINGS = {
    "strategy": "strategy",
    "scheduler": "scheduler",
    "budget": "budget\nMiB",
    "share": "share",
    "step": "step ms\n[p10–p90]",
    "range": "",  # in the same column
    "predicted": "pred.\nms",
    "overlap": "overlap\nratio",
    "exposed": "exposed\nms",
    "sent": "sent\nMB",
    "peak": "peak MiB\nmeas. / pred.",
    "tokens": "tokens\n/s",
    "mfu": "MFU",
    "status": "status",
}
_LEFT_OUT_FIRST = ("tokens", "range", "sent", "exposed", "predicted", "overlap")
"""Where there are too few columns, after those that are empty; table.csv has them all."""
_ms = ask.milliseconds
_STATUS_STYLES = {"ok": "green", "failed": "bold red", "incomplete": "yellow"}


def new_console(width: int = WIDTH, **options: Any) -> Console:
    """A console as wide as its terminal; without one `width` columns, for rich takes a pipe for 80, and wrapped tables
    cannot be read or searched.
    """
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
    marked, the reasons of failed and incomplete runs, and of doubts of predictions, stand below. Without colours
    when `file` (default stdout) is no terminal; within `WIDTH` columns.
    """
    file = file or sys.stdout
    console = new_console(file=file, highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDTH)
    groups = ask.workloads(frame)
    left_out = frame.loc[~frame.index.isin([i for _, rows in groups for i in rows.index])]
    for workload, rows in groups:
        _print_group(console, workload.title, rows)
    if len(left_out):
        _print_group(console, "workload not known", left_out)


def write_csv(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write all columns of the sweep: times in seconds, sizes in bytes. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)
    return path


def milliseconds(seconds: float | None) -> str:
    """In words, with one decimal; a dash for what is not known or not finite."""
    return "–" if seconds is None or not math.isfinite(seconds) else f"{seconds * 1e3:.1f}"


def _print_group(console: Console, title: str, rows: pd.DataFrame) -> None:
    plain = not console.is_terminal
    table = _table(title, rows, plain=plain)
    empty = [name for name, column in (("share", "schedule_share"), ("budget", "budget_bytes")) if rows[column].isna().all()]
    left_out = (*empty, *_LEFT_OUT_FIRST)
    for count in range(1, len(left_out) + 1):  # else rich would squeeze columns, down to nothing
        if console.measure(table, options=console.options.update(width=10 * WIDTH)).maximum <= console.width:
            break
        table = _table(title, rows, plain=plain, without=left_out[:count])
    console.print(table)
    for name, runs in ask.repeated(rows):
        steps = sorted(runs["step_s"])
        words = f"{len(runs)} runs of {name}: median {_ms(runs['step_s'].median())} ms, {_ms(steps[0])} to {_ms(steps[-1])}"
        console.print(Padding(Text(words), (0, 0, 0, 1)))
    for number, row in enumerate((row for _, row in _sorted(rows).iterrows() if _has_note(row)), start=1):
        reason = f"[{number}] {row['name']}: {row['reason'] or 'no reason given'}"
        console.print(Padding(Text(reason), (0, 0, 0, 1)))
    console.print()


def _has_note(row: pd.Series) -> bool:
    """Whether something is said of it below the table: of what is not ok, and of predictions in doubt."""
    return bool(row["status"] != "ok" or (pd.notna(row["reason"]) and row["reason"]))


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    order = ["strategy", "scheduler", "budget_bytes", "schedule_share"]
    for key in reversed(ask.swept(rows)):
        by = pd.DataFrame({"number": ask.numbers(rows[key]), "word": rows[key].astype(str)})
        rows = rows.loc[by.sort_values(["number", "word"], kind="stable").index]
    return rows.sort_values(order, na_position="last", kind="stable")


def _table(title: str, rows: pd.DataFrame, *, plain: bool, without: Sequence[str] = ()) -> Table:
    bold = "" if plain else "bold"
    table = Table(title=title, title_justify="left", title_style=bold, header_style=bold, box=box.SIMPLE_HEAD, show_edge=False,
                  padding=(0, 1), collapse_padding=True, pad_edge=False)  # fmt: skip
    swept = {key: key.removesuffix(".name").replace(".", "\n", 1) for key in ask.swept(rows) if rows[key].notna().any()}
    headings = {name: heading for name, heading in {**_HEADINGS, **swept}.items() if name not in without}
    known = {"tokens": "throughput_tokens_s", "mfu": "mfu"}
    headings = {name: heading for name, heading in headings.items() if name not in known or rows[known[name]].notna().any()}
    order = ("strategy", "scheduler", *swept)
    headings = {name: headings[name] for name in (*order, *(name for name in headings if name not in order))}
    if "range" in without:
        headings["step"] = "step\nms"
    for name, heading in headings.items():
        if name in ("strategy", "scheduler"):
            names = rows[name].astype(str)
            # Usual names do not fold, however many columns a sweep has.
            table.add_column(heading, min_width=min(14, max(8, names.str.len().max())), overflow="fold")
        elif name in swept:
            numeric = ask.numbers(rows[name]).notna().any()
            table.add_column(heading, justify="right" if numeric else "left", min_width=4, overflow="fold")
        elif name != "range":
            table.add_column(heading, justify="left" if name == "status" else "right", no_wrap=True)

    best = ask.best_run(rows) if len(rows) > 1 else None
    several = {index for _, runs in ask.repeated(rows) for index in runs.index}
    notes = 0
    for index, row in _sorted(rows).iterrows():
        status = str(row["status"])
        words = status
        if status == "ok" and best is not None and index == best.name:
            words = "ok, fastest median" if index in several else "ok, fastest"
        if _has_note(row):
            notes += 1
            words = f"{words}{', off' if status == 'ok' else ''} [{notes}]"
        cells: dict[str, str | Text] = {**_cells(row), **{key: _setting(row[key]) for key in swept}}
        if "range" in headings and cells["range"]:
            cells["step"] = f"{cells['step']} {cells['range']}"
        cells["status"] = Text(words, style=_STATUS_STYLES.get(status, ""))
        table.add_row(*(cells[name] for name in headings if name != "range"))
    return table


def _cells(row: pd.Series) -> dict[str, str]:
    barrier = pd.notna(row["cross_iteration"]) and not row["cross_iteration"]
    spread = pd.notna(row["step_s_p10"]) and pd.notna(row["step_s_p90"])
    return {
        "strategy": str(row["strategy"] if pd.notna(row["strategy"]) else "?"),
        "scheduler": str(row["scheduler"] if pd.notna(row["scheduler"]) else "?") + (" (barrier)" if barrier else ""),
        "budget": "none" if pd.isna(row["budget_bytes"]) else _mib(row["budget_bytes"]),
        "share": _number(row["schedule_share"], "{:.2f}"),
        "step": _ms(row["step_s"]),
        "range": f"[{_ms(row['step_s_p10'])}–{_ms(row['step_s_p90'])}]" if spread else "",
        "predicted": _ms(row["predicted_step_s"]),
        "overlap": _number(row["overlap_ratio"], "{:.2f}"),
        "exposed": _ms(row["exposed_s"]),
        "sent": _number(row["bytes_total"] / 1e6, "{:.1f}"),
        "peak": f"{_mib(row['peak_bytes'])} / {_mib(row['predicted_peak_bytes'])}",
        "tokens": _number(row["throughput_tokens_s"], "{:,.0f}"),
        "mfu": _number(row["mfu"], "{:.1%}"),
    }


def _setting(of: Any) -> str:
    return "" if pd.isna(of) else value(of)


def _number(number: float, form: str) -> str:
    return "" if pd.isna(number) else form.format(number)


def _mib(size: float) -> str:
    return "–" if pd.isna(size) else f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"
