"""The table of a sweep: for the terminal, and as CSV."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

import pandas as pd
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from analysis import tradeoff as ask

WIDTH = 120
_STATUS_STYLES = {"ok": "green", "failed": "bold red", "incomplete": "yellow"}


def print_table(frame: pd.DataFrame, file: IO[str] | None = None) -> None:
    """Print the sweep, a table per workload, sorted by strategy, scheduler, budget and share; the fastest run is
    marked, the reasons of failed and incomplete runs stand below. Without colours when `file` (default stdout) is
    no terminal; within `WIDTH` columns.
    """
    file = file or sys.stdout
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    # Rich takes a pipe for 80 columns wide; a table that is wrapped there cannot be read or searched.
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
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


def _print_group(console: Console, title: str, rows: pd.DataFrame) -> None:
    plain = not console.is_terminal
    table = Table(
        title=title,
        title_justify="left",
        title_style="" if plain else "bold",
        header_style="" if plain else "bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for heading in ("strategy", "scheduler"):
        table.add_column(heading, min_width=12 if heading == "scheduler" else 8, overflow="fold")
    for heading in (
        "budget\nMiB",
        "share",
        "step ms\n[p10–p90]",
        "pred.\nms",
        "overlap\nratio",
        "exposed\nms",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("comm\nMB", "peak MiB\nmeas. / pred."):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)

    best = ask.best_run(rows)
    reasons: list[str] = []
    order = ["strategy", "scheduler", "budget_bytes", "schedule_share"]
    for index, row in rows.sort_values(order, na_position="last", kind="stable").iterrows():
        status = str(row["status"])
        words = status
        if status != "ok":
            reasons.append(f"[{len(reasons) + 1}] {row['name']}: {row['reason'] or 'no reason given'}")
            words = f"{status} [{len(reasons)}]"
        elif best is not None and index == best.name:
            words = "ok, fastest"
        table.add_row(*_cells(row), Text(words, style=_STATUS_STYLES.get(status, "")))
    console.print(table)
    for reason in reasons:
        console.print(Padding(Text(reason), (0, 0, 0, 1)))
    console.print()


def _cells(row: pd.Series) -> list[str]:
    barrier = pd.notna(row["cross_iteration"]) and not row["cross_iteration"]
    step = _ms(row["step_s"])
    if step and pd.notna(row["step_s_p10"]) and pd.notna(row["step_s_p90"]):
        step += f" [{_ms(row['step_s_p10'])}–{_ms(row['step_s_p90'])}]"
    return [
        str(row["strategy"] if pd.notna(row["strategy"]) else "?"),
        str(row["scheduler"] if pd.notna(row["scheduler"]) else "?") + (" (barrier)" if barrier else ""),
        "none" if pd.isna(row["budget_bytes"]) else _number(row["budget_bytes"] / 2**20, "{:.0f}"),
        _number(row["schedule_share"], "{:.2f}"),
        step,
        _ms(row["predicted_step_s"]),
        _number(row["overlap_ratio"], "{:.2f}"),
        _ms(row["exposed_s"]),
        _number(row["bytes_total"] / 1e6, "{:.1f}"),
        f"{_mib(row['peak_bytes'])} / {_mib(row['predicted_peak_bytes'])}",
    ]


def _number(value: float, form: str) -> str:
    return "" if pd.isna(value) else form.format(value)


def _mib(size: float) -> str:
    return "–" if pd.isna(size) else f"{size / 2**20:.0f}" if size >= 100 * 2**20 else f"{size / 2**20:.1f}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return _number(
        milliseconds, "{:.0f}" if milliseconds >= 1000 else "{:.1f}" if milliseconds >= 10 else "{:.2f}"
    )
