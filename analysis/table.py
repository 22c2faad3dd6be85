"""Tables: of sweeps for the terminal, as CSV and for LaTeX, and of any rows as Markdown."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

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
    for title, rows in titled(frame):
        _print_group(console, title, rows)


def titled(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The runs of each workload with its title, and last those of which none is known."""
    groups = ask.workloads(frame)
    left_out = frame.loc[~frame.index.isin([i for _, rows in groups for i in rows.index])]
    return [*groups, ("workload not known", left_out)] if len(left_out) else groups


def write_csv(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write all columns of the sweep: times in seconds, sizes in bytes. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)
    return path


def milliseconds(seconds: float | None) -> str:
    """In words, with one decimal; a dash for what is not known or not finite."""
    return "–" if seconds is None or not math.isfinite(seconds) else f"{seconds * 1e3:.1f}"


def write_latex(rows: pd.DataFrame, path: str | Path) -> Path:
    """Write the plans of one workload as a LaTeX table (booktabs): medians and intervals over runs, as in pictures.

    Returns the path.
    """
    drawn = ask.drawn(rows)
    points = ask.median_by(drawn.assign(plan=ask.labels(drawn)), "plan", "budget_bytes", "schedule_share")
    cells = pd.DataFrame(
        {"plan": row["plan"], **figures_of(row), "runs": str(row["runs"])} for _, row in points.iterrows()
    )
    cells = cells.loc[:, cells.ne("").any()].rename(columns=lambda heading: " ".join(heading.split()))
    cells = cells.rename(columns={"[p10–p90]": "[p10–p90; of runs 95 %]"} if points["runs"].gt(1).any() else {})
    path, alignment = Path(path), "l" + "r" * (len(cells.columns) - 1)
    path.write_text(cells.to_latex(index=False, escape=True, column_format=alignment), encoding="utf-8")
    return path


