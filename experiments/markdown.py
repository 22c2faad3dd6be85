"""Markdown for the pages that programs write."""

from __future__ import annotations

from collections.abc import Iterable


def table(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table. Rows that are shorter than the headings end in empty cells."""
    first = list(headings)
    cells = [[*row] for row in rows]
    lines = [_row(first), "|" + "---|" * len(first)]
    return "\n".join([*lines, *(_row([*each, *[""] * (len(first) - len(each))]) for each in cells)])


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def percent(fraction: float) -> str:
    """A difference, with its sign."""
    return f"{fraction * 100:+.1f} %"
