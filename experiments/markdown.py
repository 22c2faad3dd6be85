"""Lines of Markdown for the pages that programs write."""

from __future__ import annotations


def row(*cells: object) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(*cells: object) -> list[str]:
    """The first two lines of a table."""
    return [row(*cells), "|" + "---|" * len(cells)]


def percent(fraction: float) -> str:
    """A difference, with its sign."""
    return f"{fraction * 100:+.1f} %"
