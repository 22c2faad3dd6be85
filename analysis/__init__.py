"""Read what runs and sweeps wrote, compare prediction with measurement, draw it.

`python -m analysis FOLDER` writes the table and all pictures of a sweep or a run, `python -m analysis report FOLDER` one page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.load import Run, load_run, load_sweep, table_of
    from analysis.page import write_page
    from analysis.questions import best_run, stop_point, swept
    from analysis.report import write_report
    from analysis.sources import runs
    from analysis.table import print_table, write_csv

# Imported on first use: pandas and matplotlib take a second, and a typo on the command line need not wait for them.
_LAZY = {
    **dict.fromkeys(("Run", "load_run", "load_sweep", "table_of"), "analysis.load"),
    "write_report": "analysis.report",
    "runs": "analysis.sources",
    "write_page": "analysis.page",
    **dict.fromkeys(("print_table", "write_csv"), "analysis.table"),
    **dict.fromkeys(("best_run", "stop_point", "swept"), "analysis.questions"),
}

__all__ = [
    "Run",
    "best_run",
    "load_run",
    "load_sweep",
    "print_table",
    "runs",
    "stop_point",
    "swept",
    "table_of",
    "write_csv",
    "write_page",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
