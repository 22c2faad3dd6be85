"""Read what runs and sweeps wrote, compare prediction with measurement, draw it.

`python -m analysis FOLDER` writes the table and all pictures of a sweep or a run, and one page of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Imported on first use: pandas and matplotlib take a second, and a typo on the command line need not wait for them.
_LAZY = {
    **dict.fromkeys(("Run", "load_run", "table_of"), "analysis.load"),
    **dict.fromkeys(("runs", "steps"), "analysis.sources"),
    "write_report": "analysis.report",
    "compare": "analysis.comparison",
    "write_page": "analysis.page",
    **dict.fromkeys(("print_table", "write_csv"), "analysis.table"),
    **dict.fromkeys(("best_run", "stop_point", "swept"), "analysis.questions"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
