"""Read what runs and sweeps wrote, compare prediction with measurement, draw it.

`python -m analysis FOLDER` writes the table and all pictures of a sweep or a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.load import Run, load_run, load_sweep, table_of
    from analysis.questions import best_run, stop_point
    from analysis.report import write_report
    from analysis.table import print_table, write_csv

# Imported on first use: pandas and matplotlib take a second, and a typo on the command line need not wait for them.
_LAZY = {
    **dict.fromkeys(("Run", "load_run", "load_sweep", "table_of"), "analysis.load"),
    "write_report": "analysis.report",
    **dict.fromkeys(("print_table", "write_csv"), "analysis.table"),
    **dict.fromkeys(("best_run", "stop_point"), "analysis.questions"),
}

__all__ = [
    "Run",
    "best_run",
    "load_run",
    "load_sweep",
    "print_table",
    "stop_point",
    "table_of",
    "write_csv",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