def markdown(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as Markdown. Rows that are shorter than the headings end in empty cells."""
    first, *others = [[*map(str, row)] for row in (headings, *rows)]
    lines = [f"| {' | '.join([*row, *[''] * (len(first) - len(row))])} |" for row in (first, *others)]
    return "\n".join([lines[0], "|" + "---|" * len(first), *lines[1:]])


def print_comparison(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Print what :func:`analysis.comparison.compare` has found, a table per workload."""
    one, other = names
    headings = ("plan", f"{one}\nms", f"{other}\nms", "runs", "ratio", "95 %", "")
    console = new_console(highlight=False, markup=False)
    for workload, rows in table.groupby("workload", sort=False):
        made = new_table(str(workload) or "all plans", headings, left=("plan", ""))
        for row in rows.itertuples():
            ends = "" if pd.isna(row.low) else f"{row.low:.3f} to {row.high:.3f}"
            said = "slower" if row.low > 1 else "faster" if row.high < 1 else "cannot be told apart" if ends else ""
            runs = f"{row.runs}, {row.other_runs}"
            made.add_row(row.plan, _ms(row.step_s), _ms(row.other_step_s), runs, f"{row.ratio:.3f}", ends, said)
        console.print(made)


def cells_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of a workload's runs, sorted, in words: a column per heading and swept setting, without those that are
    empty."""
    rows = _sorted(rows)
    cells = pd.DataFrame([_names(row) | figures_of(row) for _, row in rows.iterrows()], index=rows.index)
    for place, (heading, values) in enumerate(_settings(rows).items(), start=len(_NAMES)):
        cells.insert(place, heading, values.map(lambda of: "" if pd.isna(of) else value(of)))
    cells["status"] = _status(rows)
    return cells.loc[:, cells.ne("").any()]


def _settings(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Values of the swept settings, by heading."""
    return {
        key.removesuffix(".name").replace(".", "\n", 1): rows[key] for key in ask.swept(rows) if rows[key].notna().any()
    }


def _noted(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs of which something is said below the table."""
    return rows[rows["status"].ne("ok") | rows["reason"].fillna("").ne("")]


def _print_group(console: Console, title: str, rows: pd.DataFrame) -> None:
    cells, swept = cells_of(rows), _settings(rows)
    rows = rows.loc[cells.index]
    for count in range(len(_LEFT_OUT_FIRST) + 1):  # else rich would squeeze columns, down to nothing
        table = _table(console, title, cells.drop(columns=list(_LEFT_OUT_FIRST[:count]), errors="ignore"), swept)
        if console.measure(table, options=console.options.update(width=10 * WIDTH)).maximum <= console.width:
            break
    console.print(table)
    for name, runs in ask.repeated(rows):
        steps = runs["step_s"]
        times = f"median {_ms(steps.median())} ms, {_ms(steps.min())} to {_ms(steps.max())}"
        _note(console, f"{len(runs)} runs of {name}: {times}")
    for runs in ask.alike(rows):
        steps, told = runs["step_s"], ", ".join(dict.fromkeys(ask.settings(runs)))
        if ask.settings(runs).nunique() > 1:  # else they are repetitions, which have a line
            times = f"median {_ms(steps.median())} ms, {_ms(steps.min())} to {_ms(steps.max())}"
            _note(console, f"{len(runs)} runs of one plan, so their difference is noise: {times}: {told}")
    for number, (_, row) in enumerate(_noted(rows).iterrows(), start=1):
        _note(console, f"[{number}] {row['name']}: {row['reason'] or 'no reason given'}")
    console.print()


def _note(console: Console, words: str) -> None:
    console.print(Padding(Text(words), (0, 0, 0, 1)))


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    order = ["strategy", "scheduler", "budget_bytes", "schedule_share"]
    for key in reversed(ask.swept(rows)):
        by = pd.DataFrame({"number": ask.numbers(rows[key]), "word": rows[key].astype(str)})
        rows = rows.loc[by.sort_values(["number", "word"], kind="stable").index]
    return rows.sort_values(order, na_position="last", kind="stable")


def _status(rows: pd.DataFrame) -> list[str]:
    """Status of each row, with the number of its note where something is said of it below the table."""
    best, noted = ask.best_run(rows) if len(rows) > 1 else None, list(_noted(rows).index)
    several = {index for _, runs in ask.repeated(rows) for index in runs.index}
    words = []
    for index, status in rows["status"].items():
        if status == "ok" and best is not None and index == best.name:
            status += ", fastest median" if index in several else ", fastest"
        if index in noted:
            status += f"{', off' if status.startswith('ok') else ''} [{noted.index(index) + 1}]"
        words.append(status)
    return words


def _table(console: Console, title: str, cells: pd.DataFrame, swept: Mapping[str, pd.Series]) -> Table:
    bold = "bold" if console.is_terminal else ""
    table = Table(title=title, title_justify="left", title_style=bold, header_style=bold, box=box.SIMPLE_HEAD,
                  show_edge=False, padding=(0, 1), collapse_padding=True, pad_edge=False)  # fmt: skip
    for heading, column in cells.items():
        if heading in _NAMES:  # usual names do not fold, however many columns a sweep has
            table.add_column(heading, min_width=min(14, max(8, column.str.len().max())), overflow="fold")
        elif heading in swept:
            numeric = ask.numbers(swept[str(heading)]).notna().any()
            table.add_column(heading, justify="right" if numeric else "left", min_width=4, overflow="fold")
        else:
            table.add_column(str(heading), justify="left" if heading == "status" else "right", no_wrap=True)
    for *words, status in cells.itertuples(index=False):
        table.add_row(*words, Text(status, style=_STATUS_STYLES.get(status.split()[0].rstrip(","), "")))
    return table


def _names(row: pd.Series) -> dict[str, str]:
    strategy, scheduler = (str(row[key]) if pd.notna(row[key]) else "?" for key in _NAMES)
    barrier = pd.notna(row["cross_iteration"]) and not row["cross_iteration"]
    return {"strategy": strategy, "scheduler": scheduler + (" (barrier)" if barrier else "")}


def figures_of(row: pd.Series) -> dict[str, str]:
    """The figures of a run, or of the median of several, in words by heading."""
    return {
        "budget\nMiB": "none" if pd.isna(row["budget_bytes"]) else _mib(row["budget_bytes"]),
        "share": _number(row["schedule_share"], "{:.2f}"),
        "step\nms": _ms(row["step_s"]),
        "\n[p10–p90]": "" if pd.isna(row["step_s_p10"]) else f"[{_ms(row['step_s_p10'])}–{_ms(row['step_s_p90'])}]",
        "pred.\nms": _ms(row["predicted_step_s"]),
        "overlap\nratio": _number(row["overlap_ratio"], "{:.2f}"),
        "exposed\nms": _ms(row["exposed_s"]),
        "sent\nMB": _number(row["bytes_total"] / 1e6, "{:.1f}"),
        "peak MiB\nmeas. / pred.": f"{_mib(row['peak_bytes'])} / {_mib(row['predicted_peak_bytes'])}",
        "tokens\n/s": _number(row["throughput_tokens_s"], "{:,.0f}"),
        "MFU": _number(row["mfu"], "{:.1%}"),
    }


def _number(number: float, form: str) -> str:
    return "" if pd.isna(number) else form.format(number)


def _mib(size: float) -> str:
    return "–" if pd.isna(size) else f"{size / MIB:.0f}" if size >= 100 * MIB else f"{size / MIB:.1f}"
